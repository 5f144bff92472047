"""The memory and the work of a model under one strategy, for every micro-batch. Made by dry runs, read by planning."""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from frugal.config.hardware.cluster import Device, DeviceKind
from frugal.planning.cost import ModelCosts
from frugal.planning.memory.allocator import KnownReplays, Replays
from frugal.planning.memory.breakdown import Loading, MemoryBreakdown, node_host_bytes, of_device
from frugal.planning.memory.timeline import Timeline
from frugal.planning.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The memory of one dry-run rank.

    Attributes:
        rank: its number.
        timeline: its storages on the device.
        host_bytes: the peak of its tensors on the host.
        host_bytes_per_sample: what each sample adds to that where activations live in host memory.
        gathers: ZeRO-3's all-gathers of a micro-step and the elements they bring, where they were counted.
        known: replays of the allocator that are not done again; shared by all ranks of a source.
    """

    rank: int
    timeline: Timeline
    host_bytes: int
    host_bytes_per_sample: int = 0
    gathers: tuple[int, int] | None = None
    known: KnownReplays = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _events(self) -> "array[int]":
        return array("q", self.timeline.events)  # of which each replay takes a copy, which is 80 times as fast

    @cached_property
    def _replays(self) -> dict[tuple[int, bool], Replays]:
        return {}

    def replays(self, micro_batch: int, *, expandable_segments: bool = False) -> Replays:
        """Return replays of the step with `micro_batch` samples through CUDA's caching allocator."""
        key = (micro_batch, expandable_segments)
        if key not in self._replays:
            self._replays[key] = Replays(
                self.timeline.sizes(micro_batch),
                self._events,
                self.timeline.empties,
                expandable_segments=expandable_segments,
                known=self.known,
            )
        return self._replays[key]


VARLEN = "varlen"
"""The kernel of packs whose attention runs document by document: flash attention without a mask."""

GROUPED = "grouped_mm"
"""The operator that multiplies the rows of each expert with its matrix."""

KERNELS = {
    "torch_attn._varlen_attn.default": VARLEN,
    "aten._scaled_dot_product_cudnn_attention.default": "cuDNN",
    "aten._scaled_dot_product_flash_attention.default": "flash",
    "aten._scaled_dot_product_efficient_attention.default": "memory-efficient",
    "aten._safe_softmax.default": "math",
    "aten._grouped_mm.default": GROUPED,
}
"""The words for torch's kernels of attention and experts on GPUs, by the operator that only they run."""


def kernels_in(timeline: Timeline) -> tuple[str, ...]:
    """Return the kernels of attention and experts in a step on a GPU, in words; none of what the model computes
    itself, such as experts in a loop."""
    return tuple(word for operator, word in KERNELS.items() if operator in timeline.names)


