"""Memory that CUDA kernels take from the allocator inside one call, besides their outputs: the blocks, in order.

Found by looking at every request of single calls on emulated cards and on an H200 (`bench.kernels.requests`), and
read in the sources named below (`aten/src/ATen/native/`, torch 2.13). Left out: sorting of several rows and the
accumulating `index_put`, which take a few times their indices; the workspaces of cuDNN's convolutions.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from frugal import torch_internals
from frugal.config.hardware.cluster import Capability

aten = torch.ops.aten

OUTPUTS = 0
Steps = tuple[int, ...]
"""In order: a positive number takes a block of that many bytes, `OUTPUTS` are the outputs, `-n` gives back the n-th
block, counted from 1. The rest is freed at the end of the call, last taken first."""

NO_STEPS: Steps = (OUTPUTS,)

_CUDNN_BYTES = 16  # of its engine for attention


def steps(
    operator: object,
    args: tuple[Any, ...],
    capability: Capability,
    *,
    any_size: bool = False,
    resident_threads: int = 0,
) -> Steps:
    """Return the allocator steps of one call on a card of this compute capability.

    `any_size`: an upper bound of the same form for any number of samples. `resident_threads`: that the
    card holds at once; 0: leave out memory that depends on them.
    """
    if operator is aten.convolution_backward.default and args[0].device.type != "cpu":
        return _convolution_backward(args, resident_threads)
    if operator in _LOSSES and args[0].device.type != "cpu":
        return _loss(operator, args, resident_threads)
    if resident_threads and (taken := _of_reduction(operator, args, resident_threads)):
        return (OUTPUTS, *taken)
    of_operator = _STEPS.get(operator)
    if of_operator is None and getattr(operator, "namespace", "") == torch_internals.VARLEN:
        # `flash_api.cpp`, `mha_varlen_fwd`, makes a random state that `torch/nn/attention/varlen.py` replaces
        of_operator = _varlen_backward if "backward" in str(operator) else lambda *_: (OUTPUTS, 16)
    if of_operator is None or args[0].device.type == "cpu":
        return NO_STEPS
    return of_operator(args, capability, any_size)


def is_on_host(operator: object, output: Tensor) -> bool:
    """Return whether CUDA's kernel makes this output on the host: the efficient attention's random seed and offset."""
    return operator is aten._scaled_dot_product_efficient_attention.default and output.dim() == 0


def in_order(operator: object, outputs: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return the outputs in the order in which CUDA's kernel allocates them."""
    if operator is aten.native_dropout.default:  # the mask first
        return reversed(list(outputs))
    if operator is aten._scaled_dot_product_cudnn_attention.default:  # the random state first
        return sorted(outputs, key=lambda tensor: tensor.dim() > 0)
    return outputs


