"""What is read while training."""
