"""Fused kernels of Liger in the place of modules that compute the same."""
