"""Trials: a small model of a kind is run before there is a plan, to see how it behaves."""
