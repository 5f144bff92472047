"""Parts of a model that run over slices of the positions: what may be cut, and how."""
