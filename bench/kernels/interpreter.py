"""Liger's kernels on a CPU, by Triton's interpreter: imported before Triton is, and has what the interpreter lacks.

Numbers in bf16 are computed in fp32 there, and each result is rounded to the nearest, as GPUs do one operation at a
time. (The interpreter of Triton 3.7 computes with their bits as if these were integers, and cuts fp32 off.)
"""

import os
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from numpy.typing import NDArray
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt
_Builder, _Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
_binary, _cast, _fp_to_fp = _Builder.binary_op, _Builder.cast_impl, _Builder.create_fp_to_fp


def _converted(argument: Any) -> Any:
    """Convert numbers, too: on a GPU a float is a number of the kernel's, with its methods."""
    if not isinstance(argument, float):
        return _convert(argument)
    return tl.tensor(_Handle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)


def _numbers(handle: Any) -> NDArray[Any]:
    """The numbers of a tensor; those of bf16, whose bits it has, in fp32."""
    if handle.dtype.scalar != tl.bfloat16:
        return np.asarray(handle.data)
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _rounded(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of numbers in bf16."""
    wide = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.float32))
    return wide.to(torch.bfloat16).view(torch.uint16).numpy().reshape(numbers.shape)


def _computed(builder: Any, left: Any, right: Any, operation: Callable[..., Any]) -> Any:
    if left.dtype.scalar != tl.bfloat16:
        return _binary(builder, left, right, operation)
    result = operation(_numbers(left), _numbers(right))
    return _Handle(result if result.dtype == bool else _rounded(result), tl.bfloat16)


def _in_type(builder: Any, source: Any, target: Any, *rounding: Any) -> Any:
    kinds = source.dtype.scalar, target.scalar
    if tl.bfloat16 not in kinds or kinds[0] == kinds[1]:
        return (_fp_to_fp if rounding else _cast)(builder, source, target, *rounding)
    numbers = _numbers(source)
    is_bf16 = kinds[1] == tl.bfloat16
    return _Handle(_rounded(numbers) if is_bf16 else numbers.astype(interpreter._get_np_dtype(target)), target.scalar)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _rsqrt(x):  # type: ignore[no-untyped-def]  # as above
    return tl.rsqrt(x)


interpreter._implicit_cvt = _converted
_Builder.binary_op, _Builder.cast_impl, _Builder.create_fp_to_fp = _computed, _in_type, _in_type
rms_norm.rsqrt = _rsqrt  # CUDA's library is not there
geglu.tanh = _tanh
