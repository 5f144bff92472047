"""Scratch of sums, means and norms on CUDA: memory that a summing kernel takes from the allocator inside its call.

Where one block of threads would add too many numbers, several share an output, and meet in global memory
(`setReduceConfig` and `global_memory_size` in aten/src/ATen/native/cuda/Reduce.cuh, torch 2.13). How many follows
from shape and strides as `TensorIterator` sees them, and from how many threads the card holds at once. A counter for
each column of blocks lies beside it.

Left out: reductions of other kinds (maxima, any, all), whose results are single numbers; the buffer in which sums of
half precision over more than 2 GiB are kept.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten

_WARP, _THREADS = 32, 512
_FEWEST, _MOST = 16, 256  # numbers that one thread adds, where several blocks share an output
_LARGEST_OFFSET = 2**31 - 1  # bytes; larger tensors are taken in parts


class _Dimension(NamedTuple):
    """A dimension of the iteration; strides in elements, 0 for the output along a summed dimension."""

    size: int
    out_stride: int
    in_stride: int


def scratch(
    values: Tensor, dimensions: Iterable[int] | None, resident_threads: int, *, wide: bool = True
) -> tuple[int, ...]:
    """Return the bytes of scratch and of counters inside a reduction of `values` along `dimensions` (None: all), in
    order.

    Nothing where each output is one block's. `wide`: whether 16-bit numbers are read eight at once, not four.
    """
    if not values.numel() or not values.dtype.is_floating_point:
        return ()
    element_bytes = values.element_size()
    dims = _iterated(values, dimensions)
    reduced = [each for each in dims if not each.out_stride]
    kept = [each for each in dims if each.out_stride]
    outputs, inputs = prod(each.size for each in kept), prod(each.size for each in reduced)
    vector = 8 if element_bytes == 2 and wide else 4
    in_one_piece = not kept or (bool(reduced) and reduced[0].in_stride < kept[0].in_stride)
    across, down, out_vector = (inputs, outputs, 1) if in_one_piece else (outputs, inputs, 1)
    fastest = (reduced if in_one_piece else kept)[0].in_stride if dims else 1
    if fastest == 1:
        if in_one_piece and across >= 128 and len(reduced) == 1:
            across //= vector
        elif not in_one_piece:
            out_vector = _common_vector(values, dims, kept[0])
            across //= out_vector
    width, height = _block(across, down, _THREADS // out_vector)
    step_in, step_out = (width, 1) if in_one_piece else (1, width)
    if -(-inputs // step_in) < min(16 * height, _MOST):
        return ()  # each warp has outputs of its own
    step_in *= height
    each = -(-inputs // step_in)
    columns = -(-(outputs // out_vector) // step_out)
    busy = resident_threads // (width * height)
    if each < _MOST or columns > busy:
        return ()
    blocks = max(min(-(-busy // columns), -(-each // _FEWEST)), -(-each // _MOST))
    if blocks < 2:
        return ()
    size_bytes = max(4, element_bytes) * outputs * blocks * (1 if in_one_piece else width * out_vector)
    return size_bytes, 4 * columns


def _iterated(values: Tensor, dimensions: Iterable[int] | None) -> list[_Dimension]:
    """Return the dimensions that `TensorIterator` is left with, the fastest first: the summed ones, then the others."""
    all_of_them = range(values.dim())
    added = {d % values.dim() for d in dimensions} if dimensions is not None else set()
    added = added or set(all_of_them)
    out_stride, dims = 1, []
    for d in reversed(all_of_them):
        is_kept = d not in added and values.shape[d] > 1
        dims.append(_Dimension(values.shape[d], out_stride if is_kept else 0, values.stride(d)))
        out_stride *= values.shape[d] if d not in added else 1
    dims = [each for each in dims if each.size > 1]
    ordered: list[_Dimension] = []
    for each in dims:  # a stable insertion sort, as `reorder_dimensions`
        place = len(ordered)
        while place and _comes_before(each, ordered[place - 1]):
            place -= 1
        ordered.insert(place, each)
    return _in_part(_coalesced(ordered), values.element_size())


def _comes_before(one: _Dimension, other: _Dimension) -> bool:
    if bool(one.out_stride) != bool(other.out_stride):
        return not one.out_stride
    for mine, others in ((one.out_stride, other.out_stride), (one.in_stride, other.in_stride)):
        if mine and others and mine != others:
            return mine < others
    return False


def _coalesced(dims: Sequence[_Dimension]) -> list[_Dimension]:
    """Merge neighbours that lie end to end in both tensors."""
    merged: list[_Dimension] = []
    for each in dims:
        before = merged[-1] if merged else None
        if (
            before is not None
            and before.size * before.out_stride == each.out_stride
            and before.size * before.in_stride == each.in_stride
        ):
            merged[-1] = before._replace(size=before.size * each.size)
        else:
            merged.append(each)
    return merged


def _in_part(dims: list[_Dimension], element_bytes: int) -> list[_Dimension]:
    """Return the first part of a tensor too large for 32-bit offsets: the longest dimension is halved
    (`get_dim_to_split`)."""
    while dims and element_bytes * sum((d.size - 1) * d.in_stride for d in dims) >= _LARGEST_OFFSET:
        longest = max(range(len(dims)), key=lambda n: (dims[n].size - 1) * dims[n].in_stride)
        dims[longest] = dims[longest]._replace(size=-(-dims[longest].size // 2))
    return dims


def _common_vector(values: Tensor, dims: Sequence[_Dimension], output: _Dimension) -> int:
    """Return the outputs that a thread reads at once: 4 if all its steps are divisible (`get_output_vec_size`)."""
    steps = [values.storage_offset(), output.size, *(each.in_stride for each in dims if each is not output)]
    return next(size for size in (4, 2, 1) if not any(step % size for step in steps))


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Return the threads of a block in both directions, powers of 2 (`set_block_dimension`)."""
    across, down = (1 << max(0, size.bit_length() - 1) if size < most else most for size in (across, down))
    height = min(down, most // min(across, _WARP))
    return min(across, most // height), height


def of_operator(operator: object, args: tuple[Any, ...], resident_threads: int) -> tuple[int, ...]:
    """Return the scratch of an operator's reduction, see `scratch`; empty where it has none."""
    if operator not in _DIMENSIONS:
        return ()
    dimensions = args[_DIMENSIONS[operator]] if len(args) > _DIMENSIONS[operator] else None
    return scratch(args[0], dimensions, resident_threads, wide=operator is not aten.linalg_vector_norm.default)


_DIMENSIONS = {
    aten.sum.dim_IntList: 1, aten.mean.dim: 1, aten.sum.default: 1, aten.mean.default: 1,
    aten.linalg_vector_norm.default: 2,
}  # fmt: skip
"""The argument of each reduction that names the dimensions, if there is one."""
