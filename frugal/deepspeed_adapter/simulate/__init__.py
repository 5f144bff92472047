"""DeepSpeed's ZeRO optimizers as arithmetic over the trace of a model, instead of a dry run of the engine."""
