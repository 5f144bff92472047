"""A pretended device and process group: any world size and rank, in one process, without a device.

DeepSpeed asks an accelerator object for everything it wants to know about the device, so one that answers `meta`
runs the engine on meta tensors. torch's fake process group completes every collective at once, with any world size;
what ranks would agree on by communication is patched to this rank's own value. Everything is put back at the end.

Kernels are replaced by ones that keep the same memory, and compute and move nothing.

`SideStreams` are the CUDA streams that DeepSpeed uses besides the computing one. Storages made or freed there are freed
before that work is done, and the allocator keeps them until then
(`record_stream` in `DeepSpeedZeroOptimizer.allreduce_and_copy_with_multiple_ranks` and `allreduce_and_copy`,
`DeepSpeedZeroOptimizer_Stage3.__add_grad_to_ipg_bucket` and `free_param`). The computing stream waits for the work
before (`DeepSpeedZeroOptimizer.average_tensor`), so one piece of it is under way, and the host, which runs ahead, may
not have seen the end of one more: what was freed lives until the second next begins. ZeRO-3 lets it run no further
ahead (`max_param_reduce_events`). A piece of work makes something: a reduced bucket, a gathered parameter. Copies into
a bucket belong to the next one.
"""

import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import deepspeed.accelerator.real_accelerator as real_accelerator
import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.comm.torch import TorchBackend
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.utils import groups
from torch import Tensor

from frugal import temporary, torch_internals
from frugal.config.optimizers import EIGHT_BIT_BLOCK, SMALLEST_EIGHT_BIT
from frugal.deepspeed_adapter import contract, kernels, zero3_graph
from frugal.planning.memory.host_allocator import HostAllocator

SideStream = Callable[[str], AbstractContextManager[Any]]
Pinning = Callable[[], AbstractContextManager[Any]]

ENDLESS_BYTES = 1 << 50  # so that DeepSpeed never takes a path for devices that are nearly full


