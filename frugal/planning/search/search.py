"""The fastest plan that fits, or the proof that none does. Arithmetic over profiles; the winner is dry-run.

For every strategy the request allows: the largest micro-batch that fits each device, how that cuts the global batch,
and the seconds a step would take. The fastest wins; within 2 % of it, the simplest, and of equally simple ones within
1 % the smallest. Where a profile can be drafted at once, all strategies are ranked by drafts, which leave the
allocator out, and only those that could still win are evaluated in full. Between modes of activation checkpointing lie
mixtures of them (`mixtures`). Then the winner is dry-run as a whole; where that does not confirm it, the choice is made
again with what the dry run has shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from frugal.config.hardware.cluster import Cluster
from frugal.config.pins import check_pins
from frugal.config.request import Request
from frugal.errors import RequestError, refuse
from frugal.imports import collected_seldom
from frugal.planning.plan import ModelSummary
from frugal.planning.search.candidate import (
    SAME,
    TIE,
    TRUST,
    Candidate,
    Infeasible,
    SearchResult,
    Source,
    evaluation_rounds,
    fastest_seconds,
    small_buckets_could_help,
)
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.search.mixtures import Mixtures, base_of, check_pinned, shares_of_optimizer
from frugal.planning.strategy import Offload, Strategy, allowed_strategies, offload_levels

MOST_OF_IT = 0.7
"""A share: where weights and optimizer states make up as much of what is lacking without activations, their excess
says it, and no mode of activation checkpointing is profiled."""


class Search:
    """A search for one request on one cluster. Profiles are taken from `source` only when they are needed.

    Raises:
        RequestError: the request's pins contradict each other.
    """

    def __init__(self, request: Request, cluster: Cluster, source: Source) -> None:
        check_pins(request, cluster.world_size)
        refuse(
            (
                (request.sequence_parallel or 1) > 1 and len(cluster.kinds) > 1,
                f"--sequence-parallel {request.sequence_parallel} is impossible on devices that differ",
                "ranks that share samples take equal parts of them, in step",
                "leave --sequence-parallel out",
            )
        )
        self.request = request
        self.cluster = cluster
        self.source = source
        self.evaluation = StrategyEvaluation(request, cluster, source)
        self.mixtures = Mixtures(self.evaluation)
        self.levels = offload_levels(request, on_gpus=cluster.devices[0].kind == "cuda")
        self.facts = self.evaluation.facts
        self.can_tile_mlp = request.mlp != "plain"
        if request.layer_modes is not None:
            any_strategy = next((each for level in self.levels for each in self.strategies(level)), None)
            if any_strategy is not None:
                check_pinned(request.layer_modes, any_strategy, source)

    def run(self) -> Iterator[SearchResult | Infeasible]:
        """Yield each choice before it is dry-run, and last the one that a dry run has proven, or that nothing fits.

        Levels of offloading follow each other until something fits.
        """
        of_levels_before: list[Candidate] = []
        warnings: list[str] = []
        for level in self.levels:
            candidates = self.candidates(level)
            while winner := self._winner(candidates):
                draft = self._draft_of(winner, (*of_levels_before, *candidates), warnings)
                yield draft
                assert winner.batch is not None
                memory = self.evaluation.dry_run(winner.strategy, winner.batch)
                error = draft.memory.total_bytes / memory.total_bytes - 1
                outcome = "it still fits" if memory.fits else "it does not fit, and was not chosen"
                if not memory.fits or abs(error) > TRUST:
                    warnings.append(
                        f"{winner.strategy}, micro-batch {winner.micro_batch}: the profile was {100 * error:+.1f} % "
                        f"off the dry run; {outcome}"
                    )
                if memory.fits:
                    warnings += [f"assumed, because it depends on data: {note}" for note in self.source.notes]
                    yield replace(draft, memory=memory, warnings=tuple(warnings), is_proven=True)
                    return
                self.evaluation.refute(winner, memory)
                candidates = self.candidates(level)
            of_levels_before += candidates
        yield Infeasible(candidates=tuple(of_levels_before), nearest_first=self._nearest_first(of_levels_before))

    def _draft_of(self, winner: Candidate, candidates: tuple[Candidate, ...], warnings: list[str]) -> SearchResult:
        assert winner.memory is not None
        facts, profile = self.facts, self.evaluation.work[winner.strategy.activation_checkpointing]
        model = ModelSummary(
            task=facts.task,
            parameters=facts.parameters,
            trainable_parameters=facts.trainable_parameters,
            largest_parameter=facts.largest_parameter,
            flops_per_sample=profile.costs.work.flops_per_sample,
        )
        return SearchResult(
            chosen=winner,
            memory=winner.memory,
            model=model,
            candidates=candidates,
            warnings=tuple(warnings),
            is_proven=False,
            fused=facts.fused,
            kernels=profile.kernels,
        )

    def predicted(self) -> Candidate | None:
        """Return what `run` would dry-run, or the smallest shortfall; None where only a dry run could tell.

        Strategies without a draft are left out.
        """
        evaluated: list[Candidate] = []
        for level in self.levels:
            candidates = self.candidates(level, drafts_only=True)
            if winner := self._winner(candidates):
                return winner
            evaluated += candidates
        return max(evaluated, key=lambda candidate: candidate.headroom_bytes or 0, default=None)

    def _winner(self, candidates: list[Candidate]) -> Candidate | None:
        """Return the simplest of those that are as fast as the fastest, the smallest of several; None if none fits."""
        fitting = [candidate for candidate in candidates if candidate.fits and not candidate.is_draft]
        enough = fastest_seconds(fitting) * TIE
        fast = [candidate for candidate in fitting if candidate.seconds <= enough]
        first = min(fast, key=lambda candidate: candidate.simplicity, default=None)
        return first and min(
            (each for each in fast if each.simplicity <= (*first.simplicity[:2], first.seconds * SAME)),
            key=lambda candidate: candidate.needed_bytes,
        )

    def strategies(
        self, level: Offload, *, small_buckets: bool = False, tiled_mlp: bool = False
    ) -> tuple[Strategy, ...]:
        """Return the strategies of one level of offloading, simplest first."""
        return allowed_strategies(
            self.request,
            self.facts,
            world_size=self.cluster.world_size,
            offload=level,
            on_gpus=self.cluster.devices[0].kind == "cuda",
            small_buckets=small_buckets,
            tiled_mlp=tiled_mlp,
        )

    @collected_seldom()  # the collector took an eighth of a search's time, which makes no cycles
    def candidates(self, level: Offload, *, drafts_only: bool = False) -> list[Candidate]:
        """Return all strategies of a level, evaluated as far as they could win; `drafts_only`: those with a draft.

        Modes of activation checkpointing come in rounds, each for what those before leave to gain: a mode whose best
        case is no faster than what fits already is not even traced.
        """
        evaluated: list[Candidate] = []
        for strategies in evaluation_rounds(self.strategies(level)):
            evaluated += self._evaluated(strategies, evaluated, drafts_only)
        smallest_bytes = min(device.usable_bytes for device in self.cluster.devices)
        if small_buckets_could_help(evaluated, self.request, smallest_bytes):
            evaluated += self._evaluated(self.strategies(level, small_buckets=True), evaluated, drafts_only)
        if self._tiled_mlp_could_help(level, evaluated):
            try:
                evaluated += self._evaluated(self.strategies(level, tiled_mlp=True), evaluated, drafts_only)
            except RequestError:  # the model cannot take one
                self.can_tile_mlp = False
        evaluated += self._confirmed(shares_of_optimizer(self.evaluation, level, evaluated), evaluated)
        evaluated += self.mixtures.faster(evaluated)
        refused = self.request.loss == "auto" and not self.facts.can_tile
        return [candidate for candidate in evaluated if not (refused and candidate.strategy.loss == "tiled")]

    def _tiled_mlp_could_help(self, level: Offload, before: list[Candidate]) -> bool:
        """Return whether nothing fits, and more than what lives without any activation is lacking."""
        can_try = self.request.mlp == "auto" and self.can_tile_mlp and level != "nvme"
        return (
            can_try
            and not any(each.fits for each in before)
            and any(
                each.least_shortfall_bytes is None
                and (each.memory is None or each.memory.headroom_bytes + each.memory.of_the_step > 0)
                for each in before
            )
        )

    def _evaluated(self, strategies: Sequence[Strategy], before: list[Candidate], drafts_only: bool) -> list[Candidate]:
        """Evaluate strategies of a level, of which others were evaluated `before`, as far as no bound rejects them."""
        fastest = fastest_seconds(candidate for candidate in before if not candidate.is_draft)
        bounds = {each: self._bound(each, before, fastest, MOST_OF_IT) for each in strategies}
        rejected = [bound for bound in bounds.values() if bound is not None]
        others = [strategy for strategy, bound in bounds.items() if bound is None]
        if not others:
            return rejected
        self.source.prepare(others)
        drafts = {each: draft for each in others if (draft := self._attempt(each, self.evaluation.draft)) is not None}
        candidates = self._confirmed(list(drafts.values()), before)
        for strategy in others:
            if strategy not in drafts and not drafts_only:
                known = [*before, *candidates]
                candidate = self._bound(strategy, known, fastest_seconds(known))
                candidate = candidate or self._attempt(strategy, self.evaluation.evaluate)
                candidates += [] if candidate is None else [candidate]
        return rejected + candidates

    def _bound(
        self, strategy: Strategy, before: list[Candidate], fastest: float, share: float = 0.0
    ) -> Candidate | None:
        """Return what rejects a strategy before it is profiled: its best case is no faster than the `fastest` so far,
        or its weights, or with these its optimizer states, alone are too large; None: it may be the best.

        They live throughout a step, whether activations are kept or not; what is gathered or summed may not. States
        must make up at least a `share` of what is lacking without activations: else a profile says better what is.
        Below ZeRO-3 every device has all weights, however many there are.
        """
        if self.evaluation.work:
            at_best = self.evaluation.best_case(strategy)
            if at_best.seconds * TIE >= fastest:
                return at_best
        weights = self.facts.packed.weight_bytes(self.facts.parameters, self.request.element_bytes)
        shortfall = 0 if strategy.zero_stage == 3 else weights - min(each.usable_bytes for each in self.cluster.devices)
        without = next((each.memory for each in before if each.strategy == base_of(strategy) != strategy), None)
        if without is not None and shortfall <= 0:
            shortfall = without.parameters + without.optimizer - without.usable_bytes
            shortfall *= shortfall >= share * (-without.headroom_bytes - without.of_the_step)
        if shortfall <= 0:
            return None
        return Candidate(
            strategy=strategy,
            micro_batch=self.evaluation.fitting.smallest_micro_batch,
            batch=None,
            memory=None,
            time=None,
            least_shortfall_bytes=shortfall,
        )

    def _attempt(self, strategy: Strategy, evaluate: Callable[[Strategy], Candidate | None]) -> Candidate | None:
        """Evaluate a strategy; None where there is no draft, or where the model turns out not to take a tiled loss."""
        is_optional = strategy.loss == "tiled" and self.request.loss == "auto"
        if is_optional and not self.facts.can_tile:
            return None
        try:
            return evaluate(strategy)
        except RequestError:
            if not is_optional:
                raise
            self.facts = replace(self.facts, can_tile=False)
            return None

    def _confirmed(self, drafts: list[Candidate], before: list[Candidate]) -> list[Candidate]:
        """Evaluate in full those drafts that could win: a draft's time is never too long.

        A draft that is neither faster nor simpler than a candidate that fits cannot win.
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

    def _nearest_first(self, candidates: list[Candidate]) -> tuple[Candidate, ...]:
        """Sort by shortfall those evaluated in full; others are evaluated, too, while they could be the nearest."""

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
