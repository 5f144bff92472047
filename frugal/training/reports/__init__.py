"""What a run says: what it begins with, its progress and records, and trackers that follow it."""
