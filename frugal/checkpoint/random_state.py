"""States of random number generators, saved and restored for repeated steps, evaluations and checkpoints."""

import random
from typing import Any

import numpy as np
import torch


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the state of every generator of this process, as plain values and tensors."""
    numpy_name, numpy_keys, *numpy_rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (numpy_name, np.asarray(numpy_keys).tolist(), *numpy_rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore_generators(saved: dict[str, Any], device: torch.device) -> None:
    """Restore the state of every generator of this process."""
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["cuda"] is not None:
        torch.cuda.set_rng_state(saved["cuda"], device)


def seed_all(seed: int) -> None:
    """Start every generator of this process from `seed`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # CUDA's too
