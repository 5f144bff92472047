"""The figures of a dry run: its peaks, its live bytes over time, and the ranks that need one. No torch here.

Not all ranks need to be dry-run, only those that may be the fullest. ZeRO-1 and 2 lay all gradients end to end and cut
the row into equal parts (stage_1_and_2.py), through parameters.
Until the step a rank keeps the whole gradient of every parameter that its part touches, so the one whose part
touches most is the fullest; unless the last, whose gradients come first, while most activations still live, or one
in between. On three to five ranks the first and the last alone were up to 4 % low, where the cuts go through large
parameters. The other stages treat all ranks alike.

Left out: the padding at the end of the row, a few bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from frugal.config.hardware.cluster import Device, DeviceKind
from frugal.dryrun.messages import DryRun
from frugal.planning.memory import breakdown
from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.breakdown import Bounds, of_device, widened
from frugal.planning.memory.profile import MemoryProfile, RankMemory


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of the fullest rank, by phase and in total. Everything is in bytes.

    Attributes:
        peak_allocated_bytes: the most in live tensors; on CUDA in the allocator's blocks, as `max_memory_allocated`.
        peak_reserved_bytes: the most in the allocator's segments where nothing limits it, as `max_memory_reserved`.
        smallest_capacity_bytes: the least memory in which the step runs: a full device gives back cached segments.
        categories: bytes at the peak by category; the sum is `peak_allocated_bytes`.
        phases: the peak of each phase; the largest is `peak_allocated_bytes`.
        host_bytes_per_node: of a node with all its ranks: their tensors on the host, and their processes.
        operator: the one that allocates at the peak.
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


def fullest(dry_runs: Sequence[DryRun], kind: DeviceKind) -> DryRun:
    """Return the rank with the most bytes in live tensors."""
    return max(dry_runs, key=lambda dry_run: max(_phases(dry_run, kind).values()))


def figures(
    dry_runs: Sequence[DryRun], kind: DeviceKind, ranks_per_node: int, *, expandable_segments: bool = False
) -> Figures:
    """Return the figures of a cluster's dry-run ranks: each the largest of any rank, the composition that of the
    fullest."""
    phases = [_phases(dry_run, kind) for dry_run in dry_runs]
    allocated = max(max(each.values()) for each in phases)
    peak = fullest(dry_runs, kind).peak
    categories = dict(peak.categories)
    reserved = capacity = allocated
    if kind == "cuda":
        categories["rounding"] = allocated - peak.total_bytes
        replays = [_replays(dry_run, expandable_segments=expandable_segments) for dry_run in dry_runs]
        reserved = max(each.under().peak_reserved_bytes for each in replays)
        capacity = max(each.smallest_capacity() for each in replays)
    return Figures(
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        smallest_capacity_bytes=capacity,
        categories=categories,
        phases={name: max(each[name] for each in phases) for name in phases[0]},
        host_bytes_per_node=breakdown.node_host_bytes(max(each.host_bytes for each in dry_runs), kind, ranks_per_node),
        operator=peak.operator,
        phase=peak.phase,
    )


def interval(figures: Figures, device: Device, assumptions: Sequence[str]) -> Bounds:
    """Return the bounds of the memory that `device` needs, its context included."""
    live = figures.peak_allocated_bytes - figures.categories.get("rounding", 0)
    bounds = of_device(live, figures.smallest_capacity_bytes, device)
    of_data = figures.categories["activations"] + figures.categories["temporary"]
    return widened(bounds, figures.smallest_capacity_bytes + device.context_bytes, of_data, assumptions)


def _replays(dry_run: DryRun, *, expandable_segments: bool = False) -> Replays:
    timeline = dry_run.timeline
    return Replays(timeline.fixed, timeline.events, timeline.empties, expandable_segments=expandable_segments)


def _phases(dry_run: DryRun, kind: DeviceKind) -> dict[str, int]:
    """Return the peak of each phase: live tensors, on CUDA in blocks. A CPU has no caching allocator."""
    timeline = dry_run.timeline
    if kind == "cuda":
        timeline = replace(timeline, fixed=_replays(dry_run).block_bytes())
    return timeline.phase_peaks(dry_run.micro_batch)


def touched_elements(parameters: Sequence[int], world_size: int) -> list[int]:
    """Return the gradient elements that each rank keeps. `parameters`: elements of each trainable parameter, in the
    model's order."""
    part = -(-sum(parameters) // world_size)
    touched = [0] * world_size
    start = 0
    for elements in parameters:
        if elements:
            for rank in range(start // part, (start + elements - 1) // part + 1):
                touched[rank] += elements
        start += elements
    return touched


def likely_fullest(parameters: Sequence[int], world_size: int, most: int) -> tuple[int, ...]:
    """Return at most `most` ranks under ZeRO-1 or 2, in order: the last, those that touch most and, if there is room,
    the first."""
    last = world_size - 1
    touched = touched_elements(parameters, world_size)
    by_size = sorted(range(last), key=lambda rank: (-touched[rank], rank))
    wanted = [last, *by_size] if most < 3 else [last, 0, *(rank for rank in by_size if rank)]
    return tuple(sorted(wanted[:most]))


def fullest_drafted(drafted: MemoryProfile, micro_batch: int) -> tuple[int, ...]:
    """Return the rank with most live bytes, and of the others the one whose allocator needs most, in order. Of ranks
    that arithmetic finds alike the last, as in `likely_fullest`: dry runs tell them apart.

    These are two: where a cut goes through a huge embedding, the first rank's largest request, probably for the norm
    of its gradient, comes when the allocator has no segment for it.
    """

    def needed_bytes(rank: RankMemory) -> int:
        if drafted.kind == "cpu":
            return rank.timeline.peak_bytes(micro_batch)
        return rank.replays(micro_batch, expandable_segments=drafted.strategy.expandable_segments).smallest_capacity()

    fullest_live = max(drafted.ranks, key=lambda rank: rank.timeline.peak_bytes(micro_batch))
    others = [rank for rank in drafted.ranks if rank is not fullest_live]
    return tuple(sorted((fullest_live.rank, max(reversed(others), key=needed_bytes).rank)))


def rank_memories(dry_runs: Sequence[DryRun], ranks: Sequence[int]) -> tuple[RankMemory, ...]:
    """Return the memory of each dry run. `ranks`: their ranks, repeated as often as needed."""
    return tuple(
        RankMemory(rank=ranks[i % len(ranks)], timeline=dry_run.timeline, host_bytes=dry_run.host_bytes)
        for i, dry_run in enumerate(dry_runs)
    )
