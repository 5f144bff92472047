"""The training step on meta tensors, which have shapes and no storage: memory without a GPU."""
