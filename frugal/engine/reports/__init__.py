"""Reports of a run: its first lines, progress, records and trackers, and how it ends."""
