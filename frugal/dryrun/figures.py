"""What a rehearsal says in numbers, and a measurement under the same names. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frugal.dryrun.rehearsal import Rehearsal
from frugal.planning.allocator import CachingAllocator, replay, smallest_capacity
from frugal.planning.profile import DeviceKind
from frugal.planning.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The fullest rank. Everything is in bytes.

    Attributes:
        peak_allocated_bytes: the most in live tensors; on CUDA in the allocator's blocks, as `max_memory_allocated`.
        peak_reserved_bytes: the most in the allocator's segments where nothing limits it, as `max_memory_reserved`.
        smallest_capacity_bytes: the least memory in which the step runs: a full device gives back cached segments.
        categories: what holds the peak; the sum is `peak_allocated_bytes`.
        phases: the peak of each phase; the largest is `peak_allocated_bytes`.
        host_bytes_per_node: tensors on the host of a node with all its ranks.
        operator: what allocates at the peak.
        phase: when the peak is.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    smallest_capacity_bytes: int
    categories: dict[str, int]
    phases: dict[str, int]
    host_bytes_per_node: int
    operator: str
    phase: str

    def __post_init__(self) -> None:
        assert sum(self.categories.values()) == self.peak_allocated_bytes == max(self.phases.values())


def fullest(rehearsals: Sequence[Rehearsal], kind: DeviceKind) -> Rehearsal:
    """The rank that needs most of its device."""
    return max(rehearsals, key=lambda rehearsal: _capacity(rehearsal, kind))


def figures(rehearsals: Sequence[Rehearsal], kind: DeviceKind, ranks_per_node: int) -> Figures:
    """The figures of the fullest of a cluster's rehearsed ranks."""
    rehearsal = fullest(rehearsals, kind)
    peak = rehearsal.peak
    allocated, reserved, phases = peak.total_bytes, peak.total_bytes, rehearsal.phases
    categories = dict(peak.categories)
    if kind == "cuda":
        sizes, events = _stream(rehearsal)
        unlimited = replay(sizes, events)
        allocated, reserved = unlimited.peak_allocated_bytes, unlimited.peak_reserved_bytes
        phases = _allocated_in_phases(rehearsal.timeline, sizes)
        categories["rounding"] = allocated - peak.total_bytes
    return Figures(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        smallest_capacity_bytes=_capacity(rehearsal, kind),
        categories=categories,
        phases=phases,
        host_bytes_per_node=max(each.host_bytes for each in rehearsals) * ranks_per_node,
        operator=peak.operator,
        phase=peak.phase,
    )


def _stream(rehearsal: Rehearsal) -> tuple[list[int], tuple[int, ...]]:
    timeline = rehearsal.timeline
    return timeline.sizes(rehearsal.recording.micro_batch), timeline.events


def _capacity(rehearsal: Rehearsal, kind: DeviceKind) -> int:
    """A CPU has no caching allocator: there live bytes are all there is."""
    return smallest_capacity(*_stream(rehearsal)) if kind == "cuda" else rehearsal.peak.total_bytes


def _allocated_in_phases(timeline: Timeline, sizes: Sequence[int]) -> dict[str, int]:
    """The most bytes in live blocks during each phase."""
    allocator = CachingAllocator()
    live: dict[int, Any] = {}  # storage -> its block
    peaks: dict[str, int] = {}
    ends = [first for _, first in timeline.phases[1:]] + [len(timeline.events)]
    for (phase, first), end in zip(timeline.phases, ends, strict=True):
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        for storage in timeline.events[first:end]:
            if storage in live:
                allocator.release(live.pop(storage))
            elif sizes[storage]:
                block = allocator.allocate(sizes[storage])
                assert block is not None, "nothing limits this allocator"
                live[storage] = block
        peaks[phase] = max(peaks.get(phase, 0), allocator.peak_allocated_bytes)
    return peaks
