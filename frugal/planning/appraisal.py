"""One strategy: the best batch it allows, what that takes and how long, or by how much it does not fit."""

from collections.abc import Callable
from dataclasses import replace

from frugal.planning import cost, ragged
from frugal.planning.choice import TIE, Option
from frugal.planning.cluster import Cluster, Device
from frugal.planning.fitting import Fitting, Refuted
from frugal.planning.memory import MemoryBreakdown
from frugal.planning.plan import Batch, StepTime
from frugal.planning.request import Request
from frugal.planning.source import Profile, Source
from frugal.planning.strategy import Strategy
from frugal.planning.turns import LIKE


class Appraisal:
    """Strategies for one request on one cluster.

    Attributes:
        fitting: what fits where.
        facts: what the model is.
        refuted: what rehearsals found too large; whoever rehearses keeps it up.
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

    def time(self, profile: Profile, strategy: Strategy, batch: Batch) -> StepTime:
        """Predicted seconds of a step: of full-length samples, or of a typical global batch where that is known."""
        step_time = self._full_length(profile, strategy)
        if self.request.lengths is None:
            return step_time(batch)
        return ragged.time_of(step_time, batch, ragged.grouping(self.request.lengths, batch, self.request.seq_len))

    def _for_lengths(self, profile: Profile, strategy: Strategy, batch: Batch) -> Batch:
        """`batch` with the best that could be proven for samples of the request's lengths."""
        return ragged.best(self.request, self.cluster, batch, self._full_length(profile, strategy))

    def _full_length(self, profile: Profile, strategy: Strategy) -> Callable[[Batch], StepTime]:
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
        return Option(strategy=strategy, micro_batch=batch.largest_cell, batch=None, memory=None, time=time)

    def rehearsed(self, option: Option) -> MemoryBreakdown:
        """The memory of an option by rehearsing it, on its fullest device."""
        assert option.batch is not None
        steps = max(option.batch.accumulation_steps, 1 if self.request.lengths is None else 2)
        found = (
            self.source.rehearse(option.strategy, micro, steps, device)
            for device, micro in self.fitting.loads(option.batch)
        )
        return min(found, key=lambda memory: memory.headroom_bytes)
