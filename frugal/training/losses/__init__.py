"""Losses that are more than a cross entropy, what is predicted, and evaluations."""
