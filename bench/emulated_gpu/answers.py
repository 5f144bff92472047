"""Answers that a program asks for and an emulated card cannot compute; imported in its processes (`late_answers`).

`if tensor` in transformers is answered with yes: masks are full and nothing is packed. EMULATED_GPU_MASKS=padded says
no instead. Blocks that the allocator hands out read as zeros.
"""

import ctypes
import os
import sys
from pathlib import Path

import torch

_truth = torch.Tensor.__bool__


def answer(tensor: torch.Tensor) -> bool:
    """`bool(tensor)`, which transformers asks of masks on the device."""
    if tensor.is_cuda and "/transformers/" in sys._getframe(1).f_code.co_filename:
        return os.environ.get("EMULATED_GPU_MASKS", "full") == "full"
    return _truth(tensor)


def attach() -> None:
    """Initialise CUDA, and have the emulated device told of each block of the allocator."""
    torch.cuda.init()
    libraries = Path(torch.__file__).parents[1] / "nvidia" / "cu13" / "lib"
    ctypes.CDLL(str(libraries / "libemulated_gpu_tracker.so")).emulated_gpu_attach()


if torch.cuda.is_available():  # without a card dry runs may run in this process, and look at who asks
    torch.Tensor.__bool__ = answer
    attach()
