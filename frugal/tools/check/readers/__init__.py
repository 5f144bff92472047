"""One reader a tool: from its file to `Settings`."""
