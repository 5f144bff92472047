"""One strategy: the best batch it allows, what that takes and how long, or by how much it does not fit."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning import cost, length_bucketing
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import ModelCosts
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.plan import StepTime
from frugal.planning.search.candidate import TIE, WORK_NO_GREATER, Candidate, Source
from frugal.planning.search.fitting import Fitting, Refuted
from frugal.planning.strategy import Strategy

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
        if not self._could_be_done_at_once(accumulating):
            return accumulating
        at_once = self._with_profile(strategy, accumulates=False, drafted=drafted)
        return at_once if at_once.takes_one_micro_step else accumulating

    def _could_be_done_at_once(self, accumulating: Candidate) -> bool:
        """Return whether a rank may take its share in one micro-step, and freeing the summed gradients might let it."""
        is_allowed = self.request.accumulation_steps in (None, 1)
        samples = self.fitting.samples_per_rank
        return is_allowed and self.fitting.cap >= samples and accumulating.micro_batch * AT_ONCE_GAIN >= samples

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
        return length_bucketing.best_proven(self.request, self.cluster, batch, self._step_time(costs, strategy))

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

    def dry_run_result(self, candidate: Candidate) -> MemoryBreakdown:
        """Return the memory of a candidate on its fullest device by dry-running it."""
        assert candidate.batch is not None
        steps = max(candidate.batch.accumulation_steps, 1 if self.request.lengths is None else 2)
        of_devices = (
            self.source.dry_run(candidate.strategy, micro, steps, device)
            for device, micro in self.fitting.loads(candidate.batch)
        )
        return min(of_devices, key=lambda memory: memory.headroom_bytes)
