"""Costs of faults, votes and checkpoints."""
