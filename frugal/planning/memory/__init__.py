"""A step's memory as arithmetic: the stream of allocations, CUDA's allocator, what fills device, host and disk."""
