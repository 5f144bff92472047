"""Operators on meta tensors: computed once for every shape, and with stand-ins where results depend on data.

Meta tensors have no values, so the number of set elements in a mask is unknown. Where a size depends on it, the
largest one is assumed, which makes the dry run an upper bound, and a note reports it:

| asked for                                | assumed                                                           |
|------------------------------------------|-------------------------------------------------------------------|
| `nonzero`, boolean indexing              | every element is set                                              |
| `unique`                                 | all values differ                                                 |
| `unique_consecutive`                     | all values are equal: transformers counts end tokens so           |
| `bincount`                               | as many bins as asked for (`minlength`)                           |
| an integer (`.item()`)                   | the longest dimension of a batch; 1 if the model rejects that     |
| `if` on a tensor, outside of transformers| yes; no if the model rejects that and both integers               |

The last three are no upper bounds for every model; the note says what was assumed.

The grouped matrix product of experts needs no assumption: its results do not depend on the routing. torch has a
kernel for it on meta in bf16 only, and does not count its FLOPs.

Host tensors of a dry run are real but never touched: they are address space without memory, even where a machine
would have to refuse so much. Operators on them return without reading or writing. Small ones may hold numbers that
decide what the program does next; on those alone operators really run.

`run_cached` computes an operator once for every shape. A meta kernel in Python takes a tenth of a millisecond, and the
layers of a model repeat the same few of them. The result of an operator without aliasing depends only on the shapes,
strides and types of its inputs, so the second time its outputs are made from the first. One that writes into a tensor
and returns it does nothing on meta: it runs once for every shape, which shows that the shapes fit.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

from frugal import torch_internals
from frugal.memory_watch import traffic
from frugal.planning.memory.host_allocator import HostAllocator
from frugal.torch_internals import tensors_in

aten = torch.ops.aten

Result = tuple[Any, str]  # the result of an operator, and its assumption

EVERYTHING = "what a mask selects depends on data: counted as if it selected everything"
ALL_DIFFERENT = "how many different values there are depends on data: counted as if all were different"
ALL_EQUAL = "how many runs of equal values there are depends on data: counted as if all values were equal"
FULL_LENGTH = "how long packed sequences are depends on data: counted as if all were of full length"
AS_MANY_BINS = "how many bins there are depends on data: counted as many as asked for (minlength)"


def _index(values: Tensor, indices: list[Tensor | None]) -> Result | None:
    """Replace boolean indices without values by integer ones, one for each of their dimensions."""
    if not any(index is not None and _is_unknown_mask(index) for index in indices):
        return None
    integers: list[Tensor | None] = []
    for index in indices:
        if index is None or not _is_unknown_mask(index):
            integers.append(index)
        else:
            integers += [torch.empty(index.numel(), dtype=torch.int64, device=index.device)] * index.dim()
    return aten.index.Tensor(values, integers), EVERYTHING


def _is_unknown_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8) and has_no_values(index)


def _unique(values: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Result:
    inverse, counts = (torch.empty(n, dtype=torch.int64, device=values.device) for n in (values.shape, values.numel()))
    return (values.new_empty(values.numel()), inverse, counts), ALL_DIFFERENT


def _unique_of_dimension(values: Tensor, dim: int, *_: Any, **__: Any) -> Result:
    inverse, counts = (torch.empty(values.shape[dim], dtype=torch.int64, device=values.device) for _ in range(2))
    return (torch.empty_like(values), inverse, counts), ALL_DIFFERENT


def _unique_consecutive(
    values: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Result:
    shape = [1] if dim is None else [1 if i == dim % values.dim() else size for i, size in enumerate(values.shape)]
    inverse = values.shape if dim is None else values.shape[dim]
    numbers = (torch.empty(n, dtype=torch.int64, device=values.device) for n in (inverse, 1))
    return (values.new_empty(shape), *numbers), ALL_EQUAL


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Result | None:
    if minlength < 1:
        return None
    dtype = torch.int64 if weights is None else torch.float64
    return torch.empty(minlength, dtype=dtype, device=values.device), AS_MANY_BINS


def _pack_padded_sequence(values: Tensor, lengths: Tensor, batch_first: bool) -> Result | None:
    """Pack whole samples where the lengths came from the card, whose values nobody knows."""
    if int(lengths.min()) > 0:
        return None
    sizes = torch.full(values.shape[batch_first : batch_first + 1], values.shape[not batch_first])
    return (values.new_empty(values.flatten(0, 1).shape), sizes), FULL_LENGTH


STAND_INS: dict[Any, Callable[..., Result | None]] = {
    aten.nonzero.default: lambda mask: (mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64), EVERYTHING),
    aten.masked_select.default: lambda values, mask: (
        values.new_empty(torch.broadcast_shapes(values.shape, mask.shape).numel()),
        EVERYTHING,
    ),
    aten.index.Tensor: _index,
    aten._unique2.default: _unique,
    aten.unique_dim.default: _unique_of_dimension,
    aten.unique_consecutive.default: _unique_consecutive,
    aten.bincount.default: _bincount,
    aten._pack_padded_sequence.default: _pack_padded_sequence,
}
"""Functions that return the result of an operator that meta tensors reject; None if they take it."""


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return `aten._grouped_mm` in any type: the shapes of `_create_grouped_mm_output_tensor` (GroupedMMUtils.h)."""
    shape = [*left.shape[:-1], right.shape[-1]]
    if left.dim() == right.dim() == 2:
        assert offs is not None
        shape = [offs.shape[0], *shape]
    elif right.dim() == 2:
        shape = [left.shape[1], right.shape[1]]
    return torch.empty(shape, dtype=out_dtype or left.dtype, device=left.device)


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return the losses and the `(samples, times, states)` of LossCTC.cu, each target being as long as the longest."""
    times, samples = log_probs.shape[0], log_probs[0, ..., 0].numel()
    longest = targets.shape[1] if targets.dim() > 1 else -(-targets.numel() // samples)
    return log_probs.new_empty(samples), log_probs.new_empty(samples, times, 2 * longest + 1)


def _loss(values: Tensor, target: Tensor, *options: Any) -> Tensor:
    """Return a loss that is resized from one for each element to their mean or sum, and keeps their storage
    (`BinaryOps.cpp`, `Loss.cpp`)."""
    shape = torch.broadcast_shapes(values.shape, target.shape)
    each = values.new_empty(shape, dtype=torch.result_type(values, target))
    is_reduced = next((each for each in options if isinstance(each, int)), 1)  # others are weights
    return each.resize_(()) if is_reduced else each


_EXACT: dict[Any, Callable[..., Any]] = {
    # a tensor of one number may be on the host: CUDA reads it, wherever it is (Indexing.cu)
    aten.masked_fill.Tensor: lambda values, mask, _: aten.masked_fill.Scalar(values, mask, 0),
    aten.masked_fill_.Tensor: lambda values, mask, _: aten.masked_fill_.Scalar(values, mask, 0),
    aten._grouped_mm.default: _grouped_mm,
    **dict.fromkeys(
        (
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.soft_margin_loss.default,
            aten.binary_cross_entropy.default,
        ),
        _loss,
    ),
    **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), _ctc_loss),
    **dict.fromkeys(
        (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor), lambda *args, **_: torch.empty_like(args[1])
    ),
}
"""Functions that run in place of operators, and do the same on meta."""

if aten._grouped_mm not in flop_registry:

    @register_flop_formula(aten._grouped_mm)
    def _grouped_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
        """Return the FLOPs: each row meets the matrix of one group, each column of a gradient the rows of one."""
        if len(left) == 2:
            return 2 * int(left[0] * left[1] * right[-1])
        return 2 * int(left[0] * left[1] * left[2] * right[-1] // (left[0] if len(right) == 2 else 1))


UNTOUCHED_ELEMENTS = 1 << 14  # host tensors above this size are never read or written

_FACTORIES = {aten.zeros.default, aten.full.default, aten.ones.default, aten.empty.memory_format}
_CROSSING = {aten.copy_.default, aten._to_copy.default, *_FACTORIES}  # may lead from device to host


def is_untouched(value: Tensor) -> bool:
    """Return whether `value` is a host tensor that must be neither read nor written."""
    return value.device.type == "cpu" and value.numel() > UNTOUCHED_ELEMENTS


def has_no_values(value: Tensor) -> bool:
    """Return whether nothing may depend on what `value` holds."""
    return value.is_meta or is_untouched(value)


def host_stand_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the operator's result if it reads or writes big host tensors, or copies between host and device.

    Nothing is copied and nothing written: outputs are uninitialised. `NotImplemented` where the operator may run.
    """
    if func not in _CROSSING and all(tensor.is_meta for tensor in tensors_in(args)):
        return NotImplemented
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    if func is aten.copy_.default and args[0].device != args[1].device:
        return args[0]
    if func is aten._to_copy.default and to_host and args[0].is_meta:
        return untouched_host_tensor(args[0].size(), args[0].stride(), kwargs.get("dtype") or args[0].dtype)
    if func in _FACTORIES and to_host and math.prod(args[0]) > UNTOUCHED_ELEMENTS:
        return untouched_host_tensor(args[0], None, kwargs.get("dtype") or torch.get_default_dtype())
    if not any(map(is_untouched, tensors_in(args))):
        return NotImplemented
    schema = torch_internals.schema(func)
    arguments = schema.arguments
    if schema.is_mutable and arguments[0].alias_info is not None and arguments[0].alias_info.is_write:
        return args[0] if schema.returns else None  # nothing from updates of a list, as `_foreach_mul_`
    if any(argument.alias_info is not None for argument in arguments):
        return NotImplemented  # a view
    args, kwargs = torch_internals.tree_map(
        lambda value: value.to("meta") if isinstance(value, Tensor) else value, (args, kwargs)
    )
    on_meta = func(*args, **(kwargs | {"device": "meta"} if "device" in kwargs else kwargs))
    if not isinstance(on_meta, (Tensor, list)):
        return NotImplemented
    return torch_internals.tree_map(partial(_made, torch.device("cpu" if target is None else target)), on_meta)


