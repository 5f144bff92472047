"""Losses beyond the cross entropy of logits, and predictions for metrics."""
