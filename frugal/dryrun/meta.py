"""A device and a process group that pretend: any world size and rank, in one process, without a device.

DeepSpeed asks an accelerator object for everything it wants to know about the device, so one that answers `meta`
runs the engine on meta tensors. torch's fake process group completes every collective at once, with any world size;
what ranks would agree on by communication is patched to this rank's own value. Everything is put back at the end.
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import deepspeed.accelerator.real_accelerator as real_accelerator
import deepspeed.comm.comm as deepspeed_comm
import deepspeed.runtime.zero.linear as zero_linear
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.zero import parameter_offload, partition_parameters, partitioned_param_coordinator, stage3
from deepspeed.utils import groups
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from frugal.dryrun import gathering
from frugal.dryrun.optimizers import without_kernels

SideStream = Callable[[str], AbstractContextManager[Any]]
Pinning = Callable[[], AbstractContextManager[Any]]

ENDLESS_BYTES = 1 << 50  # so that DeepSpeed never takes a path for devices that are nearly full


class MetaAccelerator(CPU_Accelerator):
    """Meta tensors as DeepSpeed's accelerator: synchronous, half precision of both kinds, memory without end."""

    def __init__(self, side_stream: SideStream | None = None, pinning: Pinning | None = None) -> None:
        super().__init__()
        self._side_stream = side_stream
        self._pinning = pinning
        self._name = "meta"
        self._communication_backend_name = "fake"

    def device_name(self, device_index: int | None = None) -> str:
        """Without an index: there is only one meta device."""
        return "meta"

    def current_device(self) -> str:
        """The same."""
        return "meta"

    def current_device_name(self) -> str:
        """The same."""
        return "meta"

    def device_count(self) -> int:
        """Of this node; nothing depends on it."""
        return 8

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes."""
        return ENDLESS_BYTES

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes."""
        return ENDLESS_BYTES

    def is_fp16_supported(self) -> bool:
        """As on every GPU frugal plans for."""
        return True

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """A copy, as on a host with a GPU, in a block whose size is the next power of two.

        torch/include/ATen/core/CachingHostAllocator.h:305. A host without a GPU pins nothing.
        """
        if self._pinning is None or tensor.is_meta or not tensor.nbytes:
            return tensor
        block_bytes = 1 << (tensor.nbytes - 1).bit_length()
        with self._pinning():
            block = torch.empty(block_bytes // tensor.element_size(), dtype=tensor.dtype)
        pinned = block[: tensor.numel()]
        # No view: as one it would keep the block when DeepSpeed gives the tensor other memory.
        return (pinned.view(tensor.shape) if match_shape else pinned).data

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whatever is asked for counts as pinned."""
        return True

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """DeepSpeed asks for none but its side streams: ZeRO-3 gathers on one, and all stages reduce on another.

        The object does not tell them apart: to an accelerator without streams both are None.
        """
        if self._side_stream is None:
            return nullcontext()
        gathers = sys._getframe(1).f_code.co_filename.endswith("partitioned_param_coordinator.py")
        return self._side_stream("gather" if gathers else "reduce")

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether it is on the pretended device."""
        return tensor.device.type == "meta"


@contextmanager
def pretend(
    *, rank: int, world_size: int, side_stream: SideStream | None = None, pinning: Pinning | None = None
) -> Iterator[None]:
    """Be `rank` of `world_size`, on a meta device, inside the `with` block.

    `side_stream`: entered where the engine works on a stream beside the computing one; None: it has only one.
    `pinning`: entered where pinned host memory is made; None: the host pins nothing.
    """
    with ExitStack() as stack:
        environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_SIZE": "1"}
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(_accelerator(MetaAccelerator(side_stream, pinning)))
        stack.enter_context(patch("deepspeed.comm.torch.build_shm_op", lambda: None))  # would call a compiler
        stack.enter_context(_process_group(rank, world_size))
        stack.enter_context(_agreement())
        stack.enter_context(_autocast())
        stack.enter_context(_fused_optimizers())
        stack.enter_context(gathering.at_once())
        stack.enter_context(patch("deepspeed.utils.nvtx.enable_nvtx", False))  # asks torch.compile at every call
        stack.enter_context(without_kernels())
        stack.enter_context(patch.object(F, "linear", F.linear))  # ZeRO-3 replaces it and leaves it so
        yield


@contextmanager
def _accelerator(accelerator: CPU_Accelerator) -> Iterator[None]:
    before = real_accelerator.get_accelerator()
    real_accelerator.set_accelerator(accelerator)
    try:
        yield
    finally:
        real_accelerator.set_accelerator(before)


@contextmanager
def _process_group(rank: int, world_size: int) -> Iterator[None]:
    names = [name for name in vars(groups) if name.isupper()]  # process groups that DeepSpeed makes and keeps
    before = {name: copy.copy(getattr(groups, name)) for name in names}
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        deepspeed_comm.cdb = None
        for name, value in before.items():
            setattr(groups, name, value)


@contextmanager
def _agreement() -> Iterator[None]:
    """What ranks find out about each other: they are all like this one."""

    def gather(objects: list[Any], mine: Any, group: Any = None) -> None:
        objects[:] = [mine] * len(objects)

    make_group = dist.new_group

    def new_group(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return dist.group.WORLD if backend == "gloo" else make_group(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "all_gather_object", gather))
        stack.enter_context(patch.object(dist, "new_group", new_group))
        for module in (partitioned_param_coordinator, partition_parameters, stage3, parameter_offload):
            if hasattr(module, "assert_ints_same_as_other_ranks"):
                stack.enter_context(patch.object(module, "assert_ints_same_as_other_ranks", lambda _ints: None))
        yield


@contextmanager
def _autocast() -> Iterator[None]:
    """torch refuses autocast on meta; frugal trains without it, and DeepSpeed only makes sure that it is off."""
    autocast = torch.autocast

    def on_meta(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    with (
        patch.object(torch, "autocast", on_meta),
        patch.object(zero_linear, "_is_autocast_enabled", lambda _device: False),
        patch.object(zero_linear, "_get_autocast_dtype", lambda _device: torch.bfloat16),
    ):
        yield


@contextmanager
def _fused_optimizers() -> Iterator[None]:
    """torch lets only devices with a fused kernel ask for one; the tracker stands for the kernel."""
    with (
        patch("torch.optim.adam._device_dtype_check_for_fused", lambda *_args, **_kwargs: None),
        patch("torch.optim.sgd._device_dtype_check_for_fused", lambda *_args, **_kwargs: None),
    ):
        yield
