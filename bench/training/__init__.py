"""Benchmarks of training with a plan: losses and speed beside others'."""
