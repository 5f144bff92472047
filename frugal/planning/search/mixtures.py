"""Mixtures of modes of activation checkpointing, and shares of an optimizer: between two strategies there is memory
that neither uses.

Layers that keep more come last: backward begins there, and what they keep is gone when the others recompute. So a
mixture of two modes is a number, of the last layers that keep more, and both its memory and its speed grow with it. It
may be worth a smaller micro-batch, so all of them are candidates; most are never looked at. For an interval of numbers
whose most frugal end has a known batch, no mixture inside is faster than that batch with the work of the other end;
where this is no gain over the best so far, the interval is left out, otherwise it is halved. What is left out could be
faster by `GAP` at most.

Of more than two modes, only neighbours on the lower convex hull of bytes and seconds are mixed: layers are alike, so a
mode on the line between two others is no better than a mixture of these. With few layers one layer is too much for
that, so there all pairs of modes are mixed. The first strategy's hull is that of the others: they change bytes and
seconds of all modes alike. Left out: mixtures of three modes, which could use the memory of a part of a layer; and
mixtures beside a share of the optimizer on the host, unless that is pinned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from frugal.config.layers import FLAG, LayerModes
from frugal.errors import RequestError, refuse
from frugal.planning import cost
from frugal.planning.memory.profile import MemoryProfile, largest_near
from frugal.planning.search.candidate import TIE, Candidate, Source, fastest_seconds
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.strategy import LAYER_MODES, RATIOS, LayerMode, Offload, Strategy, in_part, share_on_host
from frugal.units import plural

GAP = 1.005
"""A mixture that is not looked at is faster by 0.5 % at most."""

Runs = tuple[tuple[LayerMode, int], ...]
"""`Strategy.layer_modes`."""


FEW_LAYERS = 7
"""Up to so many layers a mode on the line between two others may be better than a mixture of its neighbours."""

Point = tuple[int, float, LayerMode]
"""Bytes, seconds, and the mode that takes them."""


def base_of(strategy: Strategy) -> Strategy:
    """Return the strategy without activation checkpointing."""
    return replace(strategy, activation_checkpointing="off", layer_modes=())


def mixture(base: Strategy, layer_modes: Runs) -> Strategy:
    """Return `base` with these modes; runs of no layers are left out."""
    runs = tuple((mode, count) for mode, count in layer_modes if count)
    if len(runs) == 1:
        return replace(base, activation_checkpointing=runs[0][0], layer_modes=())
    return replace(base, activation_checkpointing="budget", layer_modes=runs)


def check_pinned(modes: LayerModes, strategy: Strategy, source: Source) -> None:
    """Check that the model has as many layers as modes were pinned, and that they can be mixed.

    `strategy`: any with these modes.

    Raises:
        RequestError: it has not, or they cannot.
    """
    num_layers = source.num_layers(strategy)
    why_not = source.why_not_mixed(strategy) if strategy.layer_modes else ""
    refuse(
        (
            num_layers and num_layers != modes.num_layers,
            f"{FLAG} gives modes to {plural(modes.num_layers, 'layer')}",
            f"the model has {num_layers}",
            f"give modes to layers 0 to {num_layers - 1}",
        ),
        (
            not num_layers or why_not,
            f"{FLAG} {modes} is impossible for this model",
            why_not or "its layers are not known",
            "pin one mode for all layers: --activation-checkpointing full",
        ),
    )


class Mixtures:
    """Mixtures for one request on one cluster, on top of strategies with one mode that were evaluated."""

    def __init__(self, evaluation: StrategyEvaluation) -> None:
        self.evaluation = evaluation
        self.source = evaluation.source
        self._modes = [*LAYER_MODES]  # but for those that a hull left out

    def faster(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return mixtures that fit, evaluated in full, and are faster than all `candidates` by more than a tie.

        None where a mode was pinned.
        """
        request = self.evaluation.request
        is_pinned = request.activation_checkpointing not in ("auto", "budget") or request.layer_modes is not None
        if is_pinned or not self.evaluation.facts.can_recompute:
            return []
        enough = fastest_seconds([candidate for candidate in candidates if not candidate.is_draft]) / TIE
        drafts: list[Candidate] = []
        bases = dict.fromkeys(  # the fastest with one mode first; bounds are no times
            base_of(each.strategy) for each in sorted(candidates, key=lambda each: (each.memory is None, each.seconds))
        )
        for base in [each for each in bases if each.offload_ratio == 1] or bases:  # a share that is pinned
            drafts += self._drafts(base, candidates, min(enough, fastest_seconds(drafts)))
        better: list[Candidate] = []
        for draft in sorted(drafts, key=lambda draft: draft.seconds):
            if draft.seconds >= min(enough, fastest_seconds(better)):
                break
            confirmed = self._confirmed(draft)
            if confirmed is not None and confirmed.seconds < enough:
                better.append(confirmed)
        return better

    def _drafts(self, base: Strategy, candidates: Sequence[Candidate], enough: float) -> list[Candidate]:
        """Return the fastest mixture of every pair of modes, as far as it may be faster than `enough`."""
        too_large = {base_of(each.strategy) for each in candidates if each.least_shortfall_bytes}  # in any mode
        if base in too_large or self.evaluation.best_case(base).seconds >= enough:
            return []
        evaluated = {each.strategy.activation_checkpointing for each in candidates if each.memory is not None}
        modes = {
            mode: draft
            for mode in self._modes
            if mode in evaluated and (draft := self.evaluation.draft(mixture(base, ((mode, 1),)))) is not None
        }
        if len(modes) < 2 or not any(draft.fits for draft in modes.values()):
            return []
        several = mixture(base, tuple((mode, 1) for mode in modes))
        num_layers = self.source.num_layers(several)
        if num_layers < 2:
            return []
        hull = self._hull(base, modes) if num_layers > FEW_LAYERS else [*modes]
        self._modes = [mode for mode in self._modes if mode in hull or mode not in modes]
        names = combinations(modes, 2) if num_layers <= FEW_LAYERS else pairwise(hull)
        pairs = [(modes[frugal], modes[generous]) for frugal, generous in names]
        pairs = [pair for pair in pairs if self._may_gain(*pair, enough)]
        if pairs and self.source.why_not_mixed(several):
            return []
        drafts: list[Candidate] = []
        for frugal, generous in pairs:
            draft = self._of_pair(frugal, generous, min(enough, fastest_seconds(drafts)))
            drafts += [] if draft is None else [draft]
        return drafts

    def _hull(self, base: Strategy, modes: dict[LayerMode, Candidate]) -> list[LayerMode]:
        """Return the modes on the lower hull of bytes and seconds of a large micro-batch, the most frugal first."""
        micro = max(1, *(draft.largest_micro_batch for draft in modes.values()))
        device = self.evaluation.fitting.devices[0]
        batch = self.evaluation.fitting.unlimited()
        points: list[Point] = []
        for mode in modes:
            strategy = mixture(base, ((mode, 1),))
            profile = self._profile(strategy)
            grown = profile.memory(2 * micro, device).total_bytes - profile.memory(micro, device).total_bytes
            points.append((grown, self.evaluation.time(profile.costs, strategy, batch).total_seconds, mode))
        hull: list[Point] = []
        for point in sorted(points):
            if hull and point[1] >= hull[-1][1]:
                continue  # more bytes, and no faster
            # the last is not below the line from the one before it to this one
            while len(hull) > 1 and (
                (hull[-1][1] - hull[-2][1]) * (point[0] - hull[-2][0])
                >= (hull[-1][0] - hull[-2][0]) * (point[1] - hull[-2][1])
            ):
                hull.pop()
            hull.append(point)
        return [mode for _, _, mode in hull]

    def _may_gain(self, frugal: Candidate, generous: Candidate, enough: float) -> bool:
        """Return whether the batch of a mode with the work of one that keeps more takes less than `enough`."""
        if frugal.batch is None or (generous.fits and generous.takes_one_micro_step):
            return False  # nothing fits, or there is no reason to recompute
        costs = self._profile(generous.strategy).costs
        return self.evaluation.time(costs, generous.strategy, frugal.batch).total_seconds < enough

    def _profile(self, strategy: Strategy) -> MemoryProfile:
        profile = self.source.draft(strategy, True)
        assert profile is not None, "drafted before, but no more"
        return profile

    def _of_pair(self, frugal: Candidate, generous: Candidate, enough: float) -> Candidate | None:
        """Return the draft of the fastest mixture of two modes; None where none is faster than `enough`."""
        base, first_costs, last_costs = (
            base_of(frugal.strategy),
            *(self._profile(each.strategy).costs for each in (frugal, generous)),
        )
        modes = frugal.strategy.modes[0], generous.strategy.modes[0]
        num_layers = self.source.num_layers(mixture(base, ((modes[0], 1), (modes[1], 1))))

        def of(number: int) -> Strategy:
            return mixture(base, ((modes[0], num_layers - number), (modes[1], number)))

        best: Candidate | None = None
        intervals = [(0, num_layers, frugal)]
        while intervals:
            first, last, draft = intervals.pop()
            if last - first < 2:
                continue
            assert draft.batch is not None
            blend = _blend(first_costs, last_costs, (last - 1) / num_layers)  # with the batch of the most frugal one
            at_best = self.evaluation.time(blend, of(last - 1), draft.batch).total_seconds
            if at_best >= enough or (best is not None and at_best * GAP >= best.seconds):
                continue
            middle = (first + last) // 2
            between = self.evaluation.draft(of(middle))
            intervals.append((first, middle, draft))
            if between is not None and between.fits:
                intervals.append((middle, last, between))  # the next: it is faster
                if between.seconds < (enough if best is None else best.seconds):
                    best = between
        return best

    def _confirmed(self, draft: Candidate) -> Candidate | None:
        """Evaluate a draft with the allocator replayed, with fewer layers that keep more where its batch needs that.

        None: that leaves no mixture.
        """
        (frugal, count), (generous, most) = draft.strategy.layer_modes

        def of(number: int) -> Strategy:
            return mixture(base_of(draft.strategy), ((frugal, count + most - number), (generous, number)))

        fits = largest_near(most, lambda number: self._fits(of(number), draft))
        if not of(fits).layer_modes:
            return None
        confirmed = self.evaluation.evaluate(of(fits))
        return confirmed if confirmed.fits else None

    def _fits(self, strategy: Strategy, draft: Candidate) -> bool:
        """Return whether a strategy has memory for the batch of a draft, with what the allocator wastes."""
        assert draft.batch is not None
        if (refuted := self.evaluation.refuted.get(strategy)) and draft.micro_batch >= refuted.micro_batch:
            return False
        accumulates = self.evaluation.request.lengths is not None or not draft.takes_one_micro_step
        profile = self.source.profile(strategy, accumulates)
        return all(profile.fits(micro, device) for device, micro in self.evaluation.fitting.loads(draft.batch))


