"""The only place that knows DeepSpeed: its JSON, private names, checkpoint files and behaviour."""
