"""How ranks reach rank 0, and know each other from strangers by the secret of their run."""
