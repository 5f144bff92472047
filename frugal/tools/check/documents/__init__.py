"""A file of another trainer: its values, their lines, and the fields of each tool that change nothing."""
