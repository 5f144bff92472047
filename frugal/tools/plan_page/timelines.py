"""Live bytes over an optimizer step as a page draws them: down-sampled, with the peak of each phase."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.memory.profile import RankMemory
from frugal.planning.memory.timeline import CATEGORIES, OPTIMIZER_STEP, Timeline
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy

MOST_POINTS, FEW_POINTS = 400, 160
"""Points of the plan's picture, and of another strategy's; at least one of each phase."""

NEAR = 40
"""Events before and after the peak that the zoom shows, one by one."""

STEPS_OF_AN_AXIS = 1 << 12
"""Bytes are rounded to so many parts of the peak, finer than a pixel; the peak itself and the tables are exact."""

PLACES_BACK = 400
"""Events before the peak among which a module is looked for. Backward runs in none."""


def chosen_micro_batches(plan: Plan) -> Iterator[tuple[Strategy, int]]:
    """Yield every strategy of the plan with the micro-batch it was weighed at, the chosen one first."""
    own = plan.memory.device_in(plan.cluster)
    sizes = zip(plan.cluster.devices, plan.batch.cap_of_rank, strict=True)
    yield plan.strategy, max(size for device, size in sizes if device == own)
    for each in plan.rejected:
        yield each.strategy, max(1, each.micro_batch)


def picture(
    ranks: Sequence[RankMemory], memory: MemoryBreakdown, micro_batch: int, most: int = MOST_POINTS
) -> dict[str, Any]:
    """Return the timeline of the fullest of `ranks`, whose peak is `memory`, in plain types.

    `step` and `zoom`, which has every event near the peak: `x`: events. `live`: by category, in units of `unit` bytes;
    one number where it never changes. `modules`: of each point, an index into `names`. `second`: the first point of
    the second optimizer step, which is like all later ones; 0 where the peak is before it. `peak`: bytes of live
    tensors, the event, operator, phase and module. `parts` and `phases`: bytes by category, and live at the fullest
    moment of each phase.
    """
    timeline = max(ranks, key=lambda each: each.timeline.peak_bytes(micro_batch) == memory.live_bytes).timeline
    changes = timeline.changes(micro_batch)
    total = changes.cumsum()
    categories = np.asarray(timeline.categories)[np.asarray(timeline.events)]
    of_categories = {
        name: np.where(categories == number, changes, 0).cumsum()
        for number, name in enumerate(CATEGORIES)
        if (categories == number).any()
    }
    unit = 1 << max(0, memory.live_bytes.bit_length() - STEPS_OF_AN_AXIS.bit_length() + 1)
    events = _fullest_moments(timeline, total, most)
    peak = next(e for e in events if total[e] == memory.live_bytes and timeline.phase_of(e) == memory.phase)
    near = list(range(max(0, peak - NEAR), min(len(total), peak + NEAR + 1)))
    names: dict[str, int] = {}

    def drawn(events: list[int]) -> dict[str, Any]:
        live = {name: (so_far[events] // unit).tolist() for name, so_far in of_categories.items()}
        modules = [timeline.names[timeline.modules[timeline.events[event]]] for event in events]
        return {
            "x": events,
            "live": {k: v if len(set(v)) > 1 else v[0] for k, v in live.items() if any(v)},
            "modules": [names.setdefault(name, len(names)) for name in modules],
        }

    second = _second_step(timeline)
    return {
        "unit": unit,
        "step": drawn(events),
        "zoom": drawn(near),
        "names": list(names),
        "marks": [[name, first] for name, first in timeline.phases],
        "second": next((i for i, event in enumerate(events) if event >= second), 0) if peak >= second else 0,
        "peak": {
            "event": peak,
            "bytes": memory.live_bytes,
            "operator": memory.operator.removeprefix("aten.").removesuffix(".default"),
            "phase": memory.phase,
            "where": _where(timeline, peak),
        },
        "parts": {name: getattr(memory, name) for name in memory.CATEGORIES},
        "phases": timeline.phase_peaks(micro_batch),
    }


def _fullest_moments(timeline: Timeline, total: "np.ndarray[Any, Any]", most: int) -> list[int]:
    """Return events: of each stretch of a phase the fullest one."""
    chosen = []
    for _, events in timeline.phase_ranges:
        if not events:
            continue
        share = round(most * len(events) / len(total))
        for stretch in np.array_split(np.arange(events.start, events.stop), min(max(1, share), len(events))):
            chosen.append(int(stretch[total[stretch].argmax()]))
    return chosen


def _second_step(timeline: Timeline) -> int:
    """Return the first event after the first optimizer step; 0 where there is none."""
    ends = [i for i, (name, _) in enumerate(timeline.phases) if name == OPTIMIZER_STEP]
    return timeline.phases[ends[0] + 1][1] if ends and ends[0] + 1 < len(timeline.phases) else 0


def _where(timeline: Timeline, event: int) -> str:
    """Return the module running at an event, or that of the last tensor before it that was made or freed in one."""
    for place in range(event, max(0, event - PLACES_BACK) - 1, -1):
        name = timeline.names[timeline.modules[timeline.events[place]]]
        if name:
            return name if place == event else f"near {name}"
    return ""
