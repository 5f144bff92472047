"""What faults, votes and checkpoints cost."""