def _made(device: torch.device, on_meta: Tensor) -> Tensor:
    """Return an uninitialised tensor of the same shape where it belongs."""
    if device.type == "cpu":
        return untouched_host_tensor(on_meta.size(), on_meta.stride(), on_meta.dtype)
    return torch.empty_strided(on_meta.size(), on_meta.stride(), dtype=on_meta.dtype, device=device)


MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named in Python 3.13; the number is Linux's
RESERVED_BYTES = 1 << 30
"""The size from which on Linux is asked not to reserve memory: it refuses single requests beyond the machine's."""


def untouched_host_tensor(size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """Return a tensor of this shape on the host: of zeros, or a large one which must not be read or written."""
    with torch_internals.without_dispatch():
        on_meta = torch.empty(tuple(size), dtype=dtype, device="meta")
        if stride is not None:
            on_meta = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")
        num_bytes = on_meta.untyped_storage().nbytes()
        if num_bytes < RESERVED_BYTES:
            made = torch.empty_strided(on_meta.size(), on_meta.stride(), dtype=dtype, device="cpu")
            return made if is_untouched(made) else made.zero_()
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        storage = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, on_meta.size(), on_meta.stride())


class HostMemory(HostAllocator):
    """The storages that live on the host, by address."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, bool] = {}  # address of a live one -> whether it is pinned
        self._waiting: dict[int, int] = {}  # address -> bytes of the model's storages that go to the device
        self._is_pinning = False
        self._waiting_bytes = 0
        self.most_waiting_bytes = 0

    def pinning(self) -> AbstractContextManager[bool]:
        """Count host tensors that are made inside the `with` block as pinned."""
        return patch.object(self, "_is_pinning", True)

    def wait(self, address: int, size_bytes: int) -> None:
        """Begin a storage of the model, which `frugal.planning.memory.breakdown` counts instead."""
        self._waiting[address] = size_bytes
        self._waiting_bytes += size_bytes
        self.most_waiting_bytes = max(self.most_waiting_bytes, self._waiting_bytes)

    def born(self, address: int, size_bytes: int) -> None:
        """Begin a storage."""
        self._storages[address] = self._is_pinning
        self.allocate(size_bytes, pinned=self._is_pinning)

    def leave(self, address: int) -> int | None:
        """Move a waiting storage to the device and return its bytes; None if it does not wait."""
        size_bytes = self._waiting.pop(address, None)
        self._waiting_bytes -= size_bytes or 0
        return size_bytes

    def died(self, address: int, size_bytes: int) -> None:
        """End a storage, if it is on the host."""
        if address in self._storages:
            self.release(size_bytes, pinned=self._storages.pop(address))
        else:
            self.leave(address)


_MAX_ENTRIES = 100_000
_Cost = tuple[int, int]  # FLOPs, and bytes read and written where there are none
_WRITTEN = object()
known: dict[Any, tuple[Any, _Cost]] = {}
"""Tensors like the outputs of operators that ran before on the same shapes of tensors on meta, or `_WRITTEN` where that
is the argument that they write into; and the costs."""
_is_pure: dict[Any, bool] = {}


_MORE_FLOPS: dict[Any, Callable[..., int]] = {  # operators that torch's own registry leaves out
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, **kwargs: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, **kwargs: sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)
    ),
    # its type stands where the registry's formula has a shape
    torch.ops.aten.addmm.dtype_out: lambda _, left, right, *args, **kwargs: 2 * left.numel() * right.shape[-1],
}


def _varlen_flops(*args: Any, out_val: Any = None, **_: Any) -> int:
    """Count those of attention document by document, as if each document were as long as the longest.

    torch's own formula counts as many of that length as offsets may name. `args` are those of backward where the first
    two tensors have the same heads, and a third one follows them.
    """
    is_backward = isinstance(args[4], Tensor) and args[4].dim() == 3
    query, key, value = args[1:4] if is_backward else args[:3]
    longest = args[8] if is_backward else args[5]
    shapes = [(-(-len(each) // longest), each.shape[1], longest, each.shape[2]) for each in (query, key, value)]
    return sdpa_backward_flop_count(shapes[0], *shapes) if is_backward else sdpa_flop_count(*shapes)


def run_cached(key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Cost]:
    """Return the operator's result and its FLOPs, or the bytes that it reads and writes where no FLOPs are counted.

    `key`: its `key_of`.
    """
    before = known.get(key)
    written: Any = kwargs["out"] if "out" in kwargs else args[0] if args else None
    if before is not None:
        return written if before[0] is _WRITTEN else _like(before[0]), before[1]
    writes = key is not None and torch_internals.schema(func).is_mutable and isinstance(written, Tensor)
    size = written.size() if writes else None
    out = _EXACT.get(func, func)(*args, **kwargs)
    cost = _cost(func, args, kwargs, out)
    if key is not None and len(known) < _MAX_ENTRIES:
        if size is None:
            # `_unsafe_view`'s schema shares none
            inputs = {torch_internals.address(tensor) for tensor in tensors_in(args)}
            _is_pure[func] = inputs.isdisjoint(map(torch_internals.address, tensors_in(out)))
            if _is_pure[func] and _are_plain(out):
                known[key] = _like(out), cost
        elif out is written and out.size() == size:  # one of another size than the result is resized
            known[key] = _WRITTEN, cost
    return out, cost


def _cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Cost:
    packet = func.overloadpacket
    formula = _MORE_FLOPS.get(func) or flop_registry.get(packet) or _MORE_FLOPS.get(packet)
    if getattr(func, "namespace", "") == torch_internals.VARLEN:
        formula = _varlen_flops
    return (formula(*args, **kwargs, out_val=out), 0) if formula is not None else (0, traffic(func, args, kwargs, out))


def key_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a key of the outputs; None where they share memory with an input, or depend on values.

    An operator that writes into its first argument alone, or into `out`, and returns that, has a key, too.
    """
    pure = _is_pure.get(func)
    if pure is None:
        schema = torch_internals.schema(func)
        shared = [value for value in (*schema.arguments, *schema.returns) if value.alias_info is not None]
        writes = (
            len(shared) == 2 == len(schema.returns) + 1
            and (shared[0].name == "out" or shared[0] == schema.arguments[0])
            and torch.Tag.inplace_view not in func.tags
        )
        pure = _is_pure[func] = writes if schema.is_mutable else not shared
    if not pure:
        return None
    parts = _part((*args, *kwargs.items()))
    return None if parts is None else (func, torch.get_default_dtype(), parts)  # factories may leave the type out


def _part(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_meta or type(value) not in (Tensor, torch.nn.Parameter):
            return None
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        parts = tuple(map(_part, value))
        return None if None in parts else (type(value), parts)
    return type(value), value


def _are_plain(out: Any) -> bool:
    """Return whether outputs are nothing but separate tensors on meta that each fill their storage."""
    outputs = [out] if isinstance(out, Tensor) else out
    tensors = list(tensors_in(outputs))
    return (
        isinstance(outputs, (list, tuple))
        and len({torch_internals.address(tensor) for tensor in tensors}) == sum(each is not None for each in outputs)
        and all(tensor.is_meta and not tensor.storage_offset() for tensor in tensors)
        and all(_like(each).untyped_storage().nbytes() == each.untyped_storage().nbytes() for each in tensors)
    )


def _like(output: Any) -> Any:
    """Return a tensor of the same shape, strides and type, or as many as there are; what is none as it is."""
    if isinstance(output, (list, tuple)):
        return type(output)(map(_like, output))
    if not isinstance(output, Tensor):
        return output
    return torch.empty_strided(output.size(), output.stride(), dtype=output.dtype, device="meta")
