"""Liger's kernels, and what is used of Liger and Triton beyond their documented interfaces: nothing else uses these.

A dry run calls Liger's own functions on meta tensors: they allocate as on a card, and launches are noted, not run.
"""

import ast
import functools
import inspect
import textwrap
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
    *needed("liger_kernel.ops.rope", "rotations", "rope_forward(q, k, cos, sin)", "rope_backward(dq, dk, cos, sin)"),
    *needed("triton.runtime.jit", "launches in a dry run", "KernelInterface.__getitem__(self, grid)"),
    *needed("triton.runtime.jit:JITFunction", "what a kernel reads and writes", "__init__:fn", "__init__:arg_names"),
)  # fmt: skip


@functools.cache
def library() -> SimpleNamespace:
    """Return Liger's functions `rms_norm`, `silu`, `gelu` (of gate and up), `rotate` and `rotate_back`.

    Raises:
        RequestError: Liger is not installed, or lacks what is used of it.
    """
    if (missing := what_is_missing()) is not None:
        reason, hint = missing
        what = "the plan's kernels are Liger's, which cannot run here"
        raise RequestError(what, because=reason, hint=f"{hint}, or plan with --kernels plain")
    required.verify("liger-kernel", NAMES)
    from liger_kernel.ops import geglu, rms_norm, rope, swiglu

    return SimpleNamespace(
        rms_norm=rms_norm.LigerRMSNormFunction.apply,
        silu=swiglu.LigerSiLUMulFunction.apply,
        gelu=geglu.LigerGELUMulFunction.apply,
        rotate=rope.rope_forward,
        rotate_back=rope.rope_backward,
    )


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
    global _is_noting
    if kernels == "plain":
        yield
        return
    library()
    from liger_kernel.ops.rms_norm import rms_norm_backward
    from triton.runtime.jit import KernelInterface

    def launch(kernel: Any, *args: Any, grid: Any = None, **kwargs: Any) -> None:
        launched(_traffic(kernel, args, kwargs))

    # its sums of a weight's gradient have a row for each processor, asked for by the name of the device's kind
    code = rms_norm_backward.__code__
    on_card = code.replace(co_consts=tuple("meta" if each == "cuda" else each for each in code.co_consts))
    card = SimpleNamespace(multi_processor_count=multiprocessors)
    with (
        patch.object(KernelInterface, "__getitem__", lambda kernel, grid: partial(launch, kernel, grid=grid)),
        patch.object(torch.cuda, "get_device_properties", lambda *_: card),
    ):
        _is_noting, rms_norm_backward.__code__ = True, on_card
        try:
            yield
        finally:
            _is_noting, rms_norm_backward.__code__ = False, code


def _traffic(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the bytes that one launch moves: a tensor that is read and written counts twice."""
    passes = _passes(kernel.fn)
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    return sum(passes[name] * value.nbytes for name, value in given.items() if isinstance(value, Tensor))


@functools.cache
def _passes(function: Callable[..., Any]) -> dict[str, int]:
    """Return for each parameter of a kernel whether it loads from it, stores to it, or both: 0, 1 or 2.

    Pointers are followed through assignments of the kernel's source.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    parameters = [each.arg for each in tree.args.args]
    origin = {name: name for name in parameters}
    used: set[tuple[str, str]] = set()

    def root(node: ast.expr) -> str | None:
        """Return the parameter that an address begins with."""
        while isinstance(node, ast.BinOp):
            node = node.left
        return origin.get(node.id) if isinstance(node, ast.Name) else None

    for node in sorted(ast.walk(tree), key=lambda each: getattr(each, "lineno", 0)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, begins = node.targets[0].id, root(node.value)
            if begins is not None:
                origin[name] = begins
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("load", "store")
        ):
            begins = root(node.args[0])
            if begins is not None:
                used.add((begins, node.func.attr))
    return {name: sum((name, way) in used for way in ("load", "store")) for name in parameters}
