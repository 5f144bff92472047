"""Training loops as people write them: their memory on a card, against what a dry run of them says."""
