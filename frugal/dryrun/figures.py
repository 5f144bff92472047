"""What a rehearsal says in numbers, and a measurement under the same names. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frugal.dryrun.rehearsal import Rehearsal
from frugal.planning import host
from frugal.planning.allocator import CachingAllocator
from frugal.planning.profile import DeviceKind
from frugal.planning.replay import Replays


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The fullest rank, in each phase and in all. Everything is in bytes.

    Attributes:
        peak_allocated_bytes: the most in live tensors; on CUDA in the allocator's blocks, as `max_memory_allocated`.
        peak_reserved_bytes: the most in the allocator's segments where nothing limits it, as `max_memory_reserved`.
        smallest_capacity_bytes: the least memory in which the step runs: a full device gives back cached segments.
        categories: what holds the peak; the sum is `peak_allocated_bytes`.
        phases: the peak of each phase; the largest is `peak_allocated_bytes`.
        host_bytes_per_node: of a node with all its ranks: their tensors on the host, and their processes.
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
    """The rank with most in live tensors."""
    return max(rehearsals, key=lambda rehearsal: max(_phases(rehearsal, kind).values()))


def figures(rehearsals: Sequence[Rehearsal], kind: DeviceKind, ranks_per_node: int) -> Figures:
    """The figures of a cluster's rehearsed ranks: each the largest of any rank, what holds the peak the fullest's."""
    phases = [_phases(rehearsal, kind) for rehearsal in rehearsals]
    allocated = max(max(each.values()) for each in phases)
    peak = fullest(rehearsals, kind).peak
    categories = dict(peak.categories)
    reserved = capacity = allocated
    if kind == "cuda":
        categories["rounding"] = allocated - peak.total_bytes
        replays = [Replays(*_stream(rehearsal)) for rehearsal in rehearsals]
        reserved = max(each.under().peak_reserved_bytes for each in replays)
        capacity = max(each.smallest_capacity() for each in replays)
    return Figures(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        smallest_capacity_bytes=capacity,
        categories=categories,
        phases={name: max(each[name] for each in phases) for name in phases[0]},
        host_bytes_per_node=host.node_bytes(max(each.host_bytes for each in rehearsals), kind, ranks_per_node),
        operator=peak.operator,
        phase=peak.phase,
    )


def _stream(rehearsal: Rehearsal) -> tuple[list[int], tuple[int, ...]]:
    timeline = rehearsal.timeline
    return timeline.sizes(rehearsal.recording.micro_batch), timeline.events


def _phases(rehearsal: Rehearsal, kind: DeviceKind) -> dict[str, int]:
    """The peak of each phase: live tensors, on CUDA in blocks. A CPU has no caching allocator."""
    if kind == "cpu":
        return rehearsal.phases
    timeline, (sizes, events) = rehearsal.timeline, _stream(rehearsal)
    allocator = CachingAllocator()
    live: dict[int, Any] = {}  # storage -> its block
    peaks: dict[str, int] = {}
    ends = [first for _, first in timeline.phases[1:]] + [len(events)]
    for (phase, first), end in zip(timeline.phases, ends, strict=True):
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        for storage in events[first:end]:
            if storage in live:
                allocator.release(live.pop(storage))
            elif sizes[storage]:
                block = allocator.allocate(sizes[storage])
                assert block is not None, "nothing limits this allocator"
                live[storage] = block
        peaks[phase] = max(peaks.get(phase, 0), allocator.peak_allocated_bytes)
    return peaks
