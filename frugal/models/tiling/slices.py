"""The slices of a tiled loss or MLP, one after the other.

A dry run need not go through all of them: it may record what one does as often as it would be done (`watch`).
"""

from collections.abc import Callable, Iterable

from torch import Tensor

MIN_SLICES = 8
"""The least number of slices. There are more where a slice would have more positions than the model is wide: at that
length its intermediate results take about as much as the weights, and products reach the device's speed."""

ALIGNMENT = 8
"""The elements of an alignment: slices that begin at multiples of it are equally well aligned for kernels."""

Watch = Callable[[range], Iterable[int]]
"""A function from the beginnings of like slices (the last may be shorter) to those that are gone through."""

_watch: Watch | None = None


def length(num_positions: int, model_width: int, min_slices: int = MIN_SLICES) -> int:
    """Return the positions of a slice. The micro-batch is left out: a plan's memory is affine in it."""
    return -(-num_positions // max(min_slices, -(-num_positions // model_width)))


def starts(values: Tensor, dim: int, rows: int) -> Iterable[int]:
    """Return where slices of `rows` along `dim` of `values` begin."""
    all_of_them = range(0, values.shape[dim], rows)
    return all_of_them if _watch is None or rows * values.stride(dim) % ALIGNMENT else _watch(all_of_them)


def watch(by: Watch | None) -> Watch | None:
    """Have `by` say from now on which slices are gone through, None: all of them; return what said so before."""
    global _watch
    before, _watch = _watch, by
    return before
