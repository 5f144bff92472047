"""Emulated CUDA cards: torch's unmodified CUDA build without a GPU, so that its allocator can be asked."""
