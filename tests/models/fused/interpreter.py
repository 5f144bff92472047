"""Liger's kernels on a CPU, by Triton's interpreter: imported before Triton is, and has what the interpreter lacks."""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _converted(argument: Any) -> Any:
    """Convert numbers, too: on a GPU a float is a number of the kernel's, with its methods."""
    if not isinstance(argument, float):
        return _convert(argument)
    return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]  # as above
    return tl.rsqrt(x)


interpreter._implicit_cvt = _converted
rms_norm.rsqrt = _rsqrt  # CUDA's library is not there
geglu.tanh = _tanh