def _cudnn_backward(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of cudnn-frontend's `scaled_dot_product_flash_attention.h`: an fp32 gradient of q, and row sums.

    The engine takes a few bytes more, and with groups the gradients of k and v for every head of q: 15 shapes recorded
    on an H200 under cuDNN 9.19.
    """
    query, key, value = args[1:4]
    rows = query.shape[:-1].numel()
    heads = query.shape[1]  # of k and v what they took, had each its part for every head; nothing where they have
    for_all = sum(heads * each.nbytes // each.shape[1] for each in (key, value) if each.shape[1] != heads)
    return (OUTPUTS, 4 * rows * (query.shape[-1] + 1) + for_all + _CUDNN_BYTES)


def _flash_backward(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of `flash_attn/flash_api.cpp`, `mha_bwd`: rows are rounded up to 128."""
    gradient, query, key, value, out = args[:5]
    batch, _, rows, _ = query.shape
    inside = _flash_inside(batch * (-(-rows // 128) * 128), batch * key.shape[2], query, key, value)
    return (*_copies(gradient, out), OUTPUTS, *inside)


def _flash_inside(rows: int, tokens: int, query: Tensor, key: Tensor, value: Tensor) -> list[int]:
    """Return row sums, the gradient of q in fp32, and with groups k's and v's gradients for every head of q, in bytes.

    `rows`: of all samples, rounded up; `tokens`: of all samples' keys. Heads are the second dimension.
    """
    heads, size = query.shape[1], query.shape[-1]
    rounding = 32 if size <= 128 else 64
    inside = [4 * heads * rows, 4 * rows * heads * (-(-size // rounding) * rounding)]
    if heads != key.shape[1]:
        inside += [tokens * heads * each.shape[-1] * each.element_size() for each in (key, value)]
    return inside


def _varlen_backward(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of `flash_attn/flash_api.cpp`, `mha_varlen_bwd`: as `_flash_backward`, 128 more rows a document
    instead of rounding."""
    query, key, value, offsets = args[1], args[2], args[3], args[6]
    tokens = query.shape[0]
    return (OUTPUTS, *_flash_inside(tokens + 128 * (len(offsets) - 1), tokens, query, key, value))


def _copies(*tensors: Tensor) -> list[int]:
    """Return the bytes of copies of `(batch, heads, rows, size)` tensors that are not contiguous with rows before
    heads."""
    return [tensor.nbytes for tensor in tensors if not tensor.transpose(1, 2).is_contiguous()]


def _efficient(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of `transformers/cuda/attention.cu`, `_efficient_attention_forward`: large heads are summed in
    fp32 outside."""
    query, _key, value = args[:3]
    if query.element_size() == 4 or max(query.shape[-1], value.shape[-1]) <= 128:
        return NO_STEPS
    return (OUTPUTS, 4 * query.shape[:-1].numel() * value.shape[-1])


def _efficient_backward(args: tuple[Any, ...], capability: Capability, any_size: bool) -> Steps:
    """Return the steps of `transformers/cuda/attention_backward.cu`, `_efficient_attention_backward`.

    Row sums, computed by torch where the kernel does not, then the kernel's workspace.
    """
    gradient, query, key, value = args[:4]
    batch, heads, rows, _ = query.shape
    copies = _copies(gradient)
    first = len(copies) + 1
    sums = 4 * batch * heads * rows
    workspace = _efficient_workspace(query, key, value, args[9], capability, any_size)
    if query.element_size() == 2:
        return (*copies, OUTPUTS, sums, workspace, -first)
    product = 4 * batch * heads * rows * value.shape[-1]
    if heads == 1 or rows == 1:  # the sums need no transposition
        return (*copies, OUTPUTS, product, sums, -first, workspace, -first - 1)
    return (*copies, OUTPUTS, product, sums, sums, -first - 1, -first, workspace, -first - 2)


def _efficient_workspace(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, capability: Capability, any_size: bool
) -> int:
    """Return the bytes of `mem_eff_attention/kernel_backward.h`, `workspace_size`.

    For each head of each sample an fp32 gradient of q in tiles, each with a lock. Where k's and v's do not fit in
    registers, those of 64 keys, for each of the parts that the keys are split into. The tiles are those of the first
    kernel that the card has shared memory for.
    """
    batch, heads, rows, size = query.shape
    key_rows, value_size = key.shape[2], value.shape[-1]
    parallel = batch * heads
    rows_of_tile, columns_of_tile, adds_up = tile(query, value, dropout, capability)
    tiles = -(-rows // rows_of_tile) * -(-size // columns_of_tile)
    workspace = 4 * parallel * tiles * (rows_of_tile * columns_of_tile + 4)
    if adds_up:
        splits = max(1, min(-(-key_rows // 64), 200 // parallel))
        padded = sum(-(-each // rows_of_tile) * rows_of_tile for each in (size, value_size))
        workspace += 4 * (max(parallel, 200) if any_size else parallel * splits) * 64 * padded
    return workspace


def tile(query: Tensor, value: Tensor, dropout: float, capability: Capability) -> tuple[int, int, bool]:
    """Return rows and columns of a tile in the efficient attention's backward, and whether k's and v's gradients are
    summed in the workspace.

    Of the efficient attention's backward.
    """
    size = max(query.shape[-1], value.shape[-1])
    is_large = capability in ((8, 0), (8, 7)) or 9 <= capability[0] <= 11  # shared memory: 160 KiB and more a processor
    if size <= 64:
        return 64, 64, False
    if query.element_size() == 4:
        return 128 if is_large else 64, 64, False
    if size > 128:
        return 128, 64, True
    if is_large:
        return 128, 128, False
    if capability < (8, 0) or (size <= 96 and not dropout):
        return 128, 64, False
    return 64, 64, True


def _embedding_backward(args: tuple[Any, ...], _: Capability, any_size: bool) -> Steps:
    """Return the steps of `cuda/Embedding.cu` and `cuda/EmbeddingBackwardKernel.cu`: none up to 3072 indices, which are
    not sorted.

    A partial sum takes 10 indices, or fewer at the end of equal ones: `indices / 10 + min(indices, vocabulary)` rows
    in fp32 at most, and that many are taken whatever the indices are. Left out: some KiB of CUB's scans, and that cards
    take less for vocabularies of a few hundred rows.
    """
    gradient, indices, vocabulary = args[:3]
    tokens, width = indices.numel(), gradient.shape[-1]
    copies = [each.nbytes for each in (gradient, indices) if not each.is_contiguous()]
    if tokens <= 3072 and not any_size:
        return (*copies, OUTPUTS)
    one, first = tokens * indices.element_size(), len(copies) + 1
    segments = min(tokens, vocabulary)
    partial = tokens // 10 + segments
    of_segments, of_partial = (count * indices.element_size() for count in (segments, partial))
    element_bytes = max(4, gradient.element_size())
    sort = (one, one, one, 2 * one, -first - 3, -first - 2)
    return (*copies, *sort, OUTPUTS, one, 8, of_segments, of_segments, 8, of_partial, element_bytes * partial * width)


def _convolution_backward(args: tuple[Any, ...], resident_threads: int) -> Steps:
    """Return the steps of `Convolution.cpp` and `cudnn/ConvShared.cpp`: gradients in the input's layout, then the sum
    for the bias."""
    gradient, image, with_bias = args[0], args[1], args[10][2]
    is_channels_last = image.is_contiguous(memory_format=torch.channels_last) and not image.is_contiguous()
    layout = torch.channels_last if gradient.dim() == 4 and is_channels_last else torch.contiguous_format
    copies = [] if gradient.is_contiguous(memory_format=layout) else [gradient.nbytes]
    dimensions = [d for d in range(gradient.dim()) if d != 1]
    taken = scratch(gradient, dimensions, resident_threads) if with_bias and resident_threads else ()
    return (*copies, OUTPUTS, *([-1] if copies else []), *taken)


def _safe_softmax(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of `transformers/attention.cpp`, `_safe_softmax`: masked elements, fully masked rows, and a
    zero."""
    masked = args[0].numel()
    return (OUTPUTS, masked, masked // max(1, args[0].shape[args[1]]), args[0].element_size())


def _cumulative_sum(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of a cumulative sum: another type than the input's, as of a mask, copies the input first."""
    return (
        _copied(args[:1])
        if args[0].dtype.is_floating_point or args[0].element_size() == 8
        else (8 * args[0].numel(), OUTPUTS)
    )


def _index(args: tuple[Any, ...], _: Capability, any_size: bool) -> Steps:
    """Return the steps of `TensorAdvancedIndexing.cpp`, `AdvancedIndex`: several indices are given the same strides.

    They are of masks, some KiB in the first moments of forward, and left out for any size.
    """
    indices = [each for each in args[1] if each is not None]
    if any_size or len(indices) < 2 or any(each.dtype != torch.int64 for each in indices):
        return NO_STEPS
    with torch_internals.without_modes():
        expanded = torch.broadcast_tensors(*indices)
    if all(each.stride() == expanded[0].stride() for each in expanded):
        return NO_STEPS
    return (*(each.nbytes for each in expanded if not each.is_contiguous()), OUTPUTS)


def _sort(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of `cuda/Sort.cpp` for one long row: initial indices, then CUB's radix sort, which copies
    both."""
    return NO_STEPS if args[0].dim() != 1 else (OUTPUTS, 8 * args[0].numel(), args[0].nbytes + 8 * args[0].numel())


def _loss(operator: object, args: tuple[Any, ...], resident_threads: int) -> Steps:
    """Return the steps of a loss: numbers for each element, and the scratch of their mean or sum."""
    place, around = _LOSSES[operator]
    if len(args) > place and not args[place]:  # no reduction
        return NO_STEPS
    return (*around(args[0].nbytes), *(scratch(args[0], None, resident_threads) if resident_threads else ()))


_LOSSES: dict[object, tuple[int, Callable[[int], Steps]]] = {
    aten.mse_loss.default: (2, lambda of_each: (OUTPUTS, of_each)),
    aten.smooth_l1_loss.default: (2, lambda of_each: (OUTPUTS, of_each)),
    aten.huber_loss.default: (2, lambda of_each: (of_each, OUTPUTS)),
    aten.soft_margin_loss.default: (2, lambda _: (OUTPUTS, 4)),
    aten.binary_cross_entropy.default: (3, lambda _: (OUTPUTS, 4)),
    aten.binary_cross_entropy_with_logits.default: (4, lambda of_each: (of_each, of_each, OUTPUTS)),
}
"""The place of the argument that says how a loss is reduced; the blocks before and after its output."""


def _copied(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of a kernel that copies a gradient, and what else it reads, where it is not contiguous."""
    return (OUTPUTS, *(each.nbytes for each in args[:2] if isinstance(each, Tensor) and not each.is_contiguous()))


def _image_copied(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of a kernel that reads images with channels last as they are, and copies what is not
    contiguous either way."""
    is_channels_last = args[0].dim() == 4 and args[0].is_contiguous(memory_format=torch.channels_last)
    return NO_STEPS if is_channels_last else _copied(args[:1])


def _sum(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of `ReduceOps.cpp`, `sum_out`: whole numbers are added as int64, into which they are copied."""
    values = args[0]
    return NO_STEPS if values.is_floating_point() or values.element_size() >= 8 else (OUTPUTS, 8 * values.numel())


def _log_sum_exp(args: tuple[Any, ...], *_: Any) -> Steps:
    """Return the steps of `ReduceOps.cpp`, `logsumexp_out`: maxima, which of them are infinite, and exponents."""
    dims = [args[1]] if isinstance(args[1], int) else args[1] or range(args[0].dim())
    rows = args[0].numel() // max(1, prod(args[0].shape[dim] for dim in dims))
    of_rows = rows * args[0].element_size()
    return (OUTPUTS, of_rows, rows, -2, -1, args[0].nbytes, of_rows, -3)


_STEPS: dict[object, Callable[[tuple[Any, ...], Capability, bool], Steps]] = {
    # cuDNN's engine takes a few bytes, as recorded on an H200
    aten._scaled_dot_product_cudnn_attention.default: lambda *_: (OUTPUTS, _CUDNN_BYTES),
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    # `flash_attn/flash_api.cpp`, `mha_fwd`: dropout's random state is made twice
    aten._scaled_dot_product_flash_attention.default: (
        lambda args, *_: (OUTPUTS, 16) if len(args) > 3 and args[3] else NO_STEPS
    ),
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    # `Embedding.cpp`: indices in one row
    aten.embedding.default: lambda args, *_: NO_STEPS if args[1].is_contiguous() else (args[1].nbytes, OUTPUTS),
    aten.embedding_dense_backward.default: _embedding_backward,
    # `cuda/SoftMax.cu`, `softmax_backward_cuda_out`: the product of gradient and output
    aten._softmax_backward_data.default: lambda args, *_: (OUTPUTS, args[0].nbytes),
    aten._safe_softmax.default: _safe_softmax,
    aten.cumsum.default: _cumulative_sum,
    aten.index.Tensor: _index,
    # `TensorCompare.cpp`: absolute values first; DeepSpeed runs it on all gradients under fp16 and ZeRO-3
    aten.isinf.default: lambda args, *_: (args[0].nbytes, OUTPUTS) if args[0].dtype.is_floating_point else NO_STEPS,
    aten.logsumexp.default: _log_sum_exp,
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), _sum),
    aten.native_layer_norm_backward.default: _copied,
    aten._fused_rms_norm_backward.default: _copied,
    # `cuda/layer_norm_kernel.cu`: `expect_contiguous`, before outputs are made
    **dict.fromkeys(
        (aten.native_layer_norm.default, aten._fused_rms_norm.default),
        lambda args, *_: (*_copied(args[:1])[1:], OUTPUTS),
    ),
    # `Convolution.cpp` and `cuda/AdaptiveAveragePooling.cu`, also before
    **dict.fromkeys(
        (aten.convolution.default, aten._adaptive_avg_pool2d.default),
        lambda args, *_: (*_image_copied(args)[1:], OUTPUTS),
    ),
    **dict.fromkeys(
        (aten.avg_pool2d.default, aten.max_pool2d_with_indices.default, aten.upsample_nearest2d.default),
        _image_copied,
    ),
    **dict.fromkeys(
        (
            aten.avg_pool2d_backward.default,
            aten.max_pool2d_with_indices_backward.default,
            aten.upsample_linear1d_backward.default,
            aten.upsample_nearest1d_backward.default,
            aten.upsample_bilinear2d_backward.default,
            aten.upsample_nearest2d_backward.default,
            aten.upsample_bicubic2d_backward.default,
            aten.upsample_nearest1d.default,
            aten._softmax.default,
            aten._log_softmax.default,
            aten.adaptive_max_pool2d.default,
            aten.cumprod.default,
            aten.reflection_pad1d.default,
            aten.reflection_pad2d.default,
            aten.reflection_pad1d_backward.default,
            aten.reflection_pad2d_backward.default,
            aten.roll.default,
        ),
        lambda args, *_: _copied(args[:1]),
    ),
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
    # `LossCTC.cu`, `ctc_loss_backward_gpu_template`: states as large as forward's
    **dict.fromkeys(
        (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor),
        lambda args, *_: (args[6].nbytes, OUTPUTS),
    ),
}


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

    Where one block of threads would add too many numbers, several share an output, and meet in global memory
    (`setReduceConfig` and `global_memory_size` in aten/src/ATen/native/cuda/Reduce.cuh, torch 2.13). How many follows
    from shape and strides as `TensorIterator` sees them, and from how many threads the card holds at once. A counter
    for each column of blocks lies beside it. Nothing where each output is one block's. `wide`: whether 16-bit numbers
    are read eight at once, not four.

    Left out: reductions of other kinds (maxima, any, all), whose results are single numbers; the buffer in which sums
    of half precision over more than 2 GiB are kept.
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
            # A thread reads 4 outputs at once if all its steps are divisible (`get_output_vec_size`).
            strides = [values.storage_offset(), kept[0].size, *(each.in_stride for each in dims if each is not kept[0])]
            out_vector = next(size for size in (4, 2, 1) if not any(step % size for step in strides))
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
    dims = _coalesced(ordered)
    # A tensor too large for 32-bit offsets is taken in parts: the longest dimension is halved (`get_dim_to_split`).
    while dims and values.element_size() * sum((d.size - 1) * d.in_stride for d in dims) >= _LARGEST_OFFSET:
        longest = max(range(len(dims)), key=lambda n: (dims[n].size - 1) * dims[n].in_stride)
        dims[longest] = dims[longest]._replace(size=-(-dims[longest].size // 2))
    return dims


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


def _block(across: int, down: int, most: int) -> tuple[int, int]:
    """Return the threads of a block in both directions, powers of 2 (`set_block_dimension`)."""
    across, down = (1 << max(0, size.bit_length() - 1) if size < most else most for size in (across, down))
    height = min(down, most // min(across, _WARP))
    return min(across, most // height), height


def _of_reduction(operator: object, args: tuple[Any, ...], resident_threads: int) -> tuple[int, ...]:
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
