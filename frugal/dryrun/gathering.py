"""ZeRO-3's collectives without their loops over all ranks.

To gather parameters and to scatter gradients DeepSpeed makes a view for each rank and parameter, which is nothing on
a device and takes minutes to rehearse for a thousand ranks. The functions here allocate and free the same storages in
the same order as `partition_parameters.AllGatherCoalescedHandle.wait` and `coalesced_collectives.
reduce_scatter_coalesced` of DeepSpeed 0.19.8; a test holds them against those.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import comm
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from torch import Tensor


@contextmanager
def at_once() -> Iterator[None]:
    """Inside the `with` block a collective costs the same whatever the number of ranks."""
    with (
        patch.object(AllGatherCoalescedHandle, "wait", _wait),
        patch.object(stage3, "reduce_scatter_coalesced", _reduce_scatter_coalesced),
        patch.object(Tensor, "narrow", _narrow),
    ):
        yield


def _narrow(tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A view, made without asking the tracker: one a rank is made for every gathered bucket."""
    with torch._C._DisableTorchDispatch():
        return torch.narrow(tensor, dim, start, length)


def _wait(handle: Any, handle_dependency: bool = True) -> None:
    """Each parameter is put together from all ranks' parts of the bucket."""
    if handle.complete:
        return
    for parameter in handle.params:
        whole = torch.empty(parameter.ds_numel, dtype=handle.partitions[0].dtype, device=handle.partitions[0].device)
        parameter.data = whole.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    handle.complete = True


@torch.no_grad()
def _reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Every rank's part of each tensor, padded, in one flat buffer."""
    rank, world_size = comm.get_rank(group), comm.get_world_size(group)
    chunks = [math.ceil(tensor.numel() / world_size) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % world_size == 0:
        flat = tensors[0].view(-1)
    else:
        padding = [
            tensor.new_empty(missing)
            for tensor, chunk in zip(tensors, chunks, strict=True)
            for missing in _missing(tensor.numel(), chunk, world_size)
        ]
        flat = tensors[0].new_empty(world_size * sum(chunks))
        del padding
    mine = flat.view(-1).narrow(0, rank * sum(chunks), sum(chunks))
    parts, offset = [], 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        parts.append(mine.narrow(0, offset, max(0, min(chunk, tensor.numel() - rank * chunk))))
        offset += chunk
    return parts


def _missing(elements: int, chunk: int, world_size: int) -> Iterator[int]:
    """The padding of each rank whose part is not full, elements."""
    for rank in range(elements // chunk, world_size):
        yield chunk - max(0, min(chunk, elements - rank * chunk))
