"""Tools beside the core, each imported by its own command only."""
