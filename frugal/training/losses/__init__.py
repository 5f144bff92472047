"""How a model's loss is summed where it is not the plain cross entropy of what it is given."""
