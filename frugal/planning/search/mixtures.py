"""Mixtures of modes of activation checkpointing: between two modes there is memory that neither uses.

Layers that keep more come last: backward begins there, and what they keep is gone when the others recompute. So a
mixture of two modes is a number, of the last layers that keep more, and both its memory and its speed grow with it. It
may be worth a smaller micro-batch, so all of them are candidates; most are never looked at. For an interval of numbers
whose most frugal end has a known batch, no mixture inside is faster than that batch with the work of the other end;
where this is no gain over the best so far, the interval is left out, otherwise it is halved. What is left out could be
faster by `GAP` at most.

More than two modes: layers that are alike give each mode a point, its bytes and its seconds. Of points on a line
between two others those two are as good, so only neighbours on the lower convex hull of these points are mixed, and
one layer of a third mode put between them where it fits. Few layers have so few mixtures that all are looked at;
those of two modes are not, because the intervals leave out as little with far fewer simulations.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import comb

from frugal.config.layers import FLAG, LayerModes
from frugal.errors import RequestError
from frugal.planning import cost
from frugal.planning.memory.loading import Packed
from frugal.planning.search.candidate import TIE, Candidate, Profile, Source, fastest_seconds
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.strategy import LAYER_MODES, LayerMode, Strategy
from frugal.units import plural

GAP = 1.005
"""A mixture that is not looked at is faster by 0.5 % at most."""

FEW = 40
"""Mixtures of three modes or more of which all are looked at, if there are no more."""

Runs = tuple[tuple[LayerMode, int], ...]
"""`Strategy.layer_modes`."""

Point = tuple[int, float, LayerMode]
"""Bytes, seconds, and the mode that takes them."""


@dataclass(frozen=True, kw_only=True)
class _Blend:
    """What a mixture costs in time, without its memory: a `cost.Model`."""

    parameters: int
    trainable_parameters: int
    trainable_sizes: tuple[int, ...]
    packed: Packed
    work: cost.Work
    gathers: tuple[int, int] | None


def base_of(strategy: Strategy) -> Strategy:
    """What strategies have in common that only differ in activation checkpointing."""
    return replace(strategy, activation_checkpointing="off", layer_modes=())


def mixture(base: Strategy, layer_modes: Runs) -> Strategy:
    """`base` with these modes; runs of no layers are left out."""
    runs = tuple((mode, count) for mode, count in layer_modes if count)
    if len(runs) == 1:
        return replace(base, activation_checkpointing=runs[0][0], layer_modes=())
    return replace(base, activation_checkpointing="budget", layer_modes=runs)


def check_pinned(modes: LayerModes, strategy: Strategy, source: Source) -> None:
    """Whether the model has as many layers as modes were pinned, and they can be mixed; `strategy`: any with these.

    Raises:
        RequestError: it has not, or they cannot.
    """
    num_layers = source.num_layers(strategy)
    if num_layers and num_layers != modes.num_layers:
        raise RequestError(
            f"{FLAG} gives modes to {plural(modes.num_layers, 'layer')}",
            because=f"the model has {num_layers}",
            hint=f"give modes to layers 0 to {num_layers - 1}",
        )
    why_not = source.why_not_mixed(strategy) if strategy.layer_modes else ""
    if not num_layers or why_not:
        raise RequestError(
            f"{FLAG} {modes} is impossible for this model",
            because=why_not or "its layers are not known",
            hint="pin one mode for all layers: --activation-checkpointing full",
        )


def _is_added_to(strategy: Strategy) -> bool:
    """Whether it is one of `memory_for_time`, which are searched with one mode of those without."""
    return strategy.secondary_partition > 1 or strategy.offload_ratio < 1


def _without_additions(strategy: Strategy) -> Strategy:
    usual = Strategy.sub_group_elements
    return replace(strategy, secondary_partition=1, offload_ratio=1.0, sub_group_elements=usual)


def _bases(candidates: Sequence[Candidate]) -> list[Strategy]:
    """What modes are mixed under, the fastest with one mode first. Of those that trade memory for time, only that."""
    ordered = sorted(candidates, key=lambda candidate: candidate.seconds)
    bases = list(dict.fromkeys(base_of(candidate.strategy) for candidate in ordered))
    fitting = [candidate for candidate in ordered if candidate.fits and not candidate.is_draft]
    added = [base_of(candidate.strategy) for candidate in fitting if _is_added_to(candidate.strategy)]
    if all(map(_is_added_to, bases)):  # a pin
        return bases
    return [base for base in bases if not _is_added_to(base) or base in added[:1]]


def all_mixtures(modes: Sequence[LayerMode], num_layers: int) -> Iterator[Runs]:
    """Those in which layers that keep more come last; `modes`: the least kept first."""
    if len(modes) == 1:
        yield ((modes[0], num_layers),)
        return
    for count in range(num_layers + 1):
        for others in all_mixtures(modes[1:], num_layers - count):
            yield ((modes[0], count), *others)


class Mixtures:
    """Mixtures for one request on one cluster, on top of strategies with one mode that were evaluated.

    `why_none`: where one might have been faster, why the modes could not be mixed; otherwise empty.
    """

    def __init__(self, evaluation: StrategyEvaluation) -> None:
        self.evaluation = evaluation
        self.source = evaluation.source
        self.why_none = ""

    def faster(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Mixtures that fit, evaluated in full, and are faster than all `candidates` by more than a tie.

        None where a mode was pinned.
        """
        self.why_none = ""
        request = self.evaluation.request
        is_pinned = request.activation_checkpointing not in ("auto", "budget") or request.layer_modes is not None
        if is_pinned or not self.evaluation.facts.can_recompute:
            return []
        fitting = [candidate for candidate in candidates if not candidate.is_draft]
        enough = fastest_seconds(fitting) / TIE
        drafts: list[Candidate] = []
        for base in _bases(candidates):
            drafts += self._drafts(base, candidates, min(enough, fastest_seconds(drafts)))
        better: list[Candidate] = []
        for draft in sorted(drafts, key=lambda draft: draft.seconds):
            if draft.seconds >= min(enough, fastest_seconds(better)):
                break
            confirmed = self._confirmed(draft)
            if confirmed is not None and confirmed.seconds < enough:
                better.append(confirmed)
        return better

    def _modes(self, base: Strategy, candidates: Sequence[Candidate]) -> dict[LayerMode, Candidate]:
        """The modes that were evaluated with `base`, the least kept first; or with what it adds a mechanism to."""
        evaluated = {candidate.strategy for candidate in candidates if candidate.memory is not None}
        if _is_added_to(base):
            evaluated = {_without_additions(each) for each in evaluated}
        known = {
            mode: self.evaluation.draft(strategy)
            for mode in LAYER_MODES
            if _without_additions(strategy := mixture(base, ((mode, 1),))) in evaluated or strategy in evaluated
        }
        return {mode: draft for mode, draft in known.items() if draft is not None}

    def _drafts(self, base: Strategy, candidates: Sequence[Candidate], enough: float) -> list[Candidate]:
        """The fastest mixture of every pair of modes, as far as it may be faster than `enough`; or all of few."""
        if self.evaluation.best_case(base).seconds >= enough:
            return []
        modes = self._modes(base, candidates)
        if len(modes) < 2 or not any(draft.fits for draft in modes.values()):
            return []
        several = mixture(base, tuple((mode, 1) for mode in modes))
        num_layers = self.source.num_layers(several)
        if num_layers < 2:
            return []
        are_few = len(modes) > 2 and comb(num_layers + len(modes) - 1, num_layers) <= FEW
        pairs = list(combinations(modes, 2) if are_few else pairwise(self._hull(base, modes)))
        pairs = [pair for pair in pairs if self._may_gain(base, pair, modes, enough)]
        if not pairs:
            return []
        if why_not := self.source.why_not_mixed(several):
            self.why_none = why_not
            return []
        if are_few:
            few = [self._draft(mixture(base, each)) for each in all_mixtures(tuple(modes), num_layers)]
            return [draft for draft in few if draft is not None and draft.strategy.layer_modes]
        drafts: list[Candidate] = []
        for pair in pairs:
            draft = self._of_pair(base, pair, modes, num_layers, min(enough, fastest_seconds(drafts)))
            drafts += [] if draft is None else [draft]
        return drafts

    def _may_gain(
        self, base: Strategy, pair: tuple[LayerMode, LayerMode], modes: dict[LayerMode, Candidate], enough: float
    ) -> bool:
        """Whether the batch of a mode with the work of one that keeps more takes less than `enough`."""
        frugal, generous = modes[pair[0]], mixture(base, ((pair[1], 1),))
        if frugal.batch is None or (modes[pair[1]].fits and modes[pair[1]].takes_one_micro_step):
            return False  # nothing fits, or there is no reason to recompute
        profile = self.source.draft(generous, True)
        assert profile is not None, "drafted before, but no more"
        return self.evaluation.time(profile, generous, frugal.batch).total_seconds < enough

    def _draft(self, strategy: Strategy) -> Candidate | None:
        """What arithmetic says of a mixture; None if that it does not fit, or nothing."""
        draft = self.evaluation.draft(strategy)
        return draft if draft is not None and draft.fits else None

    def _hull(self, base: Strategy, modes: dict[LayerMode, Candidate]) -> list[LayerMode]:
        """The modes on the lower hull of bytes and seconds of a large micro-batch, the least kept first."""
        micro = max(1, *(draft.largest_micro_batch for draft in modes.values()))
        device = self.evaluation.fitting.devices[0]
        batch = self.evaluation.fitting.unlimited()
        points: list[Point] = []
        for mode in modes:
            strategy = mixture(base, ((mode, 1),))
            profile = self.source.draft(strategy, True)
            assert profile is not None, "drafted before, but no more"
            grown = profile.memory(2 * micro, device).total_bytes - profile.memory(micro, device).total_bytes
            points.append((grown, self.evaluation.time(profile, strategy, batch).total_seconds, mode))
        hull: list[Point] = []
        for point in sorted(points):
            if hull and point[1] >= hull[-1][1]:
                continue  # more bytes, and no faster
            while len(hull) > 1 and _is_above(hull[-1], hull[-2], point):
                hull.pop()
            hull.append(point)
        return [mode for _, _, mode in hull]

    def _of_pair(
        self,
        base: Strategy,
        pair: tuple[LayerMode, LayerMode],
        modes: dict[LayerMode, Candidate],
        num_layers: int,
        enough: float,
    ) -> Candidate | None:
        """The draft of the fastest mixture of two modes; None where none is faster than `enough`."""
        frugal, generous = pair

        def of(number: int) -> Strategy:
            return mixture(base, ((frugal, num_layers - number), (generous, number)))

        best: Candidate | None = None
        intervals = [(0, num_layers, modes[frugal])]
        while intervals:
            first, last, draft = intervals.pop()
            if last - first < 2:
                continue
            at_best = self._at_best(of, last - 1, num_layers, draft)
            if at_best >= enough or (best is not None and at_best * GAP >= best.seconds):
                continue
            middle = (first + last) // 2
            between = self._draft(of(middle))
            if between is not None:
                intervals.append((first, middle, draft))
                intervals.append((middle, last, between))  # the next: it is faster
                if between.seconds < (enough if best is None else best.seconds):
                    best = between
            else:
                intervals.append((first, middle, draft))
        return None if best is None else self._with_third(best, modes)

    def _with_third(self, draft: Candidate, modes: Iterable[LayerMode]) -> Candidate:
        """A mixture of two modes with one layer of another between them, where that is faster."""
        (frugal, count), (generous, most) = draft.strategy.layer_modes
        kept = LAYER_MODES.index
        between = [mode for mode in modes if kept(frugal) < kept(mode) < kept(generous)]
        mixed = (
            mixture(base_of(draft.strategy), ((frugal, count - 1), (mode, 1), (generous, most))) for mode in between
        )
        drafts = [each for each in map(self._draft, mixed) if each is not None and each.seconds * GAP < draft.seconds]
        return min([draft, *drafts], key=lambda each: each.seconds)

    def _at_best(self, of: Callable[[int], Strategy], number: int, num_layers: int, frugal: Candidate) -> float:
        """Seconds with the batch of a more frugal mixture, and the work of this one."""
        assert frugal.batch is not None
        ends = [self.source.draft(of(end), True) for end in (0, num_layers)]
        assert ends[0] is not None and ends[1] is not None, "drafted before, but no more"
        blend = _blend(ends[0], ends[1], number / num_layers)
        return self.evaluation.time(blend, of(number), frugal.batch).total_seconds

    def _confirmed(self, draft: Candidate) -> Candidate | None:
        """A draft evaluated with the allocator replayed; with fewer layers that keep more, where it needs them to have
        the same batch. None: that leaves no mixture."""
        base, runs = base_of(draft.strategy), draft.strategy.layer_modes
        *first, (frugal, count), (generous, most) = runs

        def of(number: int) -> Strategy:
            return mixture(base, (*first, (frugal, count + most - number), (generous, number)))

        fits, fails, step = most, most + 1, 1
        while fits > 0 and not self._fits(of(fits), draft):
            fails, fits, step = fits, max(0, fits - step), 2 * step
        while fits and fails - fits > 1:
            middle = (fits + fails) // 2
            fits, fails = (middle, fails) if self._fits(of(middle), draft) else (fits, middle)
        if not of(fits).layer_modes:
            return None
        confirmed = self.evaluation.evaluate(of(fits))
        return confirmed if confirmed.fits else None

    def _fits(self, strategy: Strategy, draft: Candidate) -> bool:
        """Whether a strategy has memory for the batch of a draft, with what the allocator wastes."""
        assert draft.batch is not None
        refuted = self.evaluation.refuted.get(strategy)
        if refuted is not None and draft.micro_batch >= refuted.micro_batch:
            return False
        accumulates = self.evaluation.request.lengths is not None or not draft.takes_one_micro_step
        profile = self.source.profile(strategy, accumulates)
        return all(profile.fits(micro, device) for device, micro in self.evaluation.fitting.loads(draft.batch))


def _is_above(
    point: tuple[int, float, LayerMode], left: tuple[int, float, LayerMode], right: tuple[int, float, LayerMode]
) -> bool:
    """Whether a point is not below the line through two others."""
    along = (point[0] - left[0]) * (right[1] - left[1])
    return (point[1] - left[1]) * (right[0] - left[0]) >= along


def _blend(frugal: Profile, generous: Profile, share: float) -> _Blend:
    """What a mixture costs in which a share of the layers is generous."""
    gathers = None
    if frugal.gathers is not None and generous.gathers is not None:
        number, elements = (
            round(one + share * (other - one)) for one, other in zip(frugal.gathers, generous.gathers, strict=True)
        )
        gathers = number, elements
    return _Blend(
        parameters=frugal.parameters,
        trainable_parameters=frugal.trainable_parameters,
        trainable_sizes=frugal.trainable_sizes,
        packed=frugal.packed,
        work=frugal.work.moved(frugal.work, generous.work, share),
        gathers=gathers,
    )