class MetaAccelerator(CPU_Accelerator):
    """Meta tensors as DeepSpeed's accelerator: synchronous, half precision of both kinds, memory without end."""

    def __init__(
        self,
        side_stream: SideStream | None = None,
        pinning: Pinning | None = None,
        empty_cache: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._empty_cache = empty_cache
        self._side_stream = side_stream
        self._pinning = pinning
        self._name = "meta"

    def communication_backend_name(self) -> str:
        """Return the name of torch's process group of any size."""
        return "fake"

    def device_name(self, device_index: int | None = None) -> str:
        """Return `meta`, without an index: there is only one."""
        return "meta"

    current_device = current_device_name = device_name

    def device_count(self) -> int:
        """Return a node's number of devices, on which nothing depends."""
        return 8

    def available_memory(self, device_index: int | None = None) -> int:
        """Return so many bytes that memory never seems short."""
        return ENDLESS_BYTES

    total_memory = available_memory

    def empty_cache(self) -> None:
        """Call the given function."""
        if self._empty_cache is not None:
            self._empty_cache()

    def is_fp16_supported(self) -> bool:
        """Return True, as on every GPU that frugal plans for."""
        return True

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """Return a copy in a pinned block whose size is the next power of two.

        (`allocate` in torch/include/ATen/core/CachingHostAllocator.h). A host without a GPU pins nothing.
        """
        if self._pinning is None or tensor.is_meta or not tensor.nbytes:
            return tensor
        block_bytes = HostAllocator.pinned_bytes(tensor.nbytes)
        with self._pinning():
            block = torch.empty(block_bytes // tensor.element_size(), dtype=tensor.dtype)
        pinned = block[: tensor.numel()]
        # No view: as one it would keep the block when DeepSpeed gives the tensor other memory.
        return (pinned.view(tensor.shape) if match_shape else pinned).data

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True: all tensors count as pinned."""
        return True

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Enter a side stream: ZeRO-3 gathers on one, and all stages reduce on another.

        The object does not tell them apart: to an accelerator without streams both are None.
        """
        if self._side_stream is None:
            return nullcontext()
        gathers = sys._getframe(1).f_code.co_filename.endswith("partitioned_param_coordinator.py")
        return self._side_stream("gather" if gathers else "reduce")

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the pretended device."""
        return tensor.device.type == "meta"


@contextmanager
def pretend(
    *,
    rank: int,
    world_size: int,
    side_stream: SideStream | None = None,
    pinning: Pinning | None = None,
    empty_cache: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Pretend to be `rank` of `world_size` on a meta device inside the `with` block.

    `side_stream`: entered where the engine works on a stream beside the computing one; None: it has only one.
    `pinning`: entered where pinned host memory is made; None: the host pins nothing.
    `empty_cache`: called where DeepSpeed has the device's allocator give back what it does not use.
    """
    contract.verify()  # before anything of it is replaced
    environment = {
        **({"RANK": str(rank)} if world_size > 1 else {}),  # by it scripts tell that torchrun has started them
        "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size), "LOCAL_SIZE": "1",
    }  # fmt: skip
    swapping = "deepspeed.runtime.swap_tensor"
    with ExitStack() as stack, patch.object(sys, "excepthook", sys.excepthook):  # torch's names the rank
        folder = stack.enter_context(temporary.folder())  # DeepSpeed makes and removes folders
        stack.enter_context(patch.dict(os.environ, environment))
        stack.callback(real_accelerator.set_accelerator, real_accelerator.get_accelerator())
        real_accelerator.set_accelerator(MetaAccelerator(side_stream, pinning, empty_cache))
        names = [name for name in vars(groups) if name.isupper()]  # process groups that DeepSpeed makes and keeps
        stack.callback(vars(groups).update, {name: copy.copy(getattr(groups, name)) for name in names})
        stack.callback(setattr, deepspeed_comm, "cdb", None)
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=torch_internals.FakeStore())
        stack.callback(lambda: dist.is_initialized() and dist.destroy_process_group())  # scripts end with that
        stack.enter_context(zero3_graph.at_once())
        for replaced in (
            patch("deepspeed.comm.torch.build_shm_op", lambda: None),  # would call a compiler
            patch("deepspeed.utils.nvtx.enable_nvtx", False),  # asks torch.compile at every call
            patch("cpuinfo.get_cpu_info", dict),  # asks the system for a second
            patch.object(F, "linear", F.linear),  # ZeRO-3 replaces it and leaves it so
            # Ranks agree: all are like this one.
            patch.object(dist, "broadcast_object_list", lambda *_, **__: None),
            patch.object(dist, "new_group", partial(_new_group, dist.new_group)),
            patch.object(partitioned_param_coordinator, "assert_ints_same_as_other_ranks", lambda _: None),
            patch.object(TorchBackend, "get_all_gather_function", lambda _: _gather),
            # Neither a library nor a compiler is needed: the tracker stands for kernels of optimizers.
            patch(torch_internals.FUSED_DEVICES, lambda: ["cpu", "cuda", "meta"]),
            patch.object(kernels, "adamw_8bit", lambda: AdamW8bit),
            patch.object(kernels, "compile_adam", lambda **_: None),
            patch("deepspeed.ops.adam.fused_adam.FusedAdamBuilder", _Compiled),
            patch("deepspeed.ops.adam.cpu_adam.CPUAdamBuilder", _Compiled),
            patch(f"{swapping}.partitioned_optimizer_swapper.AsyncIOBuilder", _Disk),
            patch(f"{swapping}.partitioned_param_swapper.AsyncIOBuilder", _Disk),
            patch.object(kernels, "own_nvme_folder", lambda *_: folder),
        ):
            stack.enter_context(replaced)
        yield


def _gather(
    output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Return the work of a gather, which is done: on meta one operator that does nothing, without the way through
    torch's wrappers to a process group that does nothing. ZeRO-3 gathers several times a layer."""
    return (
        SimpleNamespace(wait=lambda: None)
        if output_tensor.detach().is_meta
        else dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
    )


def _new_group(make: Callable[..., Any], *args: Any, backend: Any = None, **kwargs: Any) -> Any:
    return dist.group.WORLD if backend == "gloo" else make(*args, **kwargs)


class AdamW8bit(torch.optim.Optimizer):
    """The states of bitsandbytes 0.50.2's `AdamW8bit`, so that a plan needs no such library.

    `Optimizer2State.init_state` in bitsandbytes/optim/optimizer.py: `state1` and `state2` of one byte an element,
    `absmax1` and `absmax2` of four bytes a block of 256 elements, and two maps of 256 fp32 values that all parameters
    share. Its kernel updates all of them and the parameter in place (csrc/kernels.cu,
    `kOptimizerStatic8bit2StateBlockwise`), so a step takes no other memory.
    """

    def __init__(self, params: Iterable[Any], **defaults: Any) -> None:
        super().__init__(params, defaults)
        self._maps = [torch.zeros(256), torch.zeros(256)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Make the states of parameters that have none yet."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            state = self.state[parameter]
            if parameter.grad is None or state:
                continue
            if parameter.numel() < SMALLEST_EIGHT_BIT:
                state["state1"], state["state2"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                continue
            self._maps = [values.to(parameter.device) for values in self._maps]
            blocks = -(-parameter.numel() // EIGHT_BIT_BLOCK)
            for number, values in zip((1, 2), self._maps, strict=True):
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state[f"qmap{number}"] = values
            for number in (1, 2):
                state[f"absmax{number}"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)


class _Compiled:
    """In place of the builder of one of DeepSpeed's kernels, which all update in place and take no memory.

    csrc/adam/multi_tensor_adam.cu and csrc/adam/cpu_adam_impl.cpp: neither makes a tensor.
    """

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """Return functions that do nothing under the kernels' names."""

        names = ("multi_tensor_adam", "create_adam", "adam_update", "destroy_adam")
        return SimpleNamespace(**dict.fromkeys(names, lambda *_: None))


class _Disk:
    """In place of DeepSpeed's asynchronous I/O: buffers on the host are real, reading and writing takes no memory.

    A buffer is a page-locked block outside of torch's allocator (csrc/aio/py_lib/deepspeed_pin_tensor.h), here a
    tensor that the tracker sees.
    """

    _pinned: ClassVar[set[int]] = set()  # addresses of live storages

    def __init__(self, **_options: Any) -> None:
        self._pending = 0

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """Return the one class that DeepSpeed takes from the library."""
        return SimpleNamespace(aio_handle=_Disk)

    def new_cpu_locked_tensor(self, elements: int, example: Tensor) -> Tensor:
        """Return a pinned buffer on the host."""
        buffer = torch.empty(int(elements), dtype=example.dtype)
        address = torch_internals.address(buffer)
        self._pinned.add(address)
        weakref.finalize(buffer.untyped_storage(), self._pinned.discard, address).atexit = False
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Do nothing: a buffer ends with its last view."""
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is part of such a buffer."""
        return torch_internals.address(tensor) in self._pinned

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin a read, which is done at once."""
        self._pending += 1
        return 0

    async_pwrite = async_pread

    def wait(self) -> int:
        """Return how many reads and writes are done."""
        done, self._pending = self._pending, 0
        return done


WORKS_IN_FLIGHT = 2
"""Pieces of work on a side stream that may be unfinished when the host frees what they used."""


class SideStreams:
    """The unfinished work on side streams. Storages go by their address while they live, and by their index."""

    def __init__(self) -> None:
        self._working = ""  # the stream that works now
        self._is_idle = True  # nothing was made yet in the block that works now
        self._works: dict[str, int] = {}  # stream -> pieces of work begun
        self._made_on: dict[int, str] = {}  # address of a live storage -> the stream it was made on
        self._unfinished: dict[str, list[tuple[int, int]]] = {}  # stream -> (work when it was freed, storage's index)

    @contextmanager
    def at_work(self, name: str) -> Iterator[None]:
        """Mark that DeepSpeed works on the stream `name` inside the `with` block."""
        before = self._working, self._is_idle
        self._working, self._is_idle = name, True
        self._works.setdefault(name, 0)
        self._unfinished.setdefault(name, [])
        try:
            yield
        finally:
            self._working, self._is_idle = before

    def born(self, address: int) -> list[int]:
        """Begin a storage; return the indices of those that become free because a piece of work begins with it."""
        stream = self._working
        if not stream:
            return []
        self._made_on[address] = stream
        if not self._is_idle:
            return []
        self._is_idle = False
        self._works[stream] += 1
        return self._finish(stream, self._works[stream] - WORKS_IN_FLIGHT)

    def keeps(self, address: int, index: int) -> bool:
        """Return whether a storage that ends now is kept until work on a side stream is done."""
        stream = self._made_on.pop(address, self._working)
        if not stream:
            return False
        self._unfinished[stream].append((self._works[stream], index))
        return True

    def join(self) -> list[int]:
        """Wait for all streams; return the indices of the storages that become free."""
        return [index for stream, works in self._works.items() for index in self._finish(stream, works)]

    def _finish(self, stream: str, work: int) -> list[int]:
        """Finish a stream's work up to number `work`; return the storages that it held."""
        held = self._unfinished[stream]
        self._unfinished[stream] = [(number, index) for number, index in held if number > work]
        return [index for number, index in held if number <= work]
