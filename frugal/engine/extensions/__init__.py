"""The user's own parts of a run: metric, callbacks, optimizer."""
