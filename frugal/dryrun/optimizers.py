"""Optimizers whose kernels a rehearsal has no use for: they keep what the real ones keep, and compute nothing."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from frugal.planning.optimizers import EIGHT_BIT_BLOCK
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


@contextmanager
def without_kernels() -> Iterator[None]:
    """Neither a library nor a compiler is needed inside the `with` block."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(real, "adamw_8bit", lambda: AdamW8bit))
        stack.enter_context(patch.object(real, "compile_kernels", lambda **_: None))
        stack.enter_context(patch("deepspeed.ops.adam.fused_adam.FusedAdamBuilder", _Compiled))
        stack.enter_context(patch("deepspeed.ops.adam.cpu_adam.CPUAdamBuilder", _Compiled))
        stack.enter_context(patch("cpuinfo.get_cpu_info", dict))  # asks the system for a second
        yield
