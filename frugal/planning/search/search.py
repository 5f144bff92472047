"""The fastest plan that fits, or the proof that none does. Arithmetic over profiles; the winner is dry-run.

For every strategy the request allows: the largest micro-batch that fits each device, how that cuts the global batch,
and the seconds a step would take. The fastest wins; within 2 % of it, the simplest. Where a profile can be drafted at
once, all strategies are ranked by drafts, which leave the allocator out, and only those that could still win are
evaluated in full. Between modes of activation checkpointing lie mixtures of them (`mixtures`). Then the winner is
dry-run as a whole, with one of four outcomes (`Outcome`); where it is not confirmed, the choice is made again with what
the dry run has shown.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from frugal.config.hardware.cluster import Cluster
from frugal.config.pins import check_pins
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import ModelSummary
from frugal.planning.search import memory_for_time
from frugal.planning.search.candidate import (
    TIE,
    TRUST,
    Candidate,
    Infeasible,
    Outcome,
    SearchResult,
    Source,
    evaluation_rounds,
    fastest_seconds,
    small_buckets_could_help,
)
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.search.mixtures import Mixtures, base_of, check_pinned
from frugal.planning.strategy import Offload, Strategy, allowed_strategies, offload_levels

Evaluate = Callable[[Sequence[Strategy], list[Candidate]], list[Candidate]]
"""Of strategies of a level, of which other candidates were evaluated before."""


ONE_MODE = "all layers have one mode of activation checkpointing, because those of this model cannot be mixed"
"""How the note of a plan begins for which a mixture might have been faster."""


class Search:
    """One request on one cluster. Profiles are taken from `source` only when they are needed.

    Raises:
        RequestError: the request's pins contradict each other.
    """

    def __init__(self, request: Request, cluster: Cluster, source: Source) -> None:
        check_pins(request, cluster.world_size)
        memory_for_time.check_secondary_partition(request, cluster)
        if (request.sequence_parallel or 1) > 1 and len(cluster.kinds) > 1:
            raise RequestError(
                f"--sequence-parallel {request.sequence_parallel} is impossible on devices that differ",
                because="ranks that share samples take equal parts of them, in step",
                hint="leave --sequence-parallel out",
            )
        self.request = request
        self.cluster = cluster
        self.source = source
        self.evaluation = StrategyEvaluation(request, cluster, source)
        self.mixtures = Mixtures(self.evaluation)
        self.levels = offload_levels(request, on_gpus=cluster.devices[0].kind == "cuda")
        self.facts = self.evaluation.facts
        self.can_tile = self.facts.can_tile
        self.can_tile_mlp = request.mlp != "plain"
        if request.layer_modes is not None:
            any_strategy = next((each for level in self.levels for each in self.strategies(level)), None)
            if any_strategy is not None:
                check_pinned(request.layer_modes, any_strategy, source)

    def run(self, on_draft: Callable[[SearchResult], None] = lambda _: None) -> SearchResult | Infeasible:
        """Choose, dry-run, and choose again until the two agree; the next level of offloading where nothing fits.

        `on_draft` is told of each choice before it is dry-run, with what arithmetic says of its memory.
        """
        of_levels_before: list[Candidate] = []
        warnings: list[str] = []
        for level in self.levels:
            candidates = self.candidates(level)
            while winner := self._winner(candidates):
                assert winner.memory is not None
                on_draft(self._result(winner, winner.memory, (*of_levels_before, *candidates), warnings))
                memory = self.evaluation.dry_run_result(winner)
                outcome = self._outcome(winner, memory)
                if outcome is not Outcome.CONFIRMED:
                    warnings.append(self._warning(outcome, winner, memory))
                if outcome.is_chosen:
                    assumed = [f"assumed, because it depends on data: {note}" for note in self.source.notes]
                    if self.mixtures.why_none and not winner.strategy.layer_modes:
                        assumed.append(f"{ONE_MODE}: {self.mixtures.why_none}")
                    return self._result(winner, memory, (*of_levels_before, *candidates), warnings + assumed)
                if outcome is Outcome.TOO_LARGE:
                    self.evaluation.refute(winner, memory)
                candidates = self.candidates(level)
            of_levels_before += candidates
        return Infeasible(candidates=tuple(of_levels_before), nearest_first=self._nearest_first(of_levels_before))

    def _result(
        self, chosen: Candidate, memory: MemoryBreakdown, candidates: tuple[Candidate, ...], warnings: Sequence[str]
    ) -> SearchResult:
        return SearchResult(
            chosen=chosen,
            memory=memory,
            model=self._model(chosen),
            candidates=candidates,
            warnings=tuple(warnings),
        )

    def _outcome(self, winner: Candidate, memory: MemoryBreakdown) -> Outcome:
        """`memory` is that of the winner's dry run. A wrong profile is replaced once; then it is a dry run's own."""
        assert winner.memory is not None
        if abs(winner.memory.live_bytes / memory.live_bytes - 1) > TRUST and self.source.distrust(winner.strategy):
            return Outcome.WRONG_PROFILE
        if not memory.fits:
            return Outcome.TOO_LARGE
        is_accurate = abs(winner.memory.total_bytes / memory.total_bytes - 1) <= TRUST
        return Outcome.CONFIRMED if is_accurate else Outcome.INACCURATE

    def _warning(self, outcome: Outcome, winner: Candidate, memory: MemoryBreakdown) -> str:
        """In live bytes where the profile was wrong, otherwise in all that the device must have."""
        assert winner.memory is not None
        ratio = (
            winner.memory.live_bytes / memory.live_bytes
            if outcome is Outcome.WRONG_PROFILE
            else winner.memory.total_bytes / memory.total_bytes
        )
        return (
            f"{winner.strategy}, micro-batch {winner.micro_batch}: the profile was {100 * (ratio - 1):+.1f} % off the "
            f"dry run; {outcome.value}"
        )

    def predicted(self) -> Candidate | None:
        """What `run` would dry-run, or what misses by least; None where only a dry run could tell.

        Strategies without a draft are left out.
        """
        evaluated: list[Candidate] = []
        for level in self.levels:
            for strategies in evaluation_rounds(self.strategies(level)):
                evaluated += self._by_drafts(strategies, evaluated)
            evaluated += self._with_tiled_mlp(level, evaluated, self._by_drafts)
            evaluated += self._confirmed(memory_for_time.drafts(self.evaluation, level, evaluated), evaluated)
            evaluated += self.mixtures.faster(evaluated)
            if winner := self._winner(evaluated):
                return winner
        return max(evaluated, key=lambda candidate: candidate.headroom_bytes or 0, default=None)

    def _by_drafts(self, strategies: Sequence[Strategy], before: list[Candidate]) -> list[Candidate]:
        pruned, others = self._pruned(strategies, before)
        self.source.prepare(others)
        return pruned + self._confirmed([draft for strategy in others for draft in self._draft(strategy)], before)

    def _winner(self, candidates: list[Candidate]) -> Candidate | None:
        """The simplest of those that are as fast as the fastest; None if none fits."""
        fitting = [candidate for candidate in candidates if candidate.fits and not candidate.is_draft]
        enough = fastest_seconds(fitting) * TIE
        fast = [candidate for candidate in fitting if candidate.seconds <= enough]
        return min(fast, key=lambda candidate: candidate.simplicity, default=None)

    def strategies(
        self, level: Offload, *, small_buckets: bool = False, tiled_mlp: bool = False
    ) -> tuple[Strategy, ...]:
        """The strategies of one level of offloading, simplest first."""
        return allowed_strategies(
            self.request,
            world_size=self.cluster.world_size,
            offload=level,
            trainable_parameters=self.facts.trainable_parameters,
            can_recompute=self.facts.can_recompute,
            can_tile=self.can_tile,
            largest_parameter=self.facts.largest_parameter,
            on_gpus=self.cluster.devices[0].kind == "cuda",
            small_buckets=small_buckets,
            tiled_mlp=tiled_mlp,
        )

    def candidates(self, level: Offload) -> list[Candidate]:
        """All strategies of a level, evaluated as far as they could win.

        Modes of activation checkpointing come in rounds, each for what those before leave to gain: a mode whose best
        case is no faster than what fits already is not even traced.
        """
        with _collector_paused():
            return self._candidates(level)

    def _candidates(self, level: Offload) -> list[Candidate]:
        evaluated: list[Candidate] = []
        for strategies in evaluation_rounds(self.strategies(level)):
            evaluated += self._evaluated(strategies, evaluated)
        smallest_bytes = min(device.usable_bytes for device in self.cluster.devices)
        if small_buckets_could_help(evaluated, self.request, smallest_bytes):
            evaluated += self._evaluated(self.strategies(level, small_buckets=True), evaluated)
        evaluated += self._with_tiled_mlp(level, evaluated, self._evaluated)
        evaluated += self._confirmed(memory_for_time.drafts(self.evaluation, level, evaluated), evaluated)
        evaluated += self.mixtures.faster(evaluated)
        refused = self.request.loss == "auto" and not self.can_tile
        return [candidate for candidate in evaluated if not (refused and candidate.strategy.loss == "tiled")]

    def _with_tiled_mlp(self, level: Offload, before: list[Candidate], evaluate: Evaluate) -> list[Candidate]:
        """Strategies with a tiled MLP, where nothing fits without; none where the model cannot take one."""
        can_try = self.request.mlp == "auto" and self.can_tile_mlp and level != "nvme"
        if not can_try or any(candidate.fits for candidate in before):
            return []
        known = [candidate.memory for candidate in before if candidate.memory is not None]
        if all(memory.headroom_bytes + memory.of_the_step <= 0 for memory in known):
            return []  # what lives without any activation is too much already
        try:
            return evaluate(self.strategies(level, tiled_mlp=True), before)
        except RequestError:
            self.can_tile_mlp = False
            return []

    def _evaluated(self, strategies: Sequence[Strategy], before: list[Candidate]) -> list[Candidate]:
        """Some strategies of a level, of which others were evaluated `before`."""
        pruned, others = self._pruned(strategies, before)
        return pruned + self._profiled(others, before)

    def _pruned(
        self, strategies: Sequence[Strategy], before: list[Candidate]
    ) -> tuple[list[Candidate], list[Strategy]]:
        """Those whose best case is no faster than what fits already, and the others."""
        fastest = fastest_seconds(candidate for candidate in before if not candidate.is_draft)
        bounds = [self.evaluation.best_case(strategy) for strategy in strategies] if self.evaluation.work else []
        pruned = [bound for bound in bounds if bound.seconds * TIE >= fastest]
        known = {bound.strategy for bound in pruned}
        return pruned, [strategy for strategy in strategies if strategy not in known]

    def _profiled(self, strategies: Sequence[Strategy], before: list[Candidate]) -> list[Candidate]:
        """Those among them that could win, drafted or profiled; what is slower even without a limit stays so."""
        if not strategies:
            return []
        self.source.prepare(strategies)
        drafts = {strategy: draft for strategy in strategies for draft in self._draft(strategy)}
        candidates = self._confirmed(list(drafts.values()), before)
        for strategy in strategies:
            if strategy not in drafts:
                candidates += self._without_draft(strategy, [*before, *candidates])
        return candidates

    def _without_draft(self, strategy: Strategy, before: list[Candidate]) -> list[Candidate]:
        """The candidate of a strategy that only dry runs can profile, or the bound that makes them needless."""
        bound = self.evaluation.best_case(strategy) if self.evaluation.work else None
        if bound and bound.seconds * TIE >= fastest_seconds(before):
            return [bound]
        if too_large := self._states_too_large(strategy, before):
            return [too_large]
        if strategy.loss == "plain" or self.request.loss == "tiled":
            return [self.evaluation.evaluate(strategy)]
        return self._tiled(strategy, self.evaluation.evaluate)

    def _draft(self, strategy: Strategy) -> list[Candidate]:
        """What a draft says of a strategy; nothing if there is none, or if the model cannot take the tiled loss."""
        if strategy.loss == "tiled" and self.request.loss == "auto":
            return self._tiled(strategy, self.evaluation.draft)
        draft = self.evaluation.draft(strategy)
        return [] if draft is None else [draft]

    def _confirmed(self, drafts: list[Candidate], before: list[Candidate]) -> list[Candidate]:
        """The drafts, those that could win replaced by a full evaluation: a draft's time is never too long.

        Those that are neither faster nor simpler than one that fits cannot.
        """
        candidates: list[Candidate] = []
        fitting = [candidate for candidate in before if candidate.fits and not candidate.is_draft]
        for draft in sorted(drafts, key=lambda draft: (draft.seconds, draft.strategy.num_mechanisms)):
            is_slower = draft.seconds > fastest_seconds(fitting) * TIE
            if not draft.fits or is_slower or any(candidate.dominates(draft) for candidate in fitting):
                candidates.append(draft)
                continue
            full = self.evaluation.evaluate(draft.strategy)
            candidates.append(full)
            if full.fits:
                fitting.append(full)
        return candidates

    def _tiled(self, strategy: Strategy, evaluate: Callable[[Strategy], Candidate | None]) -> list[Candidate]:
        """The candidate of a tiled loss nobody asked for; none if it shows that the model cannot take it."""
        if not self.can_tile:
            return []
        try:
            candidate = evaluate(strategy)
        except RequestError:
            self.can_tile = False
            return []
        return [] if candidate is None else [candidate]

    def _states_too_large(self, strategy: Strategy, before: list[Candidate]) -> Candidate | None:
        """`strategy`, if activation checkpointing cannot help it: at the peak without, the states alone are too much.

        States, buffers and context are live at that moment of the step whether activations are kept or not.
        """
        plain = base_of(strategy)
        without = next((candidate.memory for candidate in before if candidate.strategy == plain != strategy), None)
        if without is None:
            return None
        shortfall = -without.headroom_bytes - without.of_the_step
        if shortfall <= 0:
            return None
        micro = self.evaluation.fitting.smallest_micro_batch
        return Candidate(
            strategy=strategy, micro_batch=micro, batch=None, memory=None, time=None, least_shortfall_bytes=shortfall
        )

    def _nearest_first(self, candidates: list[Candidate]) -> tuple[Candidate, ...]:
        """Those that were evaluated in full, by shortfall; others are, too, while they could be the nearest."""

        def headroom(candidate: Candidate) -> int:
            return candidate.headroom_bytes or 0

        exact = [candidate for candidate in candidates if candidate.memory is not None and not candidate.is_draft]
        bounds = [
            candidate for candidate in candidates if candidate.is_draft or candidate.least_shortfall_bytes is not None
        ]
        for bound in sorted(bounds, key=headroom, reverse=True):
            if headroom(bound) > max(map(headroom, exact), default=-float("inf")):
                exact.append(self.evaluation.evaluate(bound.strategy))
        return tuple(sorted(exact, key=headroom, reverse=True))

    def _model(self, chosen: Candidate) -> ModelSummary:
        return ModelSummary(
            task=self.facts.task,
            parameters=self.facts.parameters,
            trainable_parameters=self.facts.trainable_parameters,
            largest_parameter=self.facts.largest_parameter,
            flops_per_sample=self.evaluation.work[chosen.strategy.activation_checkpointing].work.flops_per_sample,
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Python's collector of cycles would go through all traces again and again: an eighth of a search's time, which
    makes no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
