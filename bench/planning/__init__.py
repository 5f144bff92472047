"""Benchmarks of planning: the quality of the choice, its latency, and mistakes that tests notice."""
