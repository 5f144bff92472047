"""Memory against time: what less memory costs, and what more would bring, by arithmetic.

Every strategy of every level of offloading at several micro-batches is a point: bytes at the peak of the fullest device
and seconds of a step. Those that no other point beats in both are the frontier. Mixtures of modes of activation
checkpointing are points where their strategies are on it: between two modes at quarters of the layers.

Left out: what the allocator wastes, and whether a device has so much.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from frugal.config.hardware.cluster import Device
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.search.mixtures import base_of, mixture
from frugal.planning.search.search import Search
from frugal.planning.strategy import LAYER_MODES, MODES_NOTE, Strategy, brief_name
from frugal.planning.table import NARROW, Table
from frugal.units import format_bytes, format_seconds

FASTER = 1.01
"""A point that takes more memory is one of the frontier where it is faster by 1 % at least."""

MOST_MICRO_BATCHES = 12
"""Micro-batches that each strategy is looked at with: 1, 2, 3, 4, 6, 8, 12 and so on, and the largest."""


OFF_LINE = 0.01
"""Of a mixture's bytes: how far it may be below the line between its modes."""


@dataclass(frozen=True, kw_only=True)
class FrontierPoint:
    """What a strategy takes with a micro-batch, bytes on the fullest device and seconds of a step; `fits`: whether the
    devices have so much."""

    total_bytes: int
    seconds: float
    micro_batch: int
    accumulation_steps: int
    strategy: Strategy
    fits: bool


def frontier(search: Search) -> list[FrontierPoint]:
    """The points that none beats, the smallest first.

    Raises:
        RequestError: there are none, because only dry runs could tell.
    """
    whole = [
        point
        for level in search.levels
        for strategy in _drafted(search, search.strategies(level))
        for point in _points(search, strategy)
    ]
    if not whole:
        raise RequestError(
            f"there is no frontier for {search.request.model}",
            because="its memory cannot be predicted by arithmetic",
            hint="`frugal plan` dry-runs what it weighs",
        )
    best = _unbeaten(whole)
    mixed = (point for each, accumulates in _mixed(search, whole, best) for point in _points(search, each, accumulates))
    return _unbeaten([*whole, *mixed])


def _drafted(search: Search, strategies: Iterable[Strategy]) -> Iterator[Strategy]:
    """Those that arithmetic can tell of."""
    strategies = list(strategies)
    search.source.prepare(strategies)
    for strategy in strategies:
        try:
            if search.source.draft(strategy, True) is not None:
                yield strategy
        except RequestError:
            if strategy.loss == "plain":
                raise


def _points(search: Search, strategy: Strategy, of_steps: Iterable[bool] = (True, False)) -> Iterator[FrontierPoint]:
    """A strategy with several micro-batches; `of_steps`: those that accumulate gradients, those that do not."""
    fitting, evaluation = search.evaluation.fitting, search.evaluation
    for accumulates in of_steps:
        profile = search.source.draft(strategy, accumulates)
        if profile is None:
            return
        for micro_batch in _micro_batches(fitting.cap):
            batches = fitting.batches(dict.fromkeys(fitting.devices, micro_batch))
            if not batches:
                continue
            time, batch = evaluation.fastest(profile, strategy, batches)
            if accumulates == (batch.accumulation_steps == 1):
                continue
            device, micro = max(fitting.loads(batch), key=_samples)
            memory = profile.memory(micro, device)
            yield FrontierPoint(
                total_bytes=memory.total_bytes,
                seconds=time.total_seconds,
                micro_batch=batch.largest_micro_batch,
                accumulation_steps=batch.accumulation_steps,
                strategy=strategy,
                fits=memory.fits,
            )


def _samples(load: tuple[Device, int]) -> int:
    return load[1]


def _micro_batches(cap: int) -> list[int]:
    sizes = sorted({size for power in range(16) for size in (2**power, 3 * 2**power) if size < cap})
    return [*sizes[: MOST_MICRO_BATCHES - 1], cap]


def _mixed(
    search: Search, whole: Sequence[FrontierPoint], best: Sequence[FrontierPoint]
) -> Iterator[tuple[Strategy, set[bool]]]:
    """Mixtures under strategies on the frontier that may be on it, too, and whether gradients accumulate there.

    With equal micro-batches bytes and seconds of a mixture are about on the line between those of its modes.
    """
    if search.request.activation_checkpointing not in ("auto", "budget") or search.request.layer_modes is not None:
        return
    cuts: dict[Strategy, dict[tuple[int, int], FrontierPoint]] = {}
    for point in whole:
        cuts.setdefault(point.strategy, {})[point.micro_batch, point.accumulation_steps] = point
    modes = LAYER_MODES if search.cluster.devices[0].kind == "cuda" else LAYER_MODES[1:]
    for base in dict.fromkeys(base_of(point.strategy) for point in best):
        for frugal, generous in (*pairwise(modes), (modes[0], modes[-1])):
            ends = [cuts.get(mixture(base, ((mode, 1),)), {}) for mode in (frugal, generous)]
            wanted: dict[int, set[bool]] = {}  # quarters that are generous -> whether gradients accumulate
            for cut, quarters in product(ends[0].keys() & ends[1].keys(), (1, 2, 3)):
                if _may_be_unbeaten(ends[0][cut], ends[1][cut], quarters / 4, best):
                    wanted.setdefault(quarters, set()).add(cut[1] > 1)
            both = mixture(base, ((frugal, 1), (generous, 1)))
            num_layers = search.source.num_layers(both) if wanted and not search.source.why_not_mixed(both) else 0
            for quarters, accumulates in sorted(wanted.items()):
                if 0 < (count := num_layers * quarters // 4) < num_layers:
                    yield mixture(base, ((frugal, num_layers - count), (generous, count))), accumulates


def _may_be_unbeaten(
    frugal: FrontierPoint, generous: FrontierPoint, share: float, best: Sequence[FrontierPoint]
) -> bool:
    """Whether a mixture of two points may be on the frontier; if it takes more than on their line, by `OFF_LINE`."""
    total_bytes = frugal.total_bytes + share * (generous.total_bytes - frugal.total_bytes)
    seconds = frugal.seconds + share * (generous.seconds - frugal.seconds)
    less = (point.seconds for point in best if point.total_bytes <= total_bytes * (1 - OFF_LINE))
    return seconds <= min(less, default=float("inf"))


def _unbeaten(points: Iterable[FrontierPoint]) -> list[FrontierPoint]:
    """Those that are faster than all that take less, the smallest first."""
    best: list[FrontierPoint] = []
    for point in sorted(points, key=lambda point: (point.total_bytes, point.seconds)):
        if not best or point.seconds * FASTER <= best[-1].seconds:
            best.append(point)
    return best


def frontier_table(plan: Plan, points: list[FrontierPoint]) -> Table:
    """The frontier as rows; what does not fit is marked."""
    rows = [("peak", "step", "batch", "strategy")]
    for point in points:
        rows.append(
            (
                f"{'' if point.fits else '!'}{format_bytes(point.total_bytes)}",
                format_seconds(point.seconds),
                f"{point.micro_batch} x {point.accumulation_steps}",
                brief_name(point.strategy),
            )
        )
    total = format_bytes(plan.memory.usable_bytes + plan.memory.context)
    note = (
        f"! more than the {total} of a device that may be used. {MODES_NOTE.capitalize()}. "
        "Predicted, without what the allocator wastes, and not dry-run"
    )
    return Table(title="memory against time", rows=tuple(rows), note=note, has_head=True, width=NARROW)
