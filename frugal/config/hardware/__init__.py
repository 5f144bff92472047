"""The GPUs and hosts there are: what is known of cards, what was measured, what this machine has."""
