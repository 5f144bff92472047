"""DeepSpeed's ZeRO optimizers as arithmetic over the trace of a model, instead of a rehearsal of the engine."""