@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """One model under one strategy on a world of ranks.

    Attributes:
        strategy: what was dry-run.
        ranks_per_node: ranks that share one host.
        kind: the device that kernels were chosen for.
        costs: the model's sizes and the work of one micro-step.
        ranks: the dry-run ranks; one of them is the fullest.
        sampled: where the memory is no timeline for all micro-batches, the micro-batches that were dry-run;
            `ranks` then has one entry a rank and micro-batch, micro-batches outermost.
        counts_slack: whether the memory includes what the allocator wastes.
        loading: memory before the first step.
    """

    strategy: Strategy
    ranks_per_node: int
    kind: DeviceKind
    costs: ModelCosts
    ranks: tuple[RankMemory, ...]
    sampled: tuple[int, ...] = ()
    counts_slack: bool = True
    loading: Loading | None = None

    def memory(self, micro_batch: int, device: Device) -> MemoryBreakdown:
        """Return the peak of the fullest rank on `device`, and the host memory of a full node."""
        ranks, sampled = self._ranks_at(micro_batch)
        expandable = self.strategy.expandable_segments
        memory = fullest(ranks, sampled, device, self.ranks_per_node, expandable, self.counts_slack)
        return replace(memory, loading=self.loading)

    @property
    def kernels(self) -> tuple[str, ...]:
        """As `kernels_in`; none on CPU ranks."""
        return kernels_in(self.ranks[0].timeline) if self.kind == "cuda" else ()

    @property
    def draft(self) -> "MemoryProfile":
        """The profile without the allocator's waste: a lower bound of the memory, found a hundred times sooner."""
        return replace(self, counts_slack=False)

    def fits(self, micro_batch: int, device: Device) -> bool:
        """Return whether `memory` fits, without computing its breakdown."""
        ranks, sampled = self._ranks_at(micro_batch)
        if max(rank.timeline.peak_bytes(sampled) for rank in ranks) > device.usable_bytes:
            return False
        if device.kind == "cpu" or not self.counts_slack:
            return True
        expandable = self.strategy.expandable_segments
        replays = (rank.replays(sampled, expandable_segments=expandable) for rank in ranks)
        return all(each.survives(device.usable_bytes) for each in replays)

    def largest_micro_batch(self, device: Device, cap: int) -> int:
        """Return the most samples, up to `cap`, whose step fits on `device`; 0: not even one."""
        if self.sampled:
            cap = min(cap, self.sampled[-1])
        fits_without_slack, fits = (partial(each.fits, device=device) for each in (self.draft, self))
        most = cap - bisect_left(range(cap, 0, -1), True, key=fits_without_slack)
        return largest_near(most, fits)  # the allocator seldom takes more than a few samples' worth

    def _ranks_at(self, micro_batch: int) -> tuple[tuple[RankMemory, ...], int]:
        """Return the ranks and the micro-batch to evaluate: the next larger one that was dry-run, where not all are."""
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
    """Return the breakdown of the rank that needs most; the others are replayed only if they might need more."""
    on_host = max(rank.host_bytes + rank.host_bytes_per_sample * micro_batch for rank in ranks)
    host_bytes = node_host_bytes(on_host, device.kind, ranks_per_node)
    first, *others = sorted(ranks, key=lambda rank: -rank.timeline.peak_bytes(micro_batch))
    most = breakdown(first, micro_batch, device, host_bytes, expandable_segments, counts_slack)
    if device.kind == "cpu" or not counts_slack:
        return most
    for rank in others:
        replays = rank.replays(micro_batch, expandable_segments=expandable_segments)
        if not replays.survives(most.total_bytes - most.context):
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
    """Return a rank's peak on `device`: live storages by category, the allocator's slack, and the context."""
    peak = rank.timeline.peak(micro_batch)
    slack = 0
    if device.kind == "cuda" and counts_slack:
        replays = rank.replays(micro_batch, expandable_segments=expandable_segments)
        slack = replays.smallest_capacity(device.usable_bytes) - peak.total_bytes
    return MemoryBreakdown(
        **peak.categories,  # type: ignore[arg-type]  # which have no `phase_peaks` and no `loading`
        slack=slack,
        context=device.context_bytes,
        total_bytes=peak.total_bytes + slack + device.context_bytes,
        usable_bytes=device.usable_bytes,
        host_bytes_per_node=host_bytes_per_node,
        phase=peak.phase,
        operator=peak.operator,
        interval=of_device(peak.total_bytes, peak.total_bytes + slack, device) if counts_slack else None,
    )


def reserved_with_room(ranks: Sequence[RankMemory], micro_batch: int, device: Device, expandable_segments: bool) -> int:
    """Return the most bytes that a rank's allocator reserves on `device` when nothing else limits it; 0 on a CPU."""
    if device.kind == "cpu":
        return 0
    replays = [rank.replays(micro_batch, expandable_segments=expandable_segments) for rank in ranks]
    return min(max(each.under().peak_reserved_bytes for each in replays), device.usable_bytes + device.margin_bytes)


def largest_near(most: int, holds: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` for which `holds` is true, and for all below, too; 0: none. It is likely
    to be near `most`: steps down from there double, then the last one is bisected.
    """
    too_many, step = most + 1, 1
    while most and not holds(most):
        too_many, most, step = most, max(0, most - step), 2 * step
    return too_many - 1 - bisect_left(range(too_many - 1, most, -1), True, key=holds)
