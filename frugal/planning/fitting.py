"""What fits where: micro-batches on devices, batches made of them, and what a node's host and disk hold beside."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul

from frugal.planning import disk, host
from frugal.planning.batch import balanced
from frugal.planning.cluster import Cluster, Device
from frugal.planning.memory import MemoryBreakdown
from frugal.planning.plan import Batch
from frugal.planning.request import Request
from frugal.planning.source import Facts, Profile
from frugal.planning.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Refuted:
    """A micro-batch that a rehearsal found too large: what it takes, and how many times the profile's prediction."""

    micro_batch: int
    memory: MemoryBreakdown
    factor: float


class Fitting:
    """One request on one cluster. Ranks on equal devices are one kind, so a thousand are as soon done as two."""

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self.request = request
        self.cluster = cluster
        self.devices = cluster.kinds
        self.world_size = cluster.world_size
        self._kinds = cluster.kind_of_rank
        self._speeds = tuple(device.matrix_flops for device in self.devices)
        self._counts = tuple(map(self._kinds.count, range(len(self.devices))))
        self._nodes = Counter(cluster.nodes)

    @cached_property
    def cap(self) -> int:
        """The largest micro-batch worth trying, samples."""
        samples, cap = self.request.batch_samples, self.request.micro_batch_cap
        whole = samples if len(self.devices) > 1 else -(-samples // self.world_size)
        return whole if cap is None else min(cap, whole)

    @property
    def smallest_micro_batch(self) -> int:
        """The least a rank must hold at once: one sample, or what a pin demands."""
        samples, pinned = self.request.batch_samples, self.request.micro_batch
        whole = -(-samples // self.world_size)
        if self.request.accumulation_steps is not None:
            step_samples = -(-samples // self.request.accumulation_steps)
            return -(-step_samples // self.world_size)
        return min(pinned, whole) if pinned is not None else 1

    def largest_micro_batch(self, profile: Profile, device: Device, refuted: Refuted | None) -> int:
        """What fits `device` by the profile, corrected by what rehearsals have shown; 0 if nothing does."""
        if refuted is None:
            return profile.largest_micro_batch(device, self.cap)
        micro = profile.largest_micro_batch(device, refuted.micro_batch - 1) if refuted.micro_batch > 1 else 0
        room = device.usable_bytes + device.context_bytes
        while micro and profile.memory(micro, device).total_bytes * refuted.factor > room:
            micro -= 1
        return micro

    def batches(self, fit: dict[Device, int]) -> list[Batch]:
        """Batches under the largest micro-batches that fit: those that may be fastest, and one of equal cells.

        On equal ranks that is the fewest micro-steps, and the largest micro-batch that cuts the batch evenly. On ranks
        that differ in memory or speed, micro-steps in which all are done at the same time: either as few as memory
        allows, or more of them, each no longer than one kind of rank takes with all it can hold.
        """
        of_kind = [fit[device] for device in self.devices]
        caps = self._each(of_kind)
        num_steps, samples = self.request.accumulation_steps, self.request.batch_samples
        if num_steps is not None and num_steps * sum(caps) < samples:
            return []
        if self.request.micro_batch is not None and min(caps) < self.smallest_micro_batch:
            return []
        choices = [caps]
        is_free = num_steps is None and self.request.micro_batch is None
        if len(set(of_kind)) == 1 and is_free:
            per_rank, rest = divmod(samples, len(caps))
            even = max((m for m in range(1, caps[0] + 1) if per_rank % m == 0), default=0) if rest == 0 else 0
            choices += [(even,) * len(caps)] if 0 < even < caps[0] else []
        if len(self.devices) > 1 and self.request.micro_batch is None:
            limits = {cap / speed for cap, speed in zip(of_kind, self._speeds, strict=True)}
            choices = [
                self._balanced(of_kind, seconds, num_steps) for seconds in (limits if is_free else {max(limits)})
            ]
        made = (Batch.of(samples, each, self.request.global_tokens, accumulation_steps=num_steps) for each in choices)
        return list({batch.micro_batch: batch for batch in (batch.tightened() for batch in made)}.values())

    def _balanced(self, of_kind: Sequence[int], most_seconds: float, num_steps: int | None) -> tuple[int, ...]:
        """The caps with which all ranks are done together, in micro-steps of `most_seconds` (of one FLOP a sample)."""
        short = tuple(
            max(1, min(cap, int(most_seconds * speed * (1 + 1e-12))))
            for cap, speed in zip(of_kind, self._speeds, strict=True)
        )
        num_steps = num_steps or -(-self.request.batch_samples // sum(map(mul, short, self._counts)))
        samples = -(-self.request.batch_samples // num_steps)
        return self._each(balanced(samples, short, self._speeds, self._counts))

    def _each(self, of_kind: Sequence[int]) -> tuple[int, ...]:
        """One number a kind of device as one a rank."""
        return tuple(map(of_kind.__getitem__, self._kinds))

    def unlimited(self) -> Batch:
        """The batch if memory were without end: nothing that fits is done sooner."""
        num_steps = self.request.accumulation_steps
        caps = (self.cap,) * self.world_size
        if len(self.devices) > 1:
            caps = self._balanced((self.cap,) * len(self.devices), float(self.cap), num_steps)
        return Batch.of(self.request.batch_samples, caps, self.request.global_tokens, accumulation_steps=num_steps)

    def loads(self, batch: Batch) -> list[tuple[Device, int]]:
        """Each kind of device with the micro-batches its ranks take."""
        return [(self.devices[kind], micro) for kind, micro in sorted(set(zip(self._kinds, batch.micro_batch)))]  # noqa: B905 - one of each a rank

    def host_shortfall_bytes(self, memory: MemoryBreakdown) -> int:
        """What the host memory of some node lacks; 0: nothing, as far as it is known."""
        return max(
            (
                host.needed_bytes(memory, node, self.cluster) - node.host_memory_bytes
                for node in self._nodes
                if node.host_memory_bytes is not None
            ),
            default=0,
        )

    def disk_shortfall_bytes(self, strategy: Strategy, facts: Facts) -> int:
        """What the disk of some node lacks for what lives on NVMe; 0: nothing, as far as it is known."""
        return max(
            (
                disk.nvme_bytes(self.request, strategy, facts, node, self.cluster) - node.host_disk_bytes
                for node in self._nodes
                if node.host_disk_bytes is not None
            ),
            default=0,
        )
