"""The way that was measured to be the fastest, in place of the one that is predicted to be, where it fits.

The search has chosen by predictions. Where runs of the same training have measured ways of taking its steps
(`measured_ways`), these are compared by what they took. A way is taken that was faster than the one chosen by more than
the noise of both, and by `LEAST_GAIN`. It is profiled and dry-run like every winner of the search.

Runs of different days met different loads. Where two have a way in common, seconds of the older are scaled so that this
way took as long in both, the median where there are several; where they have none, seconds are compared as they are.

Where the way predicted fastest was never measured, as under another amount of memory, it is taken to need what is
predicted for it, times the median of what the measured ways took by what is predicted for them. It wins ties.

No factor is applied to predicted seconds: it would be that of the few models that were trained here, and predictions
for others are not off by the same. See docs/decisions/tuning.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from frugal.errors import RequestError
from frugal.planning.plan import StepTime
from frugal.planning.search.candidate import Candidate, Profile, SearchResult
from frugal.planning.search.measured_ways import LEAST_GAIN, MeasuredRun, MeasuredWay, newest_first, noise, question_of
from frugal.planning.search.search import Search
from frugal.units import format_seconds, plural


@dataclass(frozen=True)
class _Known:
    """A way with the date of its measurement; its seconds are as of the newest run."""

    way: MeasuredWay
    date: str


def has_answers(search: Search, result: SearchResult, runs: Sequence[MeasuredRun]) -> bool:
    """Whether a run has measured ways of the same training."""
    return bool(newest_first(runs, question_of(search.request, result.model, search.cluster)))


def fastest(search: Search, result: SearchResult, runs: Sequence[MeasuredRun]) -> SearchResult:
    """The result of a search, or the same with a way that `runs` have measured to be faster."""
    known = _compared(newest_first(runs, question_of(search.request, result.model, search.cluster)))
    if not known:
        return result
    own = known.get(_name(result.chosen))
    expected = own.way.seconds if own is not None else _expected(search, result.chosen, known)
    for each in sorted(known.values(), key=lambda each: each.way.seconds):
        if each is own or not _is_faster(each, own, expected):
            continue
        candidate = _candidate(search, each.way)
        if candidate is None:
            continue
        memory = search.evaluation.dry_run_result(candidate)
        if memory.fits and search.evaluation.fitting.host_shortfall_bytes(memory) <= 0:
            others = [other for other in result.candidates if other.strategy != candidate.strategy]
            because = _taken(each, own, expected, result.chosen)
            return replace(
                result, chosen=candidate, memory=memory, candidates=(*others, candidate), measured_because=because,
                instead_of=result.chosen,
            )  # fmt: skip
    return result if own is None else replace(result, measured_because=_confirmed(own, len(known) - 1))


def _compared(runs: Sequence[MeasuredRun]) -> dict[tuple[object, ...], _Known]:
    """All ways that were measured, by name; `runs` are the newest first."""
    known: dict[tuple[object, ...], _Known] = {}
    for run in runs:
        scale = median([known[way.name].way.seconds / way.seconds for way in run.ways if way.name in known] or [1.0])
        for way in run.ways:
            before = known.get(way.name)
            if before is None or (before.way.error is None and way.error is not None):
                known[way.name] = _Known(replace(way, seconds=way.seconds * scale), run.date)
    return known


def _name(candidate: Candidate) -> tuple[object, ...]:
    assert candidate.batch is not None
    return MeasuredWay(strategy=candidate.strategy, batch=candidate.batch, seconds=1.0, error=None).name


def _is_faster(each: _Known, own: _Known | None, expected: float) -> bool:
    """Whether it is, beyond what may be noise. `expected` are the seconds of the way that the search has chosen."""
    if each.way.error is None:
        return False
    least = 0.0 if own is None else max(LEAST_GAIN, noise(each.way.error, own.way.error or 0.0))
    return 1 - each.way.seconds / expected > least


def _expected(search: Search, chosen: Candidate, known: dict[tuple[object, ...], _Known]) -> float:
    """Seconds of a step that was never measured."""
    off = [
        each.way.seconds / predicted[1].total_seconds
        for each in known.values()
        if (predicted := _predicted(search, each.way)) is not None
    ]
    return chosen.seconds * median(off) if off else 0.0


def _predicted(search: Search, way: MeasuredWay) -> tuple[Profile, StepTime] | None:
    """What is predicted for a way; None where the model cannot take it any more."""
    accumulates = way.batch.accumulation_steps > 1 or search.request.lengths is not None
    try:
        profile = search.source.profile(way.strategy, accumulates)
    except RequestError:
        return None
    return profile, search.evaluation.time(profile, way.strategy, way.batch)


def _candidate(search: Search, way: MeasuredWay) -> Candidate | None:
    """The way as one that was weighed; None where it does not fit."""
    predicted, fitting = _predicted(search, way), search.evaluation.fitting
    if predicted is None:
        return None
    profile, time = predicted
    best = search.evaluation.evaluate(way.strategy)
    memory = min(
        (profile.memory(micro, device) for device, micro in fitting.loads(way.batch)),
        key=lambda memory: memory.headroom_bytes,
    )
    if best.batch is None or not memory.fits or fitting.host_shortfall_bytes(memory) > 0:
        return None
    return replace(best, micro_batch=way.batch.largest_micro_batch, batch=way.batch, memory=memory, time=time)


def _taken(each: _Known, own: _Known | None, expected: float, chosen: Candidate) -> str:
    """Why a measured way is taken in place of `chosen`."""
    seconds = f"{format_seconds(each.way.seconds)} a step"
    if own is not None:
        gain = 100 * (1 - each.way.seconds / expected)
        return (
            f"measured fastest on this machine on {each.date}: {seconds}, {gain:.0f} % less than the way predicted "
            f"fastest ({chosen.strategy}, micro-batch {chosen.micro_batch}: {format_seconds(expected)})"
        )
    return (
        f"measured on this machine on {each.date}: {seconds}; the way predicted fastest ({chosen.strategy}, "
        f"micro-batch {chosen.micro_batch}) was not measured, and takes {format_seconds(expected)} if its prediction "
        "is off as those of what was"
    )


def _confirmed(own: _Known, num_others: int) -> str:
    others = f", and none of {plural(num_others, 'other way')} was faster" if num_others else ""
    return f"measured on this machine on {own.date}: {format_seconds(own.way.seconds)} a step{others}"
