"""Tensors that a rank on a CPU has and a dry run has not, and the other way round.

A dry run on kind `cpu` keeps device and host apart, as meta and CPU tensors, and its collectives take nothing. For a
resident set three things are different, none of which a GPU's host has:

- what DeepSpeed moves between host and device stays where it is: `tensor.to(device)` is the tensor itself, where a
  dry run counts a second one (`offload_param`'s gathered parameters, gradients on their way to the optimizer);
- gloo's reduce-scatter is an all-reduce of a copy of its input (ProcessGroupGloo.cpp), used by ZeRO-3 on any number of
  ranks. Measured with torch 2.13: 100 MiB for an input of 100 MiB, and 0 for all-reduce, reduce and broadcast;
- gloo's all-gather puts the parts together in a copy of its output. Measured: 100 MiB for an output of 100 MiB.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from frugal.deepspeed_adapter import zero3_graph
from frugal.dryrun.trace.recorder import Tracker

aten = torch.ops.aten


@contextmanager
def dry_run_as_process() -> Iterator[None]:
    """Inside the `with` block dry runs on kind `cpu` count what a process holds."""
    reduce_scatter, all_gather = zero3_graph._reduce_scatter_coalesced, dist.all_gather_into_tensor

    @torch.no_grad()
    def reduce_a_copy(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
        parts = reduce_scatter(tensors, group)
        world_size = dist.get_world_size(group)
        tensors[0].new_empty(world_size * sum(math.ceil(tensor.numel() / world_size) for tensor in tensors))
        return parts

    def gather_a_copy(output_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        torch.empty_like(output_tensor)
        return all_gather(output_tensor, *args, **kwargs)

    with (
        patch("frugal.dryrun.run.Tracker", OneMemory),
        patch.object(zero3_graph, "_reduce_scatter_coalesced", reduce_a_copy),
        patch.object(dist, "all_gather_into_tensor", gather_a_copy),
    ):
        yield


class OneMemory(Tracker):
    """A tracker to which a tensor that moves between host and device is still the one it was."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._moved: dict[int, torch.UntypedStorage] = {}  # address of what it moved to -> what is kept alive by it

    def _see(self, tensor: Tensor, operator: Any, inputs: tuple[Any, ...]) -> None:
        # Not in `execute`: what a dry run answers to `.item()` depends on the frames that call it.
        if operator is aten._to_copy.default and inputs[0].dtype == tensor.dtype and inputs[0].device != tensor.device:
            self._moved[tensor.untyped_storage()._cdata] = inputs[0].untyped_storage()
        super()._see(tensor, operator, inputs)

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Record it, unless it only moved."""
        if address not in self._moved:
            super().born(address, size_bytes, tensor, operator)

    def died(self, address: int, size_bytes: int) -> None:
        """Record its end, and let go of what it was before."""
        super().died(address, size_bytes)
        self._moved.pop(address, None)
