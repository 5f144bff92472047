"""The fastest plan that fits, or the proof that none does. Arithmetic over profiles; the winner is dry-run.

For every strategy the request allows: the largest micro-batch that fits each device, the micro-batches it cuts the
global batch into, and the seconds a step would take. The fastest wins; within 2 % of it, the simplest. Where a profile
can be drafted at once, all strategies are ranked by drafts, which leave the allocator out, and only those are looked at
closely that could still win. Then the winner is dry-run as a whole. Where that shows that it does not fit, its
micro-batch shrinks, and where a drafted profile was wrong, a dry-run one takes its place; the choice is made again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from frugal.config.cluster import Cluster
from frugal.config.request import Request, check_pins
from frugal.errors import RequestError
from frugal.planning.plan import ModelSummary
from frugal.planning.search.candidate import (
    TIE,
    Choice,
    Nothing,
    Option,
    Source,
    buckets_matter,
    search_order,
)
from frugal.planning.search.evaluate import Refuted, StrategyEvaluation
from frugal.planning.strategy import Offload, Strategy, candidates, offload_levels

TRUST = 0.01
"""A profile that is further than this from the dry run is wrong, and the plan says so. In live bytes: what the
allocator wastes may change by as much with the order of a few small blocks."""


class Search:
    """One request on one cluster. Profiles are taken from `source` only when they are needed.

    Raises:
        RequestError: the request's pins contradict each other.
    """

    def __init__(self, request: Request, cluster: Cluster, source: Source) -> None:
        check_pins(request, cluster.world_size)
        self.request = request
        self.cluster = cluster
        self.source = source
        self.appraisal = StrategyEvaluation(request, cluster, source)
        self.levels = offload_levels(request, on_gpus=cluster.devices[0].kind == "cuda")
        self.facts = self.appraisal.facts
        self.can_tile = self.facts.can_tile

    def run(self) -> Choice | Nothing:
        """Choose, dry-run, and choose again until the two agree."""
        seen: list[Option] = []
        warnings: list[str] = []
        for level in self.levels:
            options = self.options(level)
            while winner := self._winner(options):
                memory = self.appraisal.dry_run_result(winner)
                assert winner.memory is not None
                what = f"{winner.strategy}, micro-batch {winner.micro_batch}: the profile was"
                live_error = winner.memory.live_bytes / memory.live_bytes - 1
                if abs(live_error) > TRUST and self.source.distrust(winner.strategy):
                    off = f"{100 * live_error:+.1f} % off the dry run"
                    warnings.append(f"{what} {off}; it was profiled by dry runs instead")
                    options = self.options(level)
                    continue
                error = winner.memory.total_bytes / memory.total_bytes - 1
                if abs(error) > TRUST or not memory.fits:
                    verdict = "it still fits" if memory.fits else "it does not fit, and was not chosen"
                    warnings.append(f"{what} {100 * error:+.1f} % off the dry run; {verdict}")
                if memory.fits:
                    return Choice(
                        option=winner,
                        memory=memory,
                        model=self._model(winner),
                        options=(*seen, *options),
                        warnings=(
                            *warnings,
                            *(f"assumed, because it depends on data: {note}" for note in self.source.notes),
                        ),
                    )
                self.appraisal.refuted[winner.strategy] = Refuted(
                    micro_batch=winner.micro_batch, memory=memory, factor=memory.total_bytes / winner.memory.total_bytes
                )
                options = self.options(level)
            seen += options
        return Nothing(options=self._nearest_first(seen), num_strategies=len(seen), seen=tuple(seen))

    def predicted(self) -> Option | None:
        """What `run` would dry-run, or what misses by least; None where only a dry run could tell.

        Strategies without a draft are left out.
        """
        seen: list[Option] = []
        for level in self.levels:
            for turn in search_order(self.strategies(level)):
                slow, others = self._slow(turn, seen)
                self.source.prepare(others)
                seen += [*slow, *self._confirmed([draft for each in others for draft in self._draft(each)], seen)]
            if winner := self._winner(seen):
                return winner
        return max(seen, key=lambda option: option.headroom_bytes or 0, default=None)

    def _winner(self, options: list[Option]) -> Option | None:
        """The simplest of those that are fast enough; None if none fits."""
        fitting = [option for option in options if option.fits and not option.is_draft]
        enough = min((option.seconds for option in fitting), default=0.0) * TIE
        near = [option for option in fitting if option.seconds <= enough]
        return min(near, key=lambda option: option.simplicity, default=None)

    def strategies(self, level: Offload, *, small_buckets: bool = False) -> tuple[Strategy, ...]:
        """The candidates of one level of offloading, simplest first."""
        return candidates(
            self.request,
            world_size=self.cluster.world_size,
            offload=level,
            trainable_parameters=self.facts.trainable_parameters,
            can_recompute=self.facts.can_recompute,
            can_tile=self.can_tile,
            largest_parameter=self.facts.largest_parameter,
            on_gpus=self.cluster.devices[0].kind == "cuda",
            small_buckets=small_buckets,
        )

    def options(self, level: Offload) -> list[Option]:
        """All strategies of a level.

        Modes of activation checkpointing are looked at in turns, each for what those before leave to gain: a mode
        whose best case is no faster than what fits already is not even traced.
        """
        found: list[Option] = []
        for turn in search_order(self.strategies(level)):
            found += self._options(turn, found)
        if buckets_matter(found, self.request, min(device.usable_bytes for device in self.cluster.devices)):
            found += self._options(self.strategies(level, small_buckets=True), found)
        refused = self.request.loss == "auto" and not self.can_tile
        return [option for option in found if not (refused and option.strategy.loss == "tiled")]

    def _options(self, strategies: Sequence[Strategy], before: list[Option]) -> list[Option]:
        """Some strategies of a level, of which others were looked at `before`."""
        slow, others = self._slow(strategies, before)
        return slow + self._profiled(others, before)

    def _slow(self, strategies: Sequence[Strategy], before: list[Option]) -> tuple[list[Option], list[Strategy]]:
        """Those whose best case is no faster than what fits already, and the others."""
        fastest = min((o.seconds for o in before if o.fits and not o.is_draft), default=float("inf"))
        bounds = [self.appraisal.best_case(strategy) for strategy in strategies] if self.appraisal.work else []
        slow = [b for b in bounds if b.seconds * TIE >= fastest]
        known = {bound.strategy for bound in slow}
        return slow, [strategy for strategy in strategies if strategy not in known]

    def _profiled(self, strategies: Sequence[Strategy], before: list[Option]) -> list[Option]:
        """Those among them that could win, drafted or profiled; what is slower even without a limit stays so."""
        if not strategies:
            return []
        self.source.prepare(strategies)
        drafts = {strategy: draft for strategy in strategies for draft in self._draft(strategy)}
        options = self._confirmed(list(drafts.values()), before)
        for strategy in strategies:
            if strategy in drafts:
                continue
            known = [*before, *options]
            fastest = min((option.seconds for option in known if option.fits), default=float("inf"))
            bound = self.appraisal.best_case(strategy) if self.appraisal.work else None
            if bound and bound.seconds * TIE >= fastest:
                options.append(bound)
            elif hopeless := self._hopeless(strategy, known):
                options.append(hopeless)
            elif strategy.loss == "plain" or self.request.loss == "tiled":
                options.append(self.appraisal.option(strategy))
            else:
                options += self._tiled(strategy, self.appraisal.option)
        return options

    def _draft(self, strategy: Strategy) -> list[Option]:
        """What a draft says of a strategy; nothing if there is none, or if the model cannot take the tiled loss."""
        if strategy.loss == "tiled" and self.request.loss == "auto":
            return self._tiled(strategy, self.appraisal.draft)
        found = self.appraisal.draft(strategy)
        return [] if found is None else [found]

    def _confirmed(self, drafts: list[Option], before: list[Option]) -> list[Option]:
        """The drafts with a closer look at those that could win: a draft's time is never too long.

        Those that are neither faster nor simpler than one that fits cannot.
        """
        options: list[Option] = []
        fitting = [option for option in before if option.fits and not option.is_draft]
        for draft in sorted(drafts, key=lambda option: (option.seconds, option.strategy.num_mechanisms)):
            enough = min((option.seconds for option in fitting), default=float("inf")) * TIE
            if not draft.fits or draft.seconds > enough or any(option.rules_out(draft) for option in fitting):
                options.append(draft)
            else:
                options.append(self.appraisal.option(draft.strategy))
                fitting += options[-1:] if options[-1].fits else []
        return options

    def _tiled(self, strategy: Strategy, look: Callable[[Strategy], Option | None]) -> list[Option]:
        """The option of a tiled loss nobody asked for; none if it shows that the model cannot take it."""
        if not self.can_tile:
            return []
        try:
            found = look(strategy)
        except RequestError:
            self.can_tile = False
            return []
        return [] if found is None else [found]

    def _hopeless(self, strategy: Strategy, options: list[Option]) -> Option | None:
        """`strategy`, if activation checkpointing cannot help it: at the peak without, the states alone are too much.

        States, buffers and context are live at that moment of the step whether activations are kept or not.
        """
        plain = replace(strategy, activation_checkpointing="off")
        without = next((option.memory for option in options if option.strategy == plain != strategy), None)
        if without is None:
            return None
        shortfall = -without.headroom_bytes - without.activations - without.logits - without.temporary - without.slack
        if shortfall <= 0:
            return None
        micro = self.appraisal.fitting.smallest_micro_batch
        return Option(
            strategy=strategy, micro_batch=micro, batch=None, memory=None, time=None, least_shortfall_bytes=shortfall
        )

    def _nearest_first(self, seen: list[Option]) -> tuple[Option, ...]:
        """All options that were looked at, by shortfall; drafted and hopeless ones are looked at closely while they
        could be the nearest."""
        known = [option for option in seen if option.memory is not None and not option.is_draft]
        vague = [option for option in seen if option.is_draft or option.least_shortfall_bytes is not None]
        for option in sorted(vague, key=lambda option: -(option.headroom_bytes or 0)):
            nearest = max((option.headroom_bytes or 0 for option in known), default=-float("inf"))
            if (option.headroom_bytes or 0) > nearest:
                known.append(self.appraisal.option(option.strategy))
        return tuple(sorted(known, key=lambda option: -(option.headroom_bytes or 0)))

    def _model(self, option: Option) -> ModelSummary:
        return ModelSummary(
            task=self.facts.task,
            parameters=self.facts.parameters,
            trainable_parameters=self.facts.trainable_parameters,
            largest_parameter=self.facts.largest_parameter,
            flops_per_sample=self.appraisal.work[option.strategy.activation_checkpointing].work.flops_per_sample,
        )
