"""Weights of a model on their way to where they are trained: read, quantised, put in place."""
