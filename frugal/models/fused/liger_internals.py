"""Liger's kernels, and what is used of Liger and Triton beyond their documented interfaces: nothing else uses these.

A dry run calls Liger's own functions on meta tensors: they allocate as on a card, and launches are noted, not run.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from frugal import required
from frugal.config.kernels import are_interpreted, what_is_missing
from frugal.errors import RequestError
from frugal.planning.strategy import Kernels
from frugal.required import needed

NAMES = (
    *needed(
        "liger_kernel.ops.rms_norm", "the norm; on meta it takes the planned card's processors",
        "LigerRMSNormFunction.forward(ctx, X, W, eps, offset, casting_mode, in_place)", "rms_norm_backward:cuda",
    ),
    *needed("liger_kernel.ops.swiglu", "the gated product", "LigerSiLUMulFunction.forward(ctx, a, b)"),
    *needed("liger_kernel.ops.geglu", "the gated product", "LigerGELUMulFunction.forward(ctx, a, b)"),
    *needed(
        "liger_kernel.ops.cross_entropy", "a row's loss and gradient in one kernel",
        "MAX_FUSED_SIZE", "liger_cross_entropy_kernel",
    ),
    *needed("liger_kernel.ops.rope", "rotations", "rope_forward(q, k, cos, sin)", "rope_backward(dq, dk, cos, sin)"),
    *needed("triton.runtime.jit", "launches in a dry run", "KernelInterface.__getitem__(self, grid)"),
    *needed("triton.runtime.jit:JITFunction", "what a kernel reads and writes", "__init__:fn", "__init__:arg_names"),
)  # fmt: skip


@functools.cache
def library() -> SimpleNamespace:
    """Return Liger's functions `rms_norm`, `silu`, `gelu` (of gate and up), `rotate` and `rotate_back`, and its module
    `cross_entropy`.

    Raises:
        RequestError: Liger is not installed, or lacks what is used of it.
    """
    if (missing := what_is_missing()) is not None:
        reason, hint = missing
        what = "the plan's kernels are Liger's, which cannot run here"
        raise RequestError(what, because=reason, hint=f"{hint}, or plan with --kernels plain")
    required.verify("liger-kernel", NAMES)
    from liger_kernel.ops import cross_entropy, geglu, rms_norm, rope, swiglu

    return SimpleNamespace(
        rms_norm=rms_norm.LigerRMSNormFunction.apply,
        silu=swiglu.LigerSiLUMulFunction.apply,
        gelu=geglu.LigerGELUMulFunction.apply,
        rotate=rope.rope_forward,
        rotate_back=rope.rope_backward,
        cross_entropy=cross_entropy,
    )


IN_PLACE = {
    "_swiglu_backward_kernel": ("a_ptr", "b_ptr"), "_geglu_tanh_backward_kernel": ("a", "b"),
    "_swiglu_backward_kernel_tiled": ("a_ptr", "b_ptr"), "_triton_rope": ("q_ptr", "k_ptr"),
}  # fmt: skip
"""The parameters that a kernel reads and writes; every other tensor it reads or writes once."""

_is_noting = False


def can_launch(tensor: Tensor) -> bool:
    """Return whether kernels take this tensor: on a GPU, in a dry run, or on a CPU that interprets them."""
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return tensor.is_cuda or (_is_noting if tensor.is_meta else are_interpreted())


@contextmanager
def noted(kernels: Kernels, multiprocessors: int, launched: Callable[[int], None]) -> Iterator[None]:
    """Have `kernels` on meta tensors do nothing inside the block, but call `launched` with the bytes that each reads
    and writes.

    `multiprocessors`: of the planned card.
    """
    if kernels == "plain":
        yield
        return
    library()
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from triton.runtime.jit import KernelInterface

    def launch(kernel: Any, *args: Any, grid: Any = None, **kwargs: Any) -> None:
        given, in_place = dict(zip(kernel.arg_names, args, strict=False)) | kwargs, IN_PLACE.get(kernel.fn.__name__, ())
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        launched(sum(tensor.nbytes * (1 + (name in in_place)) for name, tensor in tensors.items()))

    # its sums of a weight's gradient have a row for each processor, asked for by the name of the device's kind
    code = rms_norm_backward.__code__
    on_card = code.replace(co_consts=tuple("meta" if each == "cuda" else each for each in code.co_consts))
    card = SimpleNamespace(multi_processor_count=multiprocessors)
    with (
        patch.object(KernelInterface, "__getitem__", lambda kernel, grid: partial(launch, kernel, grid=grid)),
        patch.object(torch.cuda, "get_device_properties", lambda *_: card),
        patch(f"{__name__}._is_noting", True),
    ):
        rms_norm_backward.__code__ = on_card
        try:
            yield
        finally:
            rms_norm_backward.__code__ = code
