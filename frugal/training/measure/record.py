"""What a real run took. Plain data: written by the ranks that measured it, read wherever it is compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from frugal.config.hardware.cluster import DeviceKind
from frugal.config.request import Task


@dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """Enough to make the same model elsewhere: a transformers configuration, or the source of a factory's file.

    `task` is None where the factory brings its own objective. `factory` is the name of the callable in `source`.
    """

    task: Task | None
    config: dict[str, Any] | None = None
    source: str | None = None
    factory: str | None = None

    def write(self, folder: Path) -> str:
        """Put it into `folder`; what `--model` calls it there."""
        if self.config is not None:
            path = folder / "config.json"
            path.write_bytes(msgspec.json.encode(self.config))
            return str(path)
        path = folder / "model.py"
        path.write_text(self.source or "", encoding="utf-8")
        return f"{path}:{self.factory}"


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """Two optimizer steps of one rank, bytes. What only a GPU has is None on a CPU rank.

    Attributes:
        phases: the peak of each phase in live tensors; on CUDA in blocks of the caching allocator.
        reserved_bytes: the allocator's segments at their most, as `max_memory_reserved`.
        outside_bytes: what the driver counts as used beyond the segments: context, kernels, NCCL, other processes.
        device_bytes: the device's memory as the driver reports it.
        rss_before_bytes: resident set of the process with everything imported and nothing built.
        rss_peak_bytes: its highest resident set from then on.
    """

    phases: dict[str, int]
    reserved_bytes: int | None = None
    outside_bytes: int | None = None
    device_bytes: int | None = None
    rss_before_bytes: int
    rss_peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """All ranks of one real run, in order, and what they ran."""

    ranks: tuple[RankMeasurement, ...]
    model: ModelDefinition
    device: str
    driver: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured figures under the names of the dry-run ones; each is the largest of any rank, in bytes.

    Attributes:
        peak_allocated_bytes: live tensors; on CUDA in blocks, as `max_memory_allocated`.
        peak_reserved_bytes: segments of the caching allocator, as `max_memory_reserved`. A CPU caches nothing.
        phases: the peak of each phase; the largest is `peak_allocated_bytes`.
        phase: when the peak is.
        host_bytes_per_node: how much the resident sets of all ranks grew together.
        host_before_bytes_per_node: what they had before: Python and libraries.
        context_bytes: on CUDA what the driver counts beyond the segments. Only true on a device nobody else uses.
        device_bytes: on CUDA the most that the driver saw used: segments and context.
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
        """The figures of a node's ranks."""
        phases = {name: max(rank.phases[name] for rank in ranks) for name in ranks[0].phases}
        phase = max(phases, key=phases.__getitem__)
        allocated = phases[phase]
        host = {
            "host_bytes_per_node": sum(max(0, rank.rss_peak_bytes - rank.rss_before_bytes) for rank in ranks),
            "host_before_bytes_per_node": sum(rank.rss_before_bytes for rank in ranks),
        }
        if kind == "cpu":
            return cls(
                peak_allocated_bytes=allocated, peak_reserved_bytes=allocated, phases=phases, phase=phase, **host
            )
        return cls(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=max(rank.reserved_bytes or 0 for rank in ranks),
            phases=phases,
            phase=phase,
            context_bytes=max(rank.outside_bytes or 0 for rank in ranks),
            device_bytes=max((rank.reserved_bytes or 0) + (rank.outside_bytes or 0) for rank in ranks),
            **host,
        )


@dataclass(frozen=True, kw_only=True)
class Capped:
    """A second run whose caching allocator was allowed no more than was predicted for it: `limit_bytes`."""

    limit_bytes: int
    survived: bool


def timeline_name(rank: int) -> str:
    """Of the file with a rank's timeline, JSON."""
    return f"timeline_{rank}.json"