def _blend(frugal: cost.ModelCosts, generous: cost.ModelCosts, share: float) -> cost.ModelCosts:
    """Return the costs of a mixture in which a share of the layers is generous."""
    gathers = None
    if frugal.gathers is not None and generous.gathers is not None:
        number, elements = (
            round(one + share * (other - one)) for one, other in zip(frugal.gathers, generous.gathers, strict=True)
        )
        gathers = number, elements
    return replace(frugal, work=frugal.work.moved(frugal.work, generous.work, share), gathers=gathers)


FASTEST = 2
"""Shares of the optimizer that are evaluated; the arithmetic is hardly ever wrong."""

WORTH_A_COMPILER = 1.1
"""How many times faster a share on the device must make a step: DeepSpeed's CPU Adam, which it needs, is compiled on
each host, while torch's, which updates all of an optimizer in host memory, needs nothing."""


def shares_of_optimizer(evaluation: StrategyEvaluation, level: Offload, before: Sequence[Candidate]) -> list[Candidate]:
    """Return drafts of an optimizer partly in host memory that could win over the candidates evaluated `before`.

    A share of the update that stays on the device makes a step shorter, and adds bytes to what lives there throughout
    it. So the draft of a strategy with the whole optimizer on the host says which micro-batches fit beside them, and
    arithmetic alone finds the fastest share. Left out: what the allocator wastes, and sequence parallelism.
    """
    request, number = evaluation.request, evaluation.facts.trainable_parameters
    can_split = request.optimizer.why_not_in_part is None and request.zero_stage in (None, 3)
    on_gpus = evaluation.cluster.devices[0].kind == "cuda"
    is_asked = level == "optimizer" and request.offload_ratio is None
    if not (is_asked and can_split and on_gpus and evaluation.work):
        return []
    timed = sorted(_faster_shares(evaluation, before), key=lambda each: each[0])
    shares = [part for _, part in timed[:FASTEST]]
    for part in shares[:1]:  # more on the host, where the allocator wastes what the fastest needs
        more = in_part(part, part.offload_ratio + RATIOS[0], number, evaluation.cluster.world_size)
        if more.offload_ratio < 1 and more not in shares:
            shares.append(more)
    return [draft for share in shares if (draft := evaluation.draft(share)) is not None]


