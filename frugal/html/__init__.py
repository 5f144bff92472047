"""Pages: HTML files that need no network, what is drawn in them, and what they are made of."""
