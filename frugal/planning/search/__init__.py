"""The search for the fastest strategy that fits."""
