"""Which operators hidden states or logits pass, and whether these leave positions apart, so that slices may take turns.

A module's own forward is observed: a copy on meta runs on a number of positions that is a large prime, so that no other
size is like it, and every operator that its input passes is looked at. Each must be known to leave the positions apart,
and keep them the outermost dimension: elementwise operators, products with weights, norms, softmax and sums over other
dimensions, views. What is not known, draws random numbers (the masks of a dropout would be others when a slice runs
again) or writes to a buffer is refused by its name. Nothing is assumed of names or classes.
"""

import copy
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.torch_internals import tensors_in

NUM_POSITIONS = 7919
"""A prime, larger than most widths and a divisor of none."""

aten = torch.ops.aten

_COPIES = {aten._to_copy, aten.clone, aten.alias, aten.detach}
"""Elementwise, though torch does not tag them so."""

_SHAPES = {
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze,
    aten.expand, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind, aten.cat, aten.glu,
    aten.empty_like, aten.zeros_like, aten.ones_like,
}  # fmt: skip
_SUMS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.logsumexp}
"""Over the positions they leave none of them in the result's shape."""

_PRODUCTS = {aten.mm, aten.addmm, aten.bmm}
_SOFTMAX = {aten._softmax, aten._log_softmax, aten._safe_softmax}
_NORMS = {aten.native_layer_norm, aten._fused_rms_norm}


class PositionsMeetError(Exception):
    """Positions are not known to stay apart; the text says which operator is to blame."""


def meta_copy(module: nn.Module, *, without_layers: bool = False) -> Any:
    """Copy `module` to meta, needing no gradients, and if asked without the layers that stand in lists.

    The module may be on any device, also with parameters that ZeRO-3 has divided; it is not changed.
    """
    lists = [child for child in module.modules() if without_layers and isinstance(child, nn.ModuleList)]
    known: dict[int, Any] = {id(child): nn.ModuleList() for child in lists}
    with torch_internals.without_modes():  # a dry run is not to see it
        known |= {id(each): nn.Parameter(_like(each), requires_grad=False) for each in module.parameters()}
        known |= {id(each): _like(each) for each in module.buffers()}
        return copy.deepcopy(module, known)


def _like(tensor: Tensor) -> Tensor:
    # `ds_shape`: of a parameter that ZeRO-3 has divided
    return torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")


def widths(module: nn.Module) -> tuple[int, int]:
    """Return the width of a module's input and output, and of its widest result between, in elements a position.

    Raises:
        PositionsMeetError: it does not take hidden states `(..., positions, width)` alone and return others like
            them, or positions depend on each other.
    """
    copied = meta_copy(module).train()
    sizes = sorted({size for parameter in copied.parameters() for size in parameter.shape})
    dtype = next((parameter.dtype for parameter in copied.parameters() if parameter.is_floating_point()), None)
    reason = "it takes no hidden states alone"
    for width in sizes:
        try:
            with torch_internals.without_modes(), torch.no_grad():
                hidden = torch.empty((1, NUM_POSITIONS, width), dtype=dtype, device="meta")
                follower = Follower(copied)
                follower.follow(hidden)
                with follower:
                    result = copied(hidden)
        except PositionsMeetError as error:
            reason = str(error)
            continue
        except Exception:  # whatever a module trips over that is given what it does not expect
            continue
        if isinstance(result, Tensor) and result.shape == hidden.shape and id(result) in follower.followed:
            return width, max(each.numel() for each in follower.followed.values()) // NUM_POSITIONS
    raise PositionsMeetError(reason)


class Follower(torch_internals.DispatchMode):
    """A mode that follows a tensor of `NUM_POSITIONS` positions through the operators of `module`, a copy on meta.

    `is_elementwise`: no others are let pass, and `steps` are noted, to be done to a slice of it.
    `followed` has each tensor on the way by its id; `steps` the operators, their arguments and what they returned.
    """

    def __init__(self, module: nn.Module, *, is_elementwise: bool = False) -> None:
        super().__init__()
        self.followed: dict[int, Tensor] = {}
        self.steps: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._is_elementwise = is_elementwise
        self._buffers = {id(buffer) for buffer in module.buffers()}

    def follow(self, tensor: Tensor) -> Tensor:
        """Follow a tensor from here on, whose outermost dimension but for ones are the positions."""
        self.followed[id(tensor)] = tensor
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator, and refuse one that may bring positions together."""
        kwargs = kwargs or {}
        if self._is_elementwise and func is aten._local_scalar_dense.default:
            return args[0].dtype is torch.bool  # models ask whether all is as it should be: no padding, no packs
        out = func(*args, **kwargs)
        inputs = list(tensors_in((*args, *kwargs.values())))
        name = str(func.overloadpacket).removeprefix("aten.")
        if torch_internals.schema(func).is_mutable and any(id(tensor) in self._buffers for tensor in inputs):
            raise PositionsMeetError(f"{name} writes to a buffer")
        if not any(id(tensor) in self.followed for tensor in inputs):
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise PositionsMeetError(f"{name} draws random numbers, as a dropout does")
        if self._is_elementwise:
            self._note(name, func, args, kwargs, out)
        elif not all(self._is_apart(func, args, kwargs, inputs, each) for each in tensors_in((out,))):
            raise PositionsMeetError(f"{name} is not known to leave positions apart")
        for each in tensors_in((out,)):
            self.follow(each)
        return out

    def _is_apart(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], result: Tensor
    ) -> bool:
        """Tell whether the result's outermost dimension are the positions, which have not met."""
        kind = func.overloadpacket
        places = [dim for dim, size in enumerate(result.shape) if size == NUM_POSITIONS]
        strangers = [tensor for tensor in inputs if id(tensor) not in self.followed]
        if len(places) != 1 or prod(result.shape[: places[0]]) != 1:
            return False
        if any(NUM_POSITIONS in tensor.shape for tensor in strangers):
            return False
        if kind in _PRODUCTS:
            return [id(tensor) in self.followed for tensor in args[-2:]] == [True, False] and len(strangers) == (
                len(args) - 1
            )
        if kind in _SOFTMAX:
            return args[1] % result.dim() != places[0]
        if kind in _NORMS:
            return NUM_POSITIONS not in args[1]
        return torch.Tag.pointwise in func.tags or kind in _COPIES | _SHAPES | _SUMS

    def _note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note a step that can be done to a slice as it is; refuse others."""
        first = next(iter(self.followed.values()))
        if torch_internals.schema(func).is_mutable:
            raise PositionsMeetError(f"{name} changes them in place")
        is_elementwise = torch.Tag.pointwise in func.tags or func.overloadpacket in _COPIES
        if not is_elementwise or not isinstance(out, Tensor) or out.shape != first.shape:
            raise PositionsMeetError(f"{name} is not elementwise")
        for tensor in tensors_in((*args, *kwargs.values())):
            is_of_all = id(tensor) in self._buffers and all(size == 1 for size in tensor.shape[:-1])
            if id(tensor) not in self.followed and not is_of_all and (tensor.is_meta or tensor.dim()):
                raise PositionsMeetError(f"{name} takes a tensor that is no buffer of the model")
        self.steps.append((func, args, {key: value for key, value in kwargs.items() if key != "device"}, out))
