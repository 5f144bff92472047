"""The page of a plan: memory over a step, and what other GPUs, micro-batches and strategies would take."""
