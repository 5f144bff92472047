"""Sequence parallelism: several ranks share each sample, each a part of its positions, and attention by heads."""
