"""What a run was, read from its folder."""
