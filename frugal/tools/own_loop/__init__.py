"""A training step that is not frugal's, dry-run on a card that is pretended to it."""
