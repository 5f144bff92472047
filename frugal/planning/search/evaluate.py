"""One strategy: the best batch it allows, what that takes and how long, or by how much it does not fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import mul

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning import cost, length_bucketing
from frugal.planning.batch import BatchPlan, balanced
from frugal.planning.cost import ModelCosts
from frugal.planning.memory.breakdown import MemoryBreakdown, needed_host_bytes, nvme_bytes
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.model_facts import ModelFacts
from frugal.planning.plan import StepTime
from frugal.planning.search.candidate import TIE, WORK_NO_GREATER, Candidate, OpenSource, Source
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
        self._nodes = tuple(dict.fromkeys(cluster.nodes))

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
                needed_host_bytes(memory, node, self.cluster) - node.host_memory_bytes
                for node in self._nodes
                if node.host_memory_bytes is not None
            ),
            default=0,
        )

    def disk_shortfall_bytes(self, strategy: Strategy, facts: ModelFacts) -> int:
        """Return the largest shortfall of a node's disk for what lives on NVMe, as far as it is known; 0: none."""
        return max(
            (
                nvme_bytes(self.request, strategy, facts, node, self.cluster) - node.host_disk_bytes
                for node in self._nodes
                if node.host_disk_bytes is not None
            ),
            default=0,
        )


AT_ONCE_GAIN = 2
"""How many times the micro-batch may grow at most where no gradients are summed over micro-steps, and their buffer is
free for activations. A guess: beyond it, profiling the single micro-step is not worth the time."""


