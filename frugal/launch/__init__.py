"""Starting a plan's ranks on one host or many, and starting them again."""
