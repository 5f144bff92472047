"""What fits where: micro-batches on devices, batches made of them, and what a node's host and disk hold beside.

One strategy: the best batch it allows, what that takes and how long, or by how much it does not fit.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from frugal.config.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning import cost, length_bucketing
from frugal.planning.batch import BatchPlan, balanced
from frugal.planning.memory import breakdown
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import StepTime
from frugal.planning.search.candidate import LIKE, TIE, Facts, Option, Profile, Source
from frugal.planning.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Refuted:
    """A micro-batch that a dry run found too large: what it takes, and how many times the profile's prediction."""

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
        """What fits `device` by the profile, corrected by what dry runs have shown; 0 if nothing does."""
        if refuted is None:
            return profile.largest_micro_batch(device, self.cap)
        micro = profile.largest_micro_batch(device, refuted.micro_batch - 1) if refuted.micro_batch > 1 else 0
        room = device.usable_bytes + device.context_bytes
        while micro and profile.memory(micro, device).total_bytes * refuted.factor > room:
            micro -= 1
        return micro

    def batches(self, fit: dict[Device, int]) -> list[BatchPlan]:
        """Batches under the largest micro-batches that fit: those that may be fastest, and one of equal micro-batches.

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
        made = (
            BatchPlan.of(samples, each, self.request.global_tokens, accumulation_steps=num_steps) for each in choices
        )
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

    def unlimited(self) -> BatchPlan:
        """The batch if memory were without end: nothing that fits is done sooner."""
        num_steps = self.request.accumulation_steps
        caps = (self.cap,) * self.world_size
        if len(self.devices) > 1:
            caps = self._balanced((self.cap,) * len(self.devices), float(self.cap), num_steps)
        return BatchPlan.of(self.request.batch_samples, caps, self.request.global_tokens, accumulation_steps=num_steps)

    def loads(self, batch: BatchPlan) -> list[tuple[Device, int]]:
        """Each kind of device with the micro-batches its ranks take."""
        return [(self.devices[kind], micro) for kind, micro in sorted(set(zip(self._kinds, batch.micro_batch)))]  # noqa: B905 - one of each a rank

    def host_shortfall_bytes(self, memory: MemoryBreakdown) -> int:
        """What the host memory of some node lacks; 0: nothing, as far as it is known."""
        return max(
            (
                breakdown.needed_host_bytes(memory, node, self.cluster) - node.host_memory_bytes
                for node in self._nodes
                if node.host_memory_bytes is not None
            ),
            default=0,
        )

    def disk_shortfall_bytes(self, strategy: Strategy, facts: Facts) -> int:
        """What the disk of some node lacks for what lives on NVMe; 0: nothing, as far as it is known."""
        return max(
            (
                breakdown.nvme_bytes(self.request, strategy, facts, node, self.cluster) - node.host_disk_bytes
                for node in self._nodes
                if node.host_disk_bytes is not None
            ),
            default=0,
        )


class StrategyEvaluation:
    """Strategies for one request on one cluster.

    Attributes:
        fitting: what fits where.
        facts: what the model is.
        refuted: what dry runs found too large; whoever dry-runs keeps it up.
        work: profiles by mode of activation checkpointing, once one is known.
    """

    def __init__(self, request: Request, cluster: Cluster, source: Source) -> None:
        self.request = request
        self.cluster = cluster
        self.source = source
        self.fitting = Fitting(request, cluster)
        self.facts = source.facts()
        self.refuted: dict[Strategy, Refuted] = {}
        self.work: dict[str, Profile] = {}
        self._drafts: dict[Strategy, tuple[Refuted | None, Option]] = {}

    def draft(self, strategy: Strategy) -> Option | None:
        """`option` as far as it is known without the allocator: bounds from below. None where there is no draft."""
        if self.source.draft(strategy, True) is None:
            return None
        refuted = self.refuted.get(strategy)
        kept = self._drafts.get(strategy)
        if kept is None or kept[0] is not refuted:
            kept = self._drafts[strategy] = (refuted, replace(self.option(strategy, drafted=True), is_draft=True))
        return kept[1]

    def option(self, strategy: Strategy, *, drafted: bool = False) -> Option:
        """The best batch a strategy allows, or by how much it does not fit. `drafted`: the allocator is left out."""
        if not drafted and self._may_be_done_at_once(strategy):
            at_once = self._option(strategy, accumulates=False)
            if at_once.batch and at_once.batch.accumulation_steps == 1:
                return at_once
        option = self._option(strategy, accumulates=True, drafted=drafted)
        if self.request.lengths is not None:  # a step of one micro-step may be done in several, to pad less
            return option
        whole = -(-self.request.batch_samples // self.cluster.world_size)
        if option.fits and option.batch and option.batch.accumulation_steps == 1:
            return self._option(strategy, accumulates=False, drafted=drafted)
        if (
            self.fitting.cap < whole
            or self.request.accumulation_steps not in (None, 1)
            or option.micro_batch * 2 < whole
        ):
            return option
        at_once = self._option(strategy, accumulates=False, drafted=drafted)
        return at_once if at_once.batch and at_once.batch.accumulation_steps == 1 else option

    def _may_be_done_at_once(self, strategy: Strategy) -> bool:
        """Whether a draft does it in one micro-step: then that is tried first, and seldom anything else."""
        draft = self.draft(strategy) if self.request.lengths is None else None
        return draft is not None and draft.batch is not None and draft.batch.accumulation_steps == 1

    def _option(self, strategy: Strategy, *, accumulates: bool, drafted: bool = False) -> Option:
        profile = (self.source.draft if drafted else self.source.profile)(strategy, accumulates)
        assert profile is not None, "drafted for one number of micro-steps, but not for another"
        self.work.setdefault(strategy.activation_checkpointing, profile)
        devices, refuted = self.fitting.devices, self.refuted.get(strategy)
        fit = {device: self.fitting.largest_micro_batch(profile, device, refuted) for device in devices}
        batches = self.fitting.batches(fit) if min(fit.values()) >= 1 else []
        if not batches:
            wanted = self.fitting.smallest_micro_batch
            short = min((profile.memory(wanted, device) for device in devices), key=lambda m: m.headroom_bytes)
            if refuted is not None and short.fits:
                wanted, short = refuted.micro_batch, refuted.memory
            return Option(strategy=strategy, micro_batch=wanted, batch=None, memory=short, time=None)
        if self.request.lengths is not None:
            batches = [self._for_lengths(profile, strategy, batch) for batch in batches]
        timed = [(self.time(profile, strategy, batch), batch) for batch in batches]
        fastest = min(time.total_seconds for time, _ in timed)
        time, batch = min(
            (pair for pair in timed if pair[0].total_seconds <= fastest * TIE), key=lambda pair: not pair[1].is_uniform
        )
        # What the allocator adds decides between two kinds of devices only where they are alike.
        drafts = [(profile.draft.memory(micro, device), micro, device) for device, micro in self.fitting.loads(batch)]
        memory, micro, device = min(drafts, key=lambda draft: draft[0].headroom_bytes)
        memory = memory if drafted else profile.memory(micro, device)
        option = Option(
            strategy=strategy,
            micro_batch=max(batch.micro_batch),
            batch=batch,
            memory=memory,
            time=time,
            largest_micro_batch=max(fit.values()),
            shortfall_of_next_bytes=None if drafted else self._shortfall_of_next(profile, fit, memory),
        )
        if (short_of := self.fitting.host_shortfall_bytes(memory)) > 0:
            return replace(option, batch=None, host_shortfall_bytes=short_of)
        if (short_of := self.fitting.disk_shortfall_bytes(strategy, self.facts)) > 0:
            return replace(option, batch=None, disk_shortfall_bytes=short_of)
        return option

    def time(self, profile: Profile, strategy: Strategy, batch: BatchPlan) -> StepTime:
        """Predicted seconds of a step: of full-length samples, or of a typical global batch where that is known."""
        step_time = self._full_length(profile, strategy)
        if self.request.lengths is None:
            return step_time(batch)
        return length_bucketing.time_of(
            step_time, batch, length_bucketing.grouping(self.request.lengths, batch, self.request.seq_len)
        )

    def _for_lengths(self, profile: Profile, strategy: Strategy, batch: BatchPlan) -> BatchPlan:
        """`batch` with the best that could be proven for samples of the request's lengths."""
        return length_bucketing.best_proven(self.request, self.cluster, batch, self._full_length(profile, strategy))

    def _full_length(self, profile: Profile, strategy: Strategy) -> Callable[[BatchPlan], StepTime]:
        """Seconds of a step of full-length samples, by its batch."""
        return lambda batch: cost.step_time(profile, strategy, batch, self.cluster, self.request)

    def _shortfall_of_next(self, profile: Profile, fit: dict[Device, int], memory: MemoryBreakdown) -> int | None:
        """About what one sample more would lack on the device that takes most; None where a cap or the batch binds.

        `memory` is that of what fits; what the allocator wastes is taken to be the same.
        """
        device = max(fit, key=lambda device: fit[device])
        if fit[device] >= self.fitting.cap:
            return None
        about = memory.slack - profile.draft.memory(fit[device] + 1, device).headroom_bytes
        return about if about > 0 else max(0, -profile.memory(fit[device] + 1, device).headroom_bytes)

    def best_case(self, strategy: Strategy) -> Option:
        """What a strategy could reach if memory were unlimited; recomputation counts as free while it is unknown."""
        batch = self.fitting.unlimited()
        known = (self.work.get(mode) for mode in LIKE[strategy.activation_checkpointing])
        work = next((work for work in known if work is not None), next(iter(self.work.values())))
        if self.request.lengths is not None:
            batch = self._for_lengths(work, strategy, batch)
        time = self.time(work, strategy, batch)
        return Option(strategy=strategy, micro_batch=batch.largest_micro_batch, batch=None, memory=None, time=time)

    def dry_run_result(self, option: Option) -> MemoryBreakdown:
        """The memory of an option by dry-running it, on its fullest device."""
        assert option.batch is not None
        steps = max(option.batch.accumulation_steps, 1 if self.request.lengths is None else 2)
        found = (
            self.source.dry_run(option.strategy, micro, steps, device)
            for device, micro in self.fitting.loads(option.batch)
        )
        return min(found, key=lambda memory: memory.headroom_bytes)
