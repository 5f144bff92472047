"""Runnable comparisons; their results are data."""
