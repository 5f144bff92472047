"""Kernels that a rehearsal has no use for: they keep what the real ones keep, and compute and move nothing."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor

from frugal.planning.optimizers import EIGHT_BIT_BLOCK
from frugal.planning.plan import Plan
from frugal.training import nvme
from frugal.training import optimizers as real

SMALLEST_EIGHT_BIT = 4096
"""Elements; bitsandbytes keeps fp32 moments of smaller parameters (`min_8bit_size`)."""


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
        """The kernels' names."""

        def nothing(*_args: Any) -> None:
            return None

        return SimpleNamespace(
            multi_tensor_adam=nothing, create_adam=nothing, adam_update=nothing, destroy_adam=nothing
        )


class _Disk:
    """In place of DeepSpeed's asynchronous I/O: buffers on the host are real, reading and writing takes no memory.

    A buffer is a page-locked block outside of torch's allocator (csrc/aio/py_lib/deepspeed_pin_tensor.h), here a
    tensor that the tracker sees.
    """

    _pinned: ClassVar[set[int]] = set()  # addresses of live storages

    def __init__(self, **_options: Any) -> None:
        self._pending = 0

    def load(self, verbose: bool = True) -> SimpleNamespace:
        """The one class that DeepSpeed takes from the library."""
        return SimpleNamespace(aio_handle=_Disk)

    def new_cpu_locked_tensor(self, elements: int, example: Tensor) -> Tensor:
        """A pinned buffer on the host."""
        buffer = torch.empty(int(elements), dtype=example.dtype)
        storage = buffer.untyped_storage()
        self._pinned.add(storage._cdata)
        weakref.finalize(storage, self._pinned.discard, storage._cdata).atexit = False
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """It ends with its last view."""
        return True

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it is part of such a buffer."""
        return tensor.untyped_storage()._cdata in self._pinned

    def async_pread(self, buffer: Tensor, path: str, offset: int) -> int:
        """Begin to read."""
        self._pending += 1
        return 0

    async_pwrite = async_pread

    def wait(self) -> int:
        """How many reads and writes are done."""
        done, self._pending = self._pending, 0
        return done


@contextmanager
def without_kernels() -> Iterator[None]:
    """Neither a library nor a compiler is needed inside the `with` block."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(real, "adamw_8bit", lambda: AdamW8bit))
        stack.enter_context(patch.object(real, "compile_kernels", lambda **_: None))
        stack.enter_context(patch("deepspeed.ops.adam.fused_adam.FusedAdamBuilder", _Compiled))
        stack.enter_context(patch("deepspeed.ops.adam.cpu_adam.CPUAdamBuilder", _Compiled))
        for module in ("partitioned_optimizer_swapper", "partitioned_param_swapper"):
            stack.enter_context(patch(f"deepspeed.runtime.swap_tensor.{module}.AsyncIOBuilder", _Disk))
        folder = stack.enter_context(TemporaryDirectory(prefix="frugal-"))  # DeepSpeed makes and removes folders

        def elsewhere(plan: Plan, _votes: Any) -> Plan:
            return replace(plan, strategy=replace(plan.strategy, nvme_path=folder))

        stack.enter_context(patch.object(nvme, "with_own_folder", elsewhere))
        stack.enter_context(patch("cpuinfo.get_cpu_info", dict))  # asks the system for a second
        yield
