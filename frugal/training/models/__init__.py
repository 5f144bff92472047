"""From what `--model` says to a module that can be trained."""
