"""Saved training state: atomic, verified, resharded when it is read on other ranks."""
