"""Predicted memory against measured memory, on CPU ranks."""
