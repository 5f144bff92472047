"""The slices of a tiled loss or MLP, one after the other.

A dry run need not go through all of them: it may record what one does as often as it would be done (`watch`).
"""

from collections.abc import Callable, Iterable

from torch import Tensor

ALIGNMENT = 8
"""Elements. Slices whose beginnings are multiples of it apart are all as well aligned, so kernels take them alike."""

Watch = Callable[[range], Iterable[int]]
"""Takes the beginnings of slices that are alike, the last of which may be shorter, and gives those to go through."""

_watch: Watch | None = None


def starts(values: Tensor, dim: int, rows: int) -> Iterable[int]:
    """Where slices of `rows` along `dim` of `values` begin."""
    all_of_them = range(0, values.shape[dim], rows)
    if _watch is None or rows * values.stride(dim) % ALIGNMENT:
        return all_of_them
    return _watch(all_of_them)


def watch(by: Watch | None) -> Watch | None:
    """From now on `by` says which slices are gone through, None: all of them; what said so before."""
    global _watch
    before, _watch = _watch, by
    return before
