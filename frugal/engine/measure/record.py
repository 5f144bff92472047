"""Measurements of a real run, as plain data: written by its ranks, read wherever they are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from frugal.config.hardware.cluster import DeviceKind
from frugal.config.request import Task


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """A model that can be built elsewhere: a transformers configuration, or the source of a factory's file.

    `task` is None if the factory has its own objective. `factory` is the name of the callable in `source`.
    """

    task: Task | None
    config: dict[str, Any] | None = None
    source: str | None = None
    factory: str | None = None

    def write(self, folder: Path) -> str:
        """Write it into `folder` and return the value for `--model` that loads it from there."""
        if self.config is not None:
            path = folder / "config.json"
            path.write_bytes(msgspec.json.encode(self.config))
            return str(path)
        path = folder / "model.py"
        path.write_text(self.source or "", encoding="utf-8")
        return f"{path}:{self.factory}"


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """Memory of two optimizer steps on one rank, bytes. Fields that only a GPU has are None on a CPU rank.

    Attributes:
        phases: the peak of each phase in live tensors; on CUDA in blocks of the caching allocator.
        reserved_bytes: the allocator's segments at their peak, as `max_memory_reserved`.
        outside_bytes: memory in use beyond the segments, by the driver: context, kernels, NCCL, other processes.
        device_bytes: the device's memory as the driver reports it.
        rss_before_bytes: resident set of the process with everything imported and nothing built.
        rss_peak_bytes: its largest resident set from then on.
    """

    phases: dict[str, int]
    reserved_bytes: int | None = None
    outside_bytes: int | None = None
    device_bytes: int | None = None
    rss_before_bytes: int
    rss_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The measurements of all ranks of one real run, in order, and what they ran on."""

    ranks: tuple[RankMeasurement, ...]
    model: ModelDefinition
    device: str
    driver: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured figures under the names of the dry run's; each is the largest of any rank, in bytes.

    Attributes:
        peak_allocated_bytes: live tensors; on CUDA in blocks, as `max_memory_allocated`.
        peak_reserved_bytes: segments of the caching allocator, as `max_memory_reserved`. A CPU caches nothing.
        phases: the peak of each phase; the largest is `peak_allocated_bytes`.
        phase: the phase of the peak.
        host_bytes_per_node: growth of the resident sets of all ranks together.
        host_before_bytes_per_node: their size before: Python and libraries.
        context_bytes: on CUDA, memory in use beyond the segments; true only on a device that nobody else uses.
        device_bytes: on CUDA, the most memory in use by the driver: segments and context.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    phases: dict[str, int]
    phase: str
    host_bytes_per_node: int
    host_before_bytes_per_node: int
    context_bytes: int | None = None
    device_bytes: int | None = None

    def __post_init__(self) -> None:
        assert self.peak_allocated_bytes == max(self.phases.values()) == self.phases[self.phase]

    @classmethod
    def of(cls, ranks: Sequence[RankMeasurement], kind: DeviceKind) -> "Measured":
        """Return the figures of a node's ranks."""
        phases = {name: max(rank.phases[name] for rank in ranks) for name in ranks[0].phases}
        phase = max(phases, key=phases.__getitem__)
        allocated = phases[phase]
        on_gpu = kind == "cuda"
        return cls(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=max(rank.reserved_bytes or 0 for rank in ranks) if on_gpu else allocated,
            phases=phases,
            phase=phase,
            host_bytes_per_node=sum(max(0, rank.rss_peak_bytes - rank.rss_before_bytes) for rank in ranks),
            host_before_bytes_per_node=sum(rank.rss_before_bytes for rank in ranks),
            context_bytes=max(rank.outside_bytes or 0 for rank in ranks) if on_gpu else None,
            device_bytes=max((rank.reserved_bytes or 0) + (rank.outside_bytes or 0) for rank in ranks)
            if on_gpu
            else None,
        )


@dataclass(frozen=True, kw_only=True)
class Capped:
    """A second run whose caching allocator was limited to the prediction, `limit_bytes`."""

    limit_bytes: int
    survived: bool


def timeline_name(rank: int) -> str:
    """Return the name of the file with a rank's timeline, JSON."""
    return f"timeline_{rank}.json"
