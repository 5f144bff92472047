"""The user's own parts of a run: metric, early stopping, callbacks, optimizer."""