class StrategyEvaluation:
    """The evaluation of strategies for one request on one cluster.

    Attributes:
        fitting: what fits where.
        facts: what the model is.
        refuted: what dry runs found too large; see `refute`.
        work: profiles by mode of activation checkpointing, once one is known.
    """

    def __init__(self, request: Request, cluster: Cluster, source: Source) -> None:
        self.request = request
        self.cluster = cluster
        self.source = source
        self.fitting = Fitting(request, cluster)
        self.facts = source.facts()
        self.refuted: dict[Strategy, Refuted] = {}
        self.work: dict[str, MemoryProfile] = {}
        self._drafts: dict[Strategy, tuple[Refuted | None, Candidate]] = {}

    def draft(self, strategy: Strategy) -> Candidate | None:
        """Evaluate without the allocator: lower bounds of memory and time. None where there is no draft."""
        if self.source.draft(strategy, True) is None:
            return None
        refuted = self.refuted.get(strategy)
        kept = self._drafts.get(strategy)
        if kept is None or kept[0] is not refuted:
            kept = self._drafts[strategy] = (refuted, replace(self._best(strategy, drafted=True), is_draft=True))
        return kept[1]

    def evaluate(self, strategy: Strategy) -> Candidate:
        """Return the best batch a strategy allows, or by how much it does not fit, with the allocator replayed.

        A draft that takes one micro-step is confirmed by the profile of that alone, and seldom needs the other.
        """
        draft = self.draft(strategy) if self.request.lengths is None else None
        if draft is not None and draft.takes_one_micro_step:
            at_once = self._with_profile(strategy, accumulates=False)
            if at_once.takes_one_micro_step:
                return at_once
        return self._best(strategy)

    def refute(self, candidate: Candidate, memory: MemoryBreakdown) -> None:
        """Remember that a dry run found a candidate too large: it takes `memory`."""
        assert candidate.memory is not None
        self.refuted[candidate.strategy] = Refuted(
            micro_batch=candidate.micro_batch,
            memory=memory,
            factor=memory.total_bytes / candidate.memory.total_bytes,
        )

    def _best(self, strategy: Strategy, *, drafted: bool = False) -> Candidate:
        """Return the better of accumulating gradients over micro-steps and of a single micro-step, which keeps none."""
        accumulating = self._with_profile(strategy, accumulates=True, drafted=drafted)
        if self.request.lengths is not None:  # a step of one micro-step may be done in several, to pad less
            return accumulating
        if accumulating.takes_one_micro_step:
            return self._with_profile(strategy, accumulates=False, drafted=drafted)
        samples, cap = self.fitting.samples_per_rank, self.fitting.cap
        may_be_at_once = self.request.accumulation_steps in (None, 1) and cap >= samples
        if not may_be_at_once or accumulating.micro_batch * AT_ONCE_GAIN < samples:
            return accumulating
        at_once = self._with_profile(strategy, accumulates=False, drafted=drafted)
        return at_once if at_once.takes_one_micro_step else accumulating

    def _with_profile(self, strategy: Strategy, *, accumulates: bool, drafted: bool = False) -> Candidate:
        """Return the best batch by the profile of a step that `accumulates` gradients, or of one that does not."""
        profile = (self.source.draft if drafted else self.source.profile)(strategy, accumulates)
        assert profile is not None, "drafted for one number of micro-steps, but not for another"
        self.work.setdefault(strategy.activation_checkpointing, profile)
        refuted = self.refuted.get(strategy)
        fit = {device: self.fitting.largest_micro_batch(profile, device, refuted) for device in self.fitting.devices}
        batches = self.fitting.batches(fit) if min(fit.values()) >= 1 else []
        if not batches:
            return self._too_large(strategy, profile)
        time, batch = self.fastest(profile, strategy, batches)
        # What the allocator adds decides between two kinds of devices only where they are alike.
        loads = [(profile.draft.memory(micro, device), micro, device) for device, micro in self.fitting.loads(batch)]
        memory, micro, device = min(loads, key=lambda load: load[0].headroom_bytes)
        memory = memory if drafted else profile.memory(micro, device)
        candidate = Candidate(
            strategy=strategy,
            micro_batch=max(batch.micro_batch),
            batch=batch,
            memory=memory,
            time=time,
            largest_micro_batch=max(fit.values()),
            shortfall_of_next_bytes=None if drafted else self._shortfall_of_next(profile, fit, memory),
        )
        if (shortfall := self.fitting.host_shortfall_bytes(memory)) > 0:
            return replace(candidate, batch=None, host_shortfall_bytes=shortfall)
        if (shortfall := self.fitting.disk_shortfall_bytes(strategy, self.facts)) > 0:
            return replace(candidate, batch=None, disk_shortfall_bytes=shortfall)
        return candidate

    def _too_large(self, strategy: Strategy, profile: MemoryProfile) -> Candidate:
        """Return the candidate of the smallest micro-batch allowed, on the device with the largest shortfall."""
        micro, refuted = self.fitting.smallest_micro_batch, self.refuted.get(strategy)
        memory = min(
            (profile.memory(micro, device) for device in self.fitting.devices),
            key=lambda memory: memory.headroom_bytes,
        )
        if refuted is not None and memory.fits:
            micro, memory = refuted.micro_batch, refuted.memory
        return Candidate(strategy=strategy, micro_batch=micro, batch=None, memory=memory, time=None)

    def fastest(
        self, profile: MemoryProfile, strategy: Strategy, batches: Sequence[BatchPlan]
    ) -> tuple[StepTime, BatchPlan]:
        """Return the fastest batch with its time; one of equal micro-batches where it is as fast."""
        batches = [self._for_lengths(profile.costs, strategy, batch) for batch in batches]
        timed = [(self.time(profile.costs, strategy, batch), batch) for batch in batches]
        enough = min(time.total_seconds for time, _ in timed) * TIE
        fast = [(time, batch) for time, batch in timed if time.total_seconds <= enough]
        return min(fast, key=lambda pair: not pair[1].is_uniform)

    def time(self, costs: ModelCosts, strategy: Strategy, batch: BatchPlan) -> StepTime:
        """Return the predicted seconds of a step: of full-length samples, or of a typical global batch if known."""
        step_time = self._step_time(costs, strategy)
        if self.request.lengths is None:
            return step_time(batch)
        grouping = length_bucketing.grouping(self.request.lengths, batch, self.request.seq_len)
        return length_bucketing.time_of(step_time, batch, grouping)

    def _for_lengths(self, costs: ModelCosts, strategy: Strategy, batch: BatchPlan) -> BatchPlan:
        """Return `batch` with the best that could be proven for samples of the request's lengths."""
        if self.request.lengths is None:
            return batch
        shortest = next(length_bucketing.shortest_choices(self.request, batch), None)
        step_time = self._step_time(costs, strategy)
        overhead = length_bucketing.overhead_tokens(step_time, batch, self.request, self.cluster)
        return replace(batch, shortest=shortest, overhead_tokens=overhead)

    def _step_time(self, costs: ModelCosts, strategy: Strategy) -> Callable[[BatchPlan], StepTime]:
        return lambda batch: cost.step_time(costs, strategy, batch, self.cluster, self.request)

    def _shortfall_of_next(self, profile: MemoryProfile, fit: dict[Device, int], memory: MemoryBreakdown) -> int | None:
        """Estimate what one sample more would lack on the device that takes most; None where a cap or the batch binds.

        `memory` is that of what fits; what the allocator wastes is taken to be the same.
        """
        device = max(fit, key=lambda device: fit[device])
        if fit[device] >= self.fitting.cap:
            return None
        about = memory.slack - profile.draft.memory(fit[device] + 1, device).headroom_bytes
        return about if about > 0 else max(0, -profile.memory(fit[device] + 1, device).headroom_bytes)

    def best_case(self, strategy: Strategy) -> Candidate:
        """Return what a strategy could reach with unlimited memory; recomputation is free while its cost is unknown."""
        known = [self.work[mode] for mode in WORK_NO_GREATER[strategy.activation_checkpointing] if mode in self.work]
        costs = (known or list(self.work.values()))[0].costs
        batch = self._for_lengths(costs, strategy, self.fitting.unlimited())
        time = self.time(costs, strategy, batch)
        return Candidate(strategy=strategy, micro_batch=batch.largest_micro_batch, batch=None, memory=None, time=time)

    def dry_run(self, strategy: Strategy, batch: BatchPlan) -> MemoryBreakdown:
        """Return the memory of a batch on its fullest device by dry-running it."""
        steps = max(batch.accumulation_steps, 1 if self.request.lengths is None else 2)
        loads = self.fitting.loads(batch)
        of_devices = (self.source.dry_run(strategy, micro, steps, device) for device, micro in loads)
        return min(of_devices, key=lambda memory: memory.headroom_bytes)

    def dry_run_of_shortest(self, strategy: Strategy, batch: BatchPlan, open_source: OpenSource) -> MemoryBreakdown:
        """Return the memory of micro-batches of as many of the shortest samples as fit into the budget, likewise.

        Raises:
            RequestError: the model cannot read samples that short.
        """
        assert batch.shortest is not None
        steps = max(2, batch.accumulation_steps)
        with open_source(replace(self.request, seq_len=batch.shortest, lengths=None), self.cluster) as source:
            of_devices = [
                source.dry_run(
                    strategy, length_bucketing.most_samples(micro, self.request.seq_len, batch.shortest), steps, device
                )
                for device, micro in self.fitting.loads(batch)
            ]
        return min(of_devices, key=lambda memory: memory.headroom_bytes)
