"""Memory of a run by phase: the first steps on every device, evaluations and checkpoints on a GPU.

A CPU rank watches every operator until everything that a plan counts was allocated once, and then stops: watching takes
time. A GPU's allocator counts anyway, so there each evaluation and each checkpoint has its own peak.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from frugal.memory_watch import Gauge
from frugal.planning.memory.timeline import BACKWARD, FORWARD, OPTIMIZER_STEP

NUM_STEPS = 2
"""Optimizer steps until everything that a plan counts was allocated: the first one makes the optimizer's states."""

EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
"""Phases of a run that no plan has: they take less than a step."""


@dataclass(frozen=True)
class PhasePeak:
    """The most bytes of live tensors and of the allocator's segments in a phase; None: not measured."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class RunGauge:
    """The memory of this rank.

    `first_steps` measures by phase, as the engine reports its phases, for `NUM_STEPS` or to the end of `watching`.
    """

    def __init__(self, engine: Any, first_steps: Gauge | None = None, watching: ExitStack | None = None) -> None:
        self._device = engine.device
        self._first_steps, self._watching = first_steps, watching or ExitStack()
        self._is_in_step = True
        self._seen = PhasePeak()  # the largest peaks before the allocator's were reset last
        self._num_steps = 0
        self.last = PhasePeak()  # of the last `during`
        self.largest: tuple[int, int] | None = None  # samples and tokens of the largest micro-batch so far
        self.phases: dict[str, PhasePeak] = {}  # of the first steps, once they are done
        if first_steps is not None:
            engine.objective = mark_phases(engine.deepspeed, engine.objective, self._mark)

    def _mark(self, phase: str) -> None:
        if self._first_steps is not None and self._is_in_step:
            self._first_steps.mark(phase)

    def after_step(self, largest: tuple[int, int] | None) -> int | None:
        """Take note of a global batch whose largest micro-batch has this size; return the first steps' peak after the
        last of them, bytes."""
        self.largest = max(filter(None, (self.largest, largest)), key=math.prod, default=None)
        self._num_steps += 1
        gauge = self._first_steps
        if gauge is None or self._num_steps < NUM_STEPS:
            return None
        self._seen = self.so_far
        self.phases = _peaks(gauge)
        peak_bytes = gauge.peak_bytes
        self._first_steps = None
        self._watching.close()
        return peak_bytes

    @property
    def so_far(self) -> PhasePeak:
        """The most bytes that a GPU has taken so far; nothing on the CPU."""
        if self._device.type != "cuda":
            return PhasePeak()
        allocated, reserved = self._allocators_peak()
        if (gauge := self._first_steps) is not None:
            allocated, reserved = gauge.peak_bytes, max(gauge.reserved_phases.values())
        seen = self._seen
        return PhasePeak(max(seen.allocated_bytes or 0, allocated), max(seen.reserved_bytes or 0, reserved))

    def _allocators_peak(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Measure the `with` block as `phase`, which belongs to no step; `last` is its peak afterwards."""
        self.last = PhasePeak()
        if (gauge := self._first_steps) is not None:
            gauge.mark(phase)
            self._is_in_step = False
            yield
            self._is_in_step = True
            gauge.mark(OPTIMIZER_STEP)  # until the next forward, memory is as after a step
            self.last = _peaks(gauge).get(phase, PhasePeak())
        elif self._device.type == "cuda":
            self._seen = self.so_far
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            self.last = PhasePeak(*self._allocators_peak())
        else:
            yield


def _peaks(gauge: Gauge) -> dict[str, PhasePeak]:
    return {phase: PhasePeak(size, gauge.reserved_phases.get(phase)) for phase, size in gauge.phases.items()}


def mark_phases(deepspeed: Any, objective: Any, mark: Callable[[str], None]) -> Any:
    """Call `mark` when DeepSpeed's backward and optimizer step begin; return an objective that marks its forward."""

    def marked(phase: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mark(phase)
        return function(*args, **kwargs)

    for name, phase in (("backward", BACKWARD), ("step", OPTIMIZER_STEP)):
        setattr(deepspeed, name, partial(marked, phase, getattr(deepspeed, name)))
    return _MarkedObjective(objective, mark)


class _MarkedObjective:
    """An objective that marks the beginning of its forward."""

    def __init__(self, objective: Any, mark: Callable[[str], None]) -> None:
        self._objective = objective
        self._mark = mark

    def loss_sum(self, model: Any, batch: Any) -> Tensor:
        self._mark(FORWARD)
        return self._objective.loss_sum(model, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)
