"""Modules run Liger's kernels in the place of their own forward.

A replacement keeps the module: its parameters, names and hooks are as before, so that checkpoints, adapters, packed
weights and ZeRO-3 see no difference. Projections of an MLP still run as modules; only what is between them is fused.

A kernel overwrites only what nobody else has: the gate and the product's other factor, which are results of projections
that their MLP alone sees. Gradients that come from outside are copied, and so are queries and keys, whose projections
selective activation checkpointing may keep.

At each call: where a kernel cannot take the tensors (another device, weights in another type than activations, as norms
in fp32 inside a model in bf16), the module's own forward runs.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from frugal.models.fused import liger_internals, recognition
from frugal.models.fused.recognition import GatedMLP, RMSNorm

Fused = RMSNorm | GatedMLP | str
"""A norm, a gated MLP, or the name of the function by which a forward rotates."""


def apply(model: nn.Module) -> None:
    """Have the modules of `model` that compute what Liger's kernels do run these.

    Raises:
        RequestError: Liger is not installed, or lacks what is used of it.
    """
    liger_internals.library()
    for module, fused in _recognised(model):
        if isinstance(fused, RMSNorm):
            run: Any = partial(_norm, module.forward, module, fused)
        elif isinstance(fused, GatedMLP):
            run = partial(_gated, module.forward, module, fused)
        else:
            run = partial(_rotating, module.forward, module, fused)
        module.forward = run


def names(model: nn.Module) -> tuple[str, ...]:
    """Return what `apply` would replace, in words: `33 RMSNorm`, `16 SwiGLU`, `16 RoPE`."""
    counted = Counter(_name(fused) for _, fused in _recognised(model))
    return tuple(f"{number} {name}" for name, number in counted.items())


def _name(fused: Fused) -> str:
    if isinstance(fused, GatedMLP):
        return {"silu": "SwiGLU", "gelu": "GeGLU"}[fused.activation]
    return "RMSNorm" if isinstance(fused, RMSNorm) else "RoPE"


def _recognised(model: nn.Module) -> Iterator[tuple[nn.Module, Fused]]:
    """Yield the modules to replace. Those that are alike are tried once."""
    known: dict[Any, Fused | None] = {}
    can_rotate = recognition.angles_have_equal_halves(model)
    for module in model.modules():
        key = recognition.kind(module)
        if key not in known:
            fused = recognition.rms_norm(module) or recognition.gated_mlp(module)
            known[key] = fused or (recognition.rotation(module) if can_rotate else None)
        if (recognised := known[key]) is not None:
            yield module, recognised


def _norm(own: Callable[..., Tensor], module: nn.Module, norm: RMSNorm, x: Tensor) -> Tensor:
    (weight,) = module.parameters(recurse=False)
    if not liger_internals.can_launch(x) or weight.dtype != x.dtype:
        return own(x)
    is_in_place = False  # the gradient may be another module's, too, as where a residual is added
    library = liger_internals.library()
    result: Tensor = library.rms_norm(x, weight, norm.epsilon, norm.offset, norm.casting, is_in_place)
    return result


def _gated(own: Callable[..., Tensor], module: nn.Module, mlp: GatedMLP, x: Tensor) -> Tensor:
    if not liger_internals.can_launch(x):
        return own(x)
    gate, up = (module.get_submodule(name)(x) for name in (mlp.gate, mlp.up))
    if gate.dtype == up.dtype:
        product = getattr(liger_internals.library(), mlp.activation)(gate, up)
    else:
        product = recognition.activated(mlp.activation, gate) * up
    del gate, up
    result: Tensor = module.get_submodule(mlp.down)(product)
    return result


def _rotating(own: Callable[..., Any], module: nn.Module, name: str, *inputs: Any, **options: Any) -> Any:
    """Run a module's own forward, in which the function `name` of its file is Liger's meanwhile."""
    scope: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    theirs = scope[name]
    scope[name] = partial(_rotated, theirs)
    try:
        return own(*inputs, **options)
    finally:
        scope[name] = theirs


def _rotated(theirs: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *options: Any) -> Any:
    """Rotate queries and keys `(samples, heads, positions, size)`."""
    is_usual = not options and q.dim() == 4 and cos.dim() == 3 and q.shape[-1] == k.shape[-1] == cos.shape[-1]
    if is_usual and q.dtype == k.dtype == cos.dtype and q.shape[2] == cos.shape[1] and liger_internals.can_launch(q):
        return _Rotation.apply(q, k, cos, sin)
    return theirs(q, k, cos, sin, *options)


class _Rotation(torch.autograd.Function):
    """Liger's rotation, which writes to its inputs, on copies of them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k, cos, sin = liger_internals.library().rotate(_copied(q), _copied(k), cos, sin)
        ctx.save_for_backward(cos, sin)
        return q, k

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = map(_copied, grads)
        grad_q, grad_k = liger_internals.library().rotate_back(grad_q, grad_k, *ctx.saved_tensors)
        return grad_q, grad_k, None, None


def _copied(tensor: Tensor) -> Tensor:
    """Return a tensor that the kernel may write to; it copies itself what does not lie as it needs it."""
    lying = tensor.transpose(1, 2)
    return lying.clone().transpose(1, 2) if lying.is_contiguous() else tensor