def _faster_shares(evaluation: StrategyEvaluation, before: Sequence[Candidate]) -> Iterator[tuple[float, Strategy]]:
    """Yield shares that make a step shorter by enough, with its seconds by arithmetic."""
    request, number = evaluation.request, evaluation.facts.trainable_parameters
    world_size, fitting = evaluation.cluster.world_size, evaluation.fitting
    with_gradient = 2 * request.optimizer.master_bytes_per_element + request.optimizer.state_bytes_per_element
    enough = fastest_seconds(before) / WORTH_A_COMPILER
    offloaded = (each.strategy for each in before if each.strategy.offload_optimizer == "cpu")
    candidates = (each for each in offloaded if each.offload_parameters == "none" and each.sequence_parallel == 1)
    # On one GPU nothing else asks for stage 3, which can split the optimizer.
    for whole in dict.fromkeys(replace(each, zero_stage=3) for each in candidates if each.zero_stage >= 2):
        if evaluation.best_case(in_part(whole, RATIOS[0], number, world_size)).seconds >= enough:
            continue
        try:
            evaluation.source.prepare([whole])
            profile = evaluation.source.draft(whole, True)
        except RequestError:  # the model turns out not to take the tiled loss
            if whole.loss == "tiled" and request.loss == "auto":
                continue
            raise
        if profile is None:
            continue
        for ratio in RATIOS:
            part = in_part(whole, ratio, number, world_size)
            on_device = 1 - share_on_host(profile.costs.facts.trainable_sizes, part, world_size)
            more = int(on_device * number / world_size * with_gradient)
            if not on_device or more >= min(device.usable_bytes for device in fitting.devices):
                continue
            fuller = {device: replace(device, held_bytes=device.held_bytes + more) for device in fitting.devices}
            fit = {device: fitting.largest_micro_batch(profile, fuller[device], None) for device in fitting.devices}
            batches = fitting.batches(fit) if min(fit.values()) >= 1 else []
            if batches and (seconds := evaluation.fastest(profile, part, batches)[0].total_seconds) < enough:
                yield seconds, part
