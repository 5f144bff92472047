"""Limits: micro-batches that fit on devices, batches made of them, and a node's host memory and disk."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning.batch import BatchPlan, balanced
from frugal.planning.memory import breakdown
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.model_facts import ModelFacts
from frugal.planning.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Refuted:
    """A micro-batch that a dry run found too large: its memory, and the ratio of this to the profile's prediction."""

    micro_batch: int
    memory: MemoryBreakdown
    factor: float


class Fitting:
    """One request on one cluster. Ranks on equal devices are one kind, so a thousand are as soon done as two.

    Ranks that share samples (`sequence_parallel`) are as one here; their devices are equal.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self.request = request
        self.cluster = cluster
        self.devices = cluster.kinds
        self.sequence_parallel = request.sequence_parallel or 1
        self.num_takers = cluster.world_size // self.sequence_parallel  # of samples: ranks, or groups that share theirs
        self._kinds = cluster.kind_of_rank[:: self.sequence_parallel]
        self._speeds = tuple(device.matrix_flops for device in self.devices)
        self._counts = tuple(map(self._kinds.count, range(len(self.devices))))
        self._nodes = Counter(cluster.nodes)

    @property
    def samples_per_rank(self) -> int:
        """A rank's share of the global batch, rounded up."""
        return -(-self.request.batch_samples // self.num_takers)

    @cached_property
    def cap(self) -> int:
        """The largest micro-batch worth trying, samples."""
        cap = self.request.micro_batch_cap
        most = self.request.batch_samples if len(self.devices) > 1 else self.samples_per_rank
        return most if cap is None else min(cap, most)

    @property
    def smallest_micro_batch(self) -> int:
        """The samples a rank must hold at once at least: one, or what a pin demands."""
        if self.request.accumulation_steps is not None:
            step_samples = -(-self.request.batch_samples // self.request.accumulation_steps)
            return -(-step_samples // self.num_takers)
        return 1 if self.request.micro_batch is None else min(self.request.micro_batch, self.samples_per_rank)

    def largest_micro_batch(self, profile: MemoryProfile, device: Device, refuted: Refuted | None) -> int:
        """Return the largest micro-batch that fits `device` by the profile and by what dry runs have shown; 0: none."""
        if refuted is None:
            return profile.largest_micro_batch(device, self.cap)
        micro = profile.largest_micro_batch(device, refuted.micro_batch - 1) if refuted.micro_batch > 1 else 0
        limit_bytes = device.usable_bytes + device.context_bytes
        while micro and profile.memory(micro, device).total_bytes * refuted.factor > limit_bytes:
            micro -= 1
        return micro

    def batches(self, fit: dict[Device, int]) -> list[BatchPlan]:
        """Return batches under the largest micro-batches that fit: those possibly fastest, and an even one.

        On equal ranks that is the fewest micro-steps, and the largest micro-batch that cuts the batch evenly. On ranks
        that differ in memory or speed, micro-steps in which all are done at the same time: either as few as memory
        allows, or more of them, each no longer than one kind of rank takes with all it can hold.
        """
        of_kind = [fit[device] for device in self.devices]
        if self.request.even:
            return self._even_batches(min(of_kind))
        caps = self._per_rank(of_kind)
        num_steps, samples = self.request.accumulation_steps, self.request.batch_samples
        if num_steps is not None and num_steps * sum(caps) < samples:
            return []
        if self.request.micro_batch is not None and min(caps) < self.smallest_micro_batch:
            return []
        batches = (
            self._cut(caps, num_steps, self.request.global_tokens).tightened() for caps in self._caps_to_try(of_kind)
        )
        return list({batch.micro_batch: batch for batch in batches}.values())

    def _even_batches(self, most: int) -> list[BatchPlan]:
        """Return the batch of the largest equal micro-batches up to `most` samples, which `check_pins` made sure of."""
        samples, num_steps = self.request.batch_samples, self.request.accumulation_steps
        per_rank = samples // self.num_takers
        if num_steps is not None:
            micro = per_rank // num_steps
        elif self.request.micro_batch is not None:
            micro = min(self.request.micro_batch, per_rank)
        else:
            micro = max(size for size in range(1, min(most, per_rank) + 1) if per_rank % size == 0)
        return [self._cut((micro,) * self.num_takers)] if micro <= most else []

    def _caps_to_try(self, of_kind: Sequence[int]) -> list[tuple[int, ...]]:
        """Return micro-batch caps of all ranks from the most that each kind of device holds; see `batches`."""
        caps, num_steps = self._per_rank(of_kind), self.request.accumulation_steps
        if self.request.micro_batch is not None:
            return [caps]
        if len(self.devices) > 1:
            limits = {cap / speed for cap, speed in zip(of_kind, self._speeds, strict=True)}
            return [
                self._balanced(of_kind, seconds, num_steps)
                for seconds in (limits if num_steps is None else {max(limits)})
            ]
        per_rank, rest = divmod(self.request.batch_samples, len(caps))
        if num_steps is not None or rest:
            return [caps]
        even = max(micro for micro in range(1, caps[0] + 1) if per_rank % micro == 0)
        return [caps, (even,) * len(caps)] if even < caps[0] else [caps]

    def _balanced(self, of_kind: Sequence[int], most_seconds: float, num_steps: int | None) -> tuple[int, ...]:
        """Return the caps with which ranks finish together in micro-steps of `most_seconds` (of one FLOP a sample)."""
        short = tuple(
            max(1, min(cap, int(most_seconds * speed * (1 + 1e-12))))
            for cap, speed in zip(of_kind, self._speeds, strict=True)
        )
        num_steps = num_steps or -(-self.request.batch_samples // sum(map(mul, short, self._counts)))
        return self._per_rank(balanced(-(-self.request.batch_samples // num_steps), short, self._speeds, self._counts))

    def _per_rank(self, of_kind: Sequence[int]) -> tuple[int, ...]:
        """Expand one number a kind of device to one a rank."""
        return tuple(map(of_kind.__getitem__, self._kinds))

    def unlimited(self) -> BatchPlan:
        """Return the batch with unlimited memory: no other takes less time."""
        num_steps = self.request.accumulation_steps
        caps = (self.cap,) * self.num_takers
        if len(self.devices) > 1:
            caps = self._balanced((self.cap,) * len(self.devices), float(self.cap), num_steps)
        return self._cut(caps, num_steps, self.request.global_tokens)

    def _cut(self, caps: Sequence[int], num_steps: int | None = None, global_tokens: int | None = None) -> BatchPlan:
        """Cut the global batch under these caps."""
        samples, shared_by = self.request.batch_samples, self.sequence_parallel
        return BatchPlan.of(samples, caps, global_tokens, accumulation_steps=num_steps, sequence_parallel=shared_by)

    def loads(self, batch: BatchPlan) -> list[tuple[Device, int]]:
        """Return each kind of device with the micro-batches of its ranks."""
        return [(self.devices[kind], micro) for kind, micro in sorted(set(zip(self._kinds, batch.micro_batch)))]  # noqa: B905 - one of each a rank

    def host_shortfall_bytes(self, memory: MemoryBreakdown) -> int:
        """Return the largest shortfall of a node's host memory, as far as it is known; 0: none."""
        return max(
            (
                breakdown.needed_host_bytes(memory, node, self.cluster) - node.host_memory_bytes
                for node in self._nodes
                if node.host_memory_bytes is not None
            ),
            default=0,
        )

    def disk_shortfall_bytes(self, strategy: Strategy, facts: ModelFacts) -> int:
        """Return the largest shortfall of a node's disk for what lives on NVMe, as far as it is known; 0: none."""
        return max(
            (
                breakdown.nvme_bytes(self.request, strategy, facts, node, self.cluster) - node.host_disk_bytes
                for node in self._nodes
                if node.host_disk_bytes is not None
            ),
            default=0,
        )
