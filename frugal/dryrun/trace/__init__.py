"""One micro-step of a model on meta tensors, recorded allocation by allocation."""
