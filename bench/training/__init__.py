"""What training with a plan learns and how fast, beside others."""
