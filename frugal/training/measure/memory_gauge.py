"""Live tensor bytes of a real run: what the step held at its fullest moment, phase by phase.

On CUDA the caching allocator counts. A CPU has no such counter, so there a dispatch mode sees every storage that
an operator makes, and its end. Not seen: memory that a kernel takes and returns inside one call.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from frugal.planning.memory.timeline import (
    BACKWARD,
    FORWARD,
    INITIALISATION,
    OPTIMIZER_STEP,
    Interval,
    phase_peaks,
)
from frugal.training.measure.storage_watch import StorageWatch


class Gauge(Protocol):
    """What `gauge` gives."""

    def mark(self, phase: str) -> None:
        """From now on it is `phase`."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that live now."""
        ...

    @property
    def intervals(self) -> list[Interval]:
        """Every stretch between two marks, in order; the last one is still running."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        ...

    @property
    def phases(self) -> dict[str, int]:
        """The peak of each phase, bytes."""
        ...


class _Intervals:
    """The bookkeeping that both gauges share: `_read` gives (peak since the last reset, live), bytes."""

    def __init__(self) -> None:
        self._phase = INITIALISATION
        self._finished: list[Interval] = []

    def _read(self) -> tuple[int, int]:
        raise NotImplementedError  # the allocator's gauge and the storages' each have their own

    def _reset_peak(self) -> None:
        raise NotImplementedError  # as above

    def mark(self, phase: str) -> None:
        """From now on it is `phase`."""
        self._finished.append(Interval(self._phase, *self._read()))
        self._phase = phase
        self._reset_peak()

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that live now."""
        return self._read()[1]

    @property
    def intervals(self) -> list[Interval]:
        """Every stretch between two marks, in order; the last one is still running."""
        return [*self._finished, Interval(self._phase, *self._read())]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        return max(interval.peak_bytes for interval in self.intervals)

    @property
    def phases(self) -> dict[str, int]:
        """The peak of each phase, bytes."""
        return phase_peaks(self.intervals)


class CudaGauge(_Intervals):
    """Counts of the caching allocator: requested bytes rounded up to its blocks, as `max_memory_allocated`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._reserved = 0
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that segments took, as `max_memory_reserved`."""
        return max(self._reserved, torch.cuda.max_memory_reserved(self._device))

    def _read(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)

    def _reset_peak(self) -> None:
        self._reserved = self.reserved_bytes  # the reset below is one of all peaks
        torch.cuda.reset_peak_memory_stats(self._device)


class HostGauge(StorageWatch, _Intervals):
    """Counts storages of one kind of device."""

    def __init__(self, device: torch.device) -> None:
        StorageWatch.__init__(self)
        _Intervals.__init__(self)
        self._device = device
        self._counted: set[int] = set()
        self._live = self._peak = 0

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Count it."""
        if tensor.device.type == self._device.type:
            self._counted.add(address)
            self._live += size_bytes
            self._peak = max(self._peak, self._live)

    def died(self, address: int, size_bytes: int) -> None:
        """Count it no more."""
        if address in self._counted:
            self._counted.discard(address)
            self._live -= size_bytes

    def _read(self) -> tuple[int, int]:
        return self._peak, self._live

    def _reset_peak(self) -> None:
        self._peak = self._live


@contextmanager
def gauge(device: torch.device | str, holding: Iterable[Tensor] = ()) -> Iterator[Gauge]:
    """Measure the tensors on `device` inside the `with` block.

    `holding` are tensors that exist already and are to be counted; CUDA counts everything anyway.
    """
    device = torch.device(device)
    if device.type == "cuda":
        yield CudaGauge(device)
        return
    host = HostGauge(device)
    host.hold(holding)
    del holding  # it would keep them alive
    with host:
        yield host


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
