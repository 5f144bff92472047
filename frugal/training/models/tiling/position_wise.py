"""Whether a module does the same to each position by itself, so that it may run on some of them at a time.

The module's own forward is observed: a copy on meta runs on a number of positions that is a large prime, so that no
other size is like it, and every operator that the input passes is looked at. Each must be known to leave the positions
apart: elementwise operators, products with weights, norms, softmax and sums over other dimensions, views. What is not
known, draws random numbers (the masks of a dropout would be others when a slice runs again) or writes to a buffer is
refused by its name. Nothing is assumed of names or classes.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.training.measure.memory_watch import tensors_in
from frugal.training.models.tiling.meta_copy import meta_copy

NUM_POSITIONS = 7919
"""A prime, larger than most widths and a divisor of none."""

aten = torch.ops.aten

_COPIES = {
    aten._to_copy, aten.clone, aten.alias, aten.detach, aten.empty_like, aten.zeros_like, aten.ones_like,
}  # fmt: skip
_SHAPES = {
    aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand, aten.slice, aten.select,
    aten.split, aten.split_with_sizes, aten.unbind,
}  # fmt: skip
_RESHAPES = {aten.view, aten._unsafe_view, aten.reshape}
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm}
_OVER_DIMENSIONS = {
    aten._softmax, aten._log_softmax, aten._safe_softmax, aten.glu, aten.cat, aten.sum, aten.mean, aten.amax, aten.amin,
    aten.var, aten.logsumexp,
}  # fmt: skip
_NORMS = {aten.native_layer_norm, aten._fused_rms_norm}


class NotPositionWiseError(Exception):
    """A module that must see all positions at once; its text says which operator of it."""


@dataclass(frozen=True)
class PositionWise:
    """What was seen of a module that leaves positions apart, in elements a position.

    Attributes:
        width: of its input, and of its output.
        widest: the widest result between them.
    """

    width: int
    widest: int


def observed(module: nn.Module) -> PositionWise:
    """How wide a module is that takes hidden states `(..., positions, width)` alone and returns others like them.

    Raises:
        NotPositionWiseError: it does not, or positions depend on each other.
    """
    copied = meta_copy(module).train()
    sizes = sorted({size for parameter in copied.parameters() for size in parameter.shape})
    dtype = next((parameter.dtype for parameter in copied.parameters() if parameter.is_floating_point()), None)
    reason = "it takes no hidden states alone"
    for width in sizes:
        observer = _PositionObserver({id(buffer) for buffer in copied.buffers()})
        try:
            with torch_internals.without_modes(), torch.no_grad():
                hidden = torch.empty((1, NUM_POSITIONS, width), dtype=dtype, device="meta")
                observer.begin(hidden)
                with observer:
                    result = copied(hidden)
        except NotPositionWiseError as error:
            reason = str(error)
            continue
        except Exception:  # whatever a module trips over that is given what it does not expect
            continue
        if isinstance(result, Tensor) and result.shape == hidden.shape and observer.position_of(result) == 1:
            return PositionWise(width, observer.widest)
    raise NotPositionWiseError(reason)


class _PositionObserver(torch_internals.DispatchMode):
    """Follows the positions through the operators of a module."""

    def __init__(self, buffers: set[int]) -> None:
        super().__init__()
        self.widest = 0
        self._buffers = buffers
        self._positions: dict[int, int] = {}  # id of a tensor -> its dimension of positions
        self._kept: list[Tensor] = []  # so that no other gets the id of one that is gone

    def begin(self, hidden: Tensor) -> None:
        """Follow the positions of `hidden (1, positions, width)`."""
        self._follow(hidden, 1)

    def position_of(self, tensor: Tensor) -> int | None:
        """The dimension of positions of a tensor; None: it has none."""
        return self._positions.get(id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator, and see where it takes the positions."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(torch_internals.packet(func)).removeprefix("aten.")
        inputs = list(tensors_in((*args, *kwargs.values())))
        if torch_internals.schema(func).is_mutable and any(id(tensor) in self._buffers for tensor in inputs):
            raise NotPositionWiseError(f"{name} writes to a buffer")
        followed = [tensor for tensor in inputs if id(tensor) in self._positions]
        if not followed:
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotPositionWiseError(f"{name} draws random numbers, as a dropout does")
        for result in tensors_in(out if isinstance(out, (tuple, list)) else (out,)):
            position = self._position_in(func, args, kwargs, inputs, result)
            if position is None:
                raise NotPositionWiseError(f"{name} is not known to leave positions apart")
            self._follow(result, position)
        return out

    def _follow(self, tensor: Tensor, position: int) -> None:
        self._positions[id(tensor)] = position
        self._kept.append(tensor)
        self.widest = max(self.widest, tensor.numel() // NUM_POSITIONS)

    def _position_in(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor], result: Tensor
    ) -> int | None:
        """The dimension of positions in a result; None where they may have met."""
        kind = torch_internals.packet(func)
        places = [dim for dim, size in enumerate(result.shape) if size == NUM_POSITIONS]
        if len(places) != 1:
            return None
        (place,) = places
        before = [(tensor, self._positions[id(tensor)]) for tensor in inputs if id(tensor) in self._positions]
        first, position = before[0]
        if torch.Tag.pointwise in func.tags or kind in _COPIES:
            is_apart = all(self._lies(tensor, place - result.dim()) for tensor in inputs)
        elif kind in _SHAPES:
            is_apart = True
        elif kind in _RESHAPES:
            is_apart = prod(result.shape[:place]) == prod(first.shape[:position])
        elif kind in _PRODUCTS:
            is_apart = self._is_row(kind, args)
        elif kind in _NORMS:
            is_apart = position < first.dim() - len(args[1])
        elif kind in _OVER_DIMENSIONS:
            default = -1 if kind is aten.glu else 0
            named = args[1] if len(args) > 1 else kwargs.get("dim", default)
            over = {dim % first.dim() for dim in (named if isinstance(named, (tuple, list)) else [named])}
            is_apart = position not in over and all(self.position_of(tensor) == position for tensor in inputs)
        else:
            is_apart = False
        return place if is_apart else None

    def _lies(self, tensor: Tensor, from_end: int) -> bool:
        """Whether a tensor that is broadcast has its positions there, or none at all."""
        position = self._positions.get(id(tensor))
        if position is not None:
            return position - tensor.dim() == from_end
        return NUM_POSITIONS not in tensor.shape

    def _is_row(self, kind: Any, args: tuple[Any, ...]) -> bool:
        """Whether positions are rows of the left factor, or columns of the right, and the other factor has none."""
        left, right = (args[1], args[2]) if kind is aten.addmm else (args[0], args[1])
        if kind is aten.addmm and id(args[0]) in self._positions:
            return False
        rows, columns = self._positions.get(id(left)), self._positions.get(id(right))
        if rows is not None and columns is not None:
            return kind is aten.bmm and rows == columns == 0
        return rows == left.dim() - 2 if columns is None else columns == right.dim() - 1
