"""What one strategy costs in memory and arithmetic, for every micro-batch. Made by dry runs, read by planning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from frugal.config.hardware.cluster import Device, DeviceKind
from frugal.planning.cost import Work
from frugal.planning.memory import breakdown as host
from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.memory.interval import of_device
from frugal.planning.memory.loading import NOT_PACKED, Loading, Packed
from frugal.planning.memory.timeline import Timeline
from frugal.planning.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One dry-run rank: its timeline, and the peak of its tensors on the host, bytes.

    `host_bytes_per_sample` is what activations in host memory add to the latter. `gathers`: under ZeRO-3 the
    all-gathers of a micro-step and the elements they bring, where they were counted.
    """

    rank: int
    timeline: Timeline
    host_bytes: int
    host_bytes_per_sample: int = 0
    gathers: tuple[int, int] | None = None

    @cached_property
    def _replays(self) -> dict[tuple[int, bool], Replays]:
        return {}

    def replays(self, micro_batch: int, *, expandable_segments: bool = False) -> Replays:
        """The step with `micro_batch` samples through CUDA's caching allocator."""
        key = (micro_batch, expandable_segments)
        if key not in self._replays:
            timeline = self.timeline
            self._replays[key] = Replays(
                timeline.sizes(micro_batch),
                timeline.events,
                timeline.empties,
                expandable_segments=expandable_segments,
                least_bytes=timeline.peak_bytes(micro_batch),
            )
        return self._replays[key]

    def survives(self, micro_batch: int, limit_bytes: int, *, expandable_segments: bool = False) -> bool:
        """Whether the allocator gets through the step with so much memory."""
        return self.replays(micro_batch, expandable_segments=expandable_segments).survives(limit_bytes)

    def capacity(self, micro_batch: int, usable_bytes: int, *, expandable_segments: bool = False) -> int:
        """The fewest bytes with which CUDA's caching allocator gets through the step; never above `usable_bytes`
        where these are enough."""
        replays = self.replays(micro_batch, expandable_segments=expandable_segments)
        return replays.smallest_capacity(usable_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """One model under one strategy on a world of ranks.

    Attributes:
        strategy: what was dry-run.
        world_size: ranks.
        ranks_per_node: ranks that share one host.
        accumulates: whether there is more than one micro-step; more than two take no more than two.
        kind: the device that kernels were chosen for.
        task: what is trained.
        max_positions: tokens in the longest sample the model can read; None: no limit.
        parameters: elements.
        trainable_parameters: elements.
        largest_parameter: elements.
        trainable_sizes: elements of each trainable parameter.
        work: what one micro-step makes the device do.
        ranks: the dry-run ranks; one of them is the fullest.
        sampled: where the memory is no timeline for all micro-batches, the micro-batches that were dry-run;
            `ranks` then has one entry a rank and micro-batch, micro-batches outermost.
        counts_slack: whether what the allocator wastes is part of the memory.
        loading: what it takes before the first step.
        packed: weights that are kept in fewer bits.
    """

    strategy: Strategy
    world_size: int
    ranks_per_node: int
    accumulates: bool
    kind: DeviceKind
    task: str
    max_positions: int | None
    parameters: int
    trainable_parameters: int
    largest_parameter: int
    trainable_sizes: tuple[int, ...]
    work: Work
    ranks: tuple[RankMemory, ...]
    sampled: tuple[int, ...] = ()
    counts_slack: bool = True
    loading: Loading | None = None
    packed: Packed = NOT_PACKED

    def memory(self, micro_batch: int, device: Device) -> MemoryBreakdown:
        """The peak of the fullest rank on `device`, and the host memory of a full node."""
        ranks, sampled = self._ranks_at(micro_batch)
        expandable = self.strategy.expandable_segments
        memory = fullest(ranks, sampled, device, self.ranks_per_node, expandable, self.counts_slack)
        return replace(memory, loading=self.loading)

    @property
    def gathers(self) -> tuple[int, int] | None:
        """Under ZeRO-3 the all-gathers of a micro-step and the elements they bring, where they were counted."""
        return self.ranks[0].gathers

    def in_other_segments(self, micro_batch: int, device: Device) -> MemoryBreakdown:
        """`memory` with expandable segments where the strategy has none, and without where it has."""
        strategy = replace(self.strategy, expandable_segments=not self.strategy.expandable_segments)
        return replace(self, strategy=strategy).memory(micro_batch, device)

    @property
    def draft(self) -> "MemoryProfile":
        """The same if the allocator wasted nothing: memory from below, found a hundred times sooner."""
        return replace(self, counts_slack=False)

    def fits(self, micro_batch: int, device: Device) -> bool:
        """Whether `memory` would say so, found sooner."""
        ranks, sampled = self._ranks_at(micro_batch)
        if max(rank.timeline.peak_bytes(sampled) for rank in ranks) > device.usable_bytes:
            return False
        if device.kind == "cpu" or not self.counts_slack:
            return True
        expandable = self.strategy.expandable_segments
        return all(rank.survives(sampled, device.usable_bytes, expandable_segments=expandable) for rank in ranks)

    def largest_micro_batch(self, device: Device, cap: int) -> int:
        """The most samples, up to `cap`, whose step fits on `device`; 0: not even one."""
        if self.sampled:
            cap = min(cap, self.sampled[-1])
        most = _bisect(0, cap, lambda micro_batch: self._live_bytes(micro_batch) <= device.usable_bytes)
        fits = partial(self.fits, device=device)
        too_many, step = most + 1, 1
        while most and not fits(most):  # the allocator seldom takes more than a few samples' worth
            too_many, most, step = most, max(0, most - step), 2 * step
        return _bisect(most, too_many - 1, fits)

    def _live_bytes(self, micro_batch: int) -> int:
        ranks, sampled = self._ranks_at(micro_batch)
        return max(rank.timeline.peak_bytes(sampled) for rank in ranks)

    def _ranks_at(self, micro_batch: int) -> tuple[tuple[RankMemory, ...], int]:
        """The ranks to ask, and at which micro-batch: the next larger one that was dry-run, where not all are."""
        if not self.sampled:
            return self.ranks, micro_batch
        index = next((i for i, known in enumerate(self.sampled) if known >= micro_batch), len(self.sampled) - 1)
        num_ranks = len(self.ranks) // len(self.sampled)
        return self.ranks[index * num_ranks : (index + 1) * num_ranks], self.sampled[index]


def fullest(
    ranks: Sequence[RankMemory],
    micro_batch: int,
    device: Device,
    ranks_per_node: int,
    expandable_segments: bool = False,
    counts_slack: bool = True,
) -> MemoryBreakdown:
    """The breakdown of the rank that needs most. The others are only evaluated in full if they might need more."""
    on_host = max(rank.host_bytes + rank.host_bytes_per_sample * micro_batch for rank in ranks)
    host_bytes = host.node_host_bytes(on_host, device.kind, ranks_per_node)
    first, *others = sorted(ranks, key=lambda rank: -rank.timeline.peak_bytes(micro_batch))
    most = breakdown(first, micro_batch, device, host_bytes, expandable_segments, counts_slack)
    if device.kind == "cpu" or not counts_slack:
        return most
    for rank in others:
        if not rank.survives(micro_batch, most.total_bytes - most.context, expandable_segments=expandable_segments):
            other = breakdown(rank, micro_batch, device, host_bytes, expandable_segments)
            most = max(most, other, key=lambda memory: memory.total_bytes)
    return most


def breakdown(
    rank: RankMemory,
    micro_batch: int,
    device: Device,
    host_bytes_per_node: int,
    expandable_segments: bool = False,
    counts_slack: bool = True,
) -> MemoryBreakdown:
    """A rank's peak on `device`: live storages by category, what the allocator adds, and the context."""
    peak = rank.timeline.peak(micro_batch)
    slack = 0
    if device.kind == "cuda" and counts_slack:
        capacity = rank.capacity(micro_batch, device.usable_bytes, expandable_segments=expandable_segments)
        slack = capacity - peak.total_bytes
    return MemoryBreakdown(
        **peak.categories,
        slack=slack,
        context=device.context_bytes,
        total_bytes=peak.total_bytes + slack + device.context_bytes,
        usable_bytes=device.usable_bytes,
        host_bytes_per_node=host_bytes_per_node,
        phase=peak.phase,
        operator=peak.operator,
        phase_peaks={},
        loading=None,
        interval=of_device(peak.total_bytes, peak.total_bytes + slack, device) if counts_slack else None,
    )


def _bisect(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The largest number in `low..high` for which `holds` is true; it is for `low`, and for all below a true one."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
