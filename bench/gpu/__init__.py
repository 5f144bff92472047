"""Predicted memory against that of a real GPU: `python -m bench.gpu.truth`."""
