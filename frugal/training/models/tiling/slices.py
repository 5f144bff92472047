"""The slices of a tiled loss or MLP, one after the other.

A dry run need not go through all of them: it may record what one does as often as it would be done (`watch`).
"""

from collections.abc import Callable, Iterable

from torch import Tensor

MIN_SLICES = 8
"""More where a slice would still have more positions than the model is wide: then its intermediate results take about
as much as the weights, and products reach what a device can do."""

ALIGNMENT = 8
"""Elements. Slices whose beginnings are multiples of it apart are all as well aligned, so kernels take them alike."""

Watch = Callable[[range], Iterable[int]]
"""Takes the beginnings of slices that are alike, the last of which may be shorter, and gives those to go through."""

_watch: Watch | None = None


def length(num_positions: int, model_width: int) -> int:
    """Return the positions of a slice."""
    return -(-num_positions // max(MIN_SLICES, -(-num_positions // model_width)))


def starts(values: Tensor, dim: int, rows: int) -> Iterable[int]:
    """Return where slices of `rows` along `dim` of `values` begin."""
    all_of_them = range(0, values.shape[dim], rows)
    if _watch is None or rows * values.stride(dim) % ALIGNMENT:
        return all_of_them
    return _watch(all_of_them)


def watch(by: Watch | None) -> Watch | None:
    """Have `by` say from now on which slices are gone through, None: all of them; return what said so before."""
    global _watch
    before, _watch = _watch, by
    return before
