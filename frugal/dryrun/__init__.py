"""Rehearsal: the training engine on meta tensors, which have shapes and no storage."""
