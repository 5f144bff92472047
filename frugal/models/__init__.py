"""The way from `--model` to a module that can be trained."""
