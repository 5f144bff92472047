"""Bytes that an operator reads and writes in the device's memory: how long it takes, where FLOPs do not say so.

Counted is what the kernel must move: every tensor that goes in, once, and every one that comes out. Kept in mind are
operators that read only the part they return, and those that overwrite without reading. Left out: what stays in a
cache between two operators, and kernels that go over their input more than once (a softmax of long rows, sorting).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from frugal.training.storage_watch import tensors_in

aten = torch.ops.aten

_NOTHING = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.set_.source_Tensor, aten.resize_.default, aten._local_scalar_dense.default,
}  # fmt: skip
_READS_WHAT_IT_RETURNS = {
    aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor,
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
}  # fmt: skip
_OVERWRITES = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}

_STREAMS = {
    aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.mul.Tensor, aten.mul_.Tensor,
    aten.mul.Scalar, aten.mul_.Scalar, aten.div.Tensor, aten.div_.Tensor, aten.neg.default, aten.clone.default,
    aten.copy_.default, aten._to_copy.default, aten.cat.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.zero_.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.pow.Tensor_Scalar,
    aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.exp_.default,
    aten.constant_pad_nd.default,
}  # fmt: skip
_CPU_PACES = {
    aten._log_softmax.default: 2.0, aten._softmax.default: 2.0, aten.native_dropout.default: 15.0,
    aten.bernoulli_.float: 15.0,
}  # fmt: skip


def cpu_pace(func: Any) -> float:
    """How long a CPU takes for a byte of this operator's traffic; 1 for GELU, SiLU and norms.

    A GPU waits for its memory whatever it computes; one thread of a CPU is held up by the arithmetic: three passes and
    exponentials of a softmax, random numbers of a dropout. `python -m bench.cpu_paces` measures them; these are rounded
    from a Xeon at 2.5 GHz in fp32, and an EPYC is within a factor of 1.7 of all but `exp_`.
    """
    return 0.35 if func in _STREAMS else _CPU_PACES.get(func, 1.0)


def traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Bytes read and written by one call, which returned `out`. Views move nothing."""
    if func in _NOTHING:
        return 0
    written = sum(map(_bytes, tensors_in(out)))
    if func in _READS_WHAT_IT_RETURNS:
        return 2 * written + sum(_bytes(value) for value in tensors_in(args[1:]))
    inputs = list(tensors_in((*args, *kwargs.values())))
    if func in _OVERWRITES:
        return written + sum(map(_bytes, inputs[1:]))
    if not func._schema.is_mutable and not _storages(tensors_in(out)).isdisjoint(_storages(inputs)):
        return 0  # a view after all, such as `_unsafe_view`
    return written + sum(map(_bytes, inputs))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _bytes(tensor: Tensor) -> int:
    """Of its elements; what is broadcast is read once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride or not size:
            elements *= size
    return elements * tensor.element_size()
