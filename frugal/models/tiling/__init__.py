"""Parts of a model that run over slices of the positions."""
