"""DeepSpeed without a device: its engine on one that pretends, and its ZeRO optimizers as arithmetic over a trace."""
