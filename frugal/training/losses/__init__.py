"""Losses beyond the cross entropy of logits, predictions for metrics, and evaluation."""
