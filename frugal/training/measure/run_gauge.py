"""Memory of a run by phase: of its first steps on every device, of evaluations and checkpoints on a GPU.

On the CPU every operator is watched until everything that a plan counts was allocated once; then it costs nothing. A
GPU's allocator counts anyway, so that there each evaluation and each save of a checkpoint can have its own peak.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frugal.planning.memory.timeline import BACKWARD, FORWARD, OPTIMIZER_STEP
from frugal.training.measure.memory_watch import CudaGauge, Gauge

EVALUATION, CHECKPOINT = "evaluation", "checkpoint"
"""Phases of a run that no plan has: what they take is less than a step takes."""


@dataclass(frozen=True)
class PhasePeak:
    """The most bytes of live tensors in a phase, and of the allocator's segments; None: not measured."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None


class RunGauge:
    """This rank's memory. `first_steps` measures by phase until `stop`, when `watching` ends it; None: nothing does."""

    def __init__(
        self, device: torch.device, first_steps: Gauge | None = None, watching: ExitStack | None = None
    ) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._first_steps = first_steps
        self._watching = watching
        self._inside: str | None = None  # of a phase that is no step's
        self._seen = PhasePeak()  # the peak so far, but for what the allocator has counted since its last reset
        self._num_steps = 0
        self.last = PhasePeak()  # of what `during` was about last
        self.largest: tuple[int, int] | None = None  # samples and tokens of the largest micro-batch so far
        self.phases: dict[str, PhasePeak] = {}  # of the first steps, once they are done

    @classmethod
    def of_run(cls, engine: Any, gauge: Gauge, watching: ExitStack, *, is_resumed: bool) -> "RunGauge":
        """That of a run whose engine was made under `gauge`; the engine tells it the phases of its steps.

        Storages that are read from a checkpoint are made by no operator: on the CPU nobody counts them, and what would
        be measured of a resumed run is too little.
        """
        if is_resumed and not isinstance(gauge, CudaGauge):
            watching.close()
            return cls(engine.device)
        made = cls(engine.device, gauge, watching)
        engine.objective = mark_phases(engine.deepspeed, engine.objective, made._mark)
        return made

    def _mark(self, phase: str) -> None:
        if self._first_steps is not None and self._inside is None:
            self._first_steps.mark(phase)

    def after_step(self, largest: tuple[int, int] | None) -> int:
        """A global batch was run whose largest micro-batch has this size; the steps so far."""
        self.largest = max(filter(None, (self.largest, largest)), key=math.prod, default=None)
        self._num_steps += 1
        return self._num_steps

    @property
    def is_measuring_steps(self) -> bool:
        """Whether the first steps are still measured by phase."""
        return self._first_steps is not None

    def stop(self) -> int:
        """The peak of the first steps, bytes; from here on no step is measured by phase."""
        assert self._first_steps is not None
        self._seen = self.so_far
        self.phases = _peaks(self._first_steps)
        peak = self._first_steps.peak_bytes
        self._first_steps = None
        if self._watching is not None:
            self._watching.close()
        return peak

    @property
    def so_far(self) -> PhasePeak:
        """The most that a GPU has taken by now; nothing on the CPU."""
        if not self._is_cuda:
            return PhasePeak()
        counted = [_counted(self._device)]
        if isinstance(self._first_steps, CudaGauge):
            counted.append(PhasePeak(self._first_steps.peak_bytes, self._first_steps.reserved_bytes))
        return _largest(self._seen, *counted)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What happens inside is `phase`, and no step's; `last` is its peak afterwards."""
        self.last = PhasePeak()
        if self._first_steps is not None:
            with self._marked(self._first_steps, phase):
                yield
            return
        if self._is_cuda:
            self._seen = self.so_far
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        if self._is_cuda:
            self.last = _counted(self._device)

    @contextmanager
    def _marked(self, gauge: Gauge, phase: str) -> Iterator[None]:
        gauge.mark(phase)
        self._inside = phase
        yield
        self._inside = None
        gauge.mark(OPTIMIZER_STEP)  # until the next forward says so, what is there is as after a step
        self.last = _peaks(gauge).get(phase, PhasePeak())


def _counted(device: torch.device) -> PhasePeak:
    """What the caching allocator has counted since its peaks were reset."""
    return PhasePeak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def _largest(*peaks: PhasePeak) -> PhasePeak:
    return PhasePeak(
        max((peak.allocated_bytes for peak in peaks if peak.allocated_bytes is not None), default=None),
        max((peak.reserved_bytes for peak in peaks if peak.reserved_bytes is not None), default=None),
    )


def _peaks(gauge: Gauge) -> dict[str, PhasePeak]:
    reserved = gauge.reserved_phases if isinstance(gauge, CudaGauge) else {}
    return {phase: PhasePeak(size, reserved.get(phase)) for phase, size in gauge.phases.items()}


def mark_phases(deepspeed: Any, objective: Any, mark: Callable[[str], None]) -> Any:
    """Have DeepSpeed's engine say when backward and optimizer step begin; an objective that says when forward does."""
    for name, phase in (("backward", BACKWARD), ("step", OPTIMIZER_STEP)):
        setattr(deepspeed, name, _marked(getattr(deepspeed, name), phase, mark))
    return _MarkedObjective(objective, mark)


def _marked(function: Callable[..., Any], phase: str, mark: Callable[[str], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        mark(phase)
        return function(*args, **kwargs)

    return call


class _MarkedObjective:
    """An objective that says when its forward begins."""

    def __init__(self, objective: Any, mark: Callable[[str], None]) -> None:
        self._objective = objective
        self._mark = mark

    def loss_sum(self, model: Any, batch: Any) -> Tensor:
        self._mark(FORWARD)
        return self._objective.loss_sum(model, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)
