"""Output of commands: reports drawn to the width of a terminal, and previews of samples."""
