"""CUDA kernels on a real or an emulated card: which one attention takes, and what single calls allocate."""
