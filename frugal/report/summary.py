"""A run in a few lines for a terminal of 80 columns, and all of it for programs."""

from collections.abc import Sequence
from typing import Any

from frugal.planning.report import Block, Table
from frugal.report import words
from frugal.report.run import RecordedRun

MOST_EVENTS = 12
"""In the summary; the page has all."""

WIDEST = 28
"""Characters of a setting's value beside others."""


def summary(runs: Sequence[RecordedRun]) -> list[Block]:
    """Return a summary of the page."""
    blocks = _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)
    return [*blocks, [f"note   {note}" for note in words.notes(runs)]]


def _of_one(run: RecordedRun) -> list[Block]:
    facts = tuple((name, value, more) for name, value, more in words.facts(run))
    versions = ", ".join(f"{name} {value}" for name, value in run.versions.items())
    events = tuple(
        (words.when(event), event.kind.replace("_", " "), f"step {event.step:,}", event.words) for event in run.events
    )
    shown = (*events[: MOST_EVENTS - 1], events[-1]) if len(events) > MOST_EVENTS else events
    note = f"{len(events) - len(shown)} more are in the page" if len(events) > len(shown) else ""
    return [
        [
            f"{run.name}: {run.state_in_words}",
            *([] if run.plan is None else [str(run.plan.strategy), run.plan.arithmetic]),
        ],
        Table(title="in short", rows=facts),
        *([_memory(run)] if words.phase_rows(run) else []),
        *([Table(title="starts, tuning, restarts and recoveries", rows=shown, note=note)] if shown else []),
        *([[f"with   {versions}"]] if versions else []),
    ]


def _memory(run: RecordedRun) -> Block:
    """Return planned and measured memory by phase."""
    reserved = words.has_reserved(run)
    head = ("planned", "measured", "difference", *(["reserved"] if reserved else []), "phase")
    rows = [
        (
            words.size(row.planned), words.size(row.measured), row.difference,
            *([words.size(row.reserved)] if reserved else []), row.name,
        )
        for row in words.phase_rows(run)
    ]  # fmt: skip
    return Table(title="peak memory", rows=(head, *rows), has_head=True, note=words.of_which_steps(run))


def _of_several(runs: Sequence[RecordedRun]) -> list[Block]:
    head = (*(run.name for run in runs), "")
    rows = [(*row[1:], row[0]) for row in words.comparison(runs)]
    blocks: list[Block] = [Table(title=f"{len(runs)} runs", rows=(head, *rows), has_head=True)]
    different = [(*map(_short, row[1:]), row[0]) for row in words.differing(runs)]
    if not different:
        return [*blocks, ["no setting and no version differs"]]
    return [*blocks, Table(title="what differs", rows=(head, *different), has_head=True)]


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def as_data(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return all numbers for programs, as recorded, in bytes and seconds."""
    return {
        "runs": [_data(run) for run in runs],
        "differing": [{"name": row[0], "values": row[1:]} for row in words.differing(runs)] if len(runs) > 1 else [],
        "notes": words.notes(runs),
    }


def _data(run: RecordedRun) -> dict[str, Any]:
    best = run.best_evaluation
    return {
        "name": run.name,
        "state": run.state,
        "steps": run.last_step,
        "total_steps": run.total_steps,
        "unit": run.unit,
        "loss": run.final_loss,
        "best_validation_loss": None if best is None else best.loss,
        "best_validation_step": None if best is None else best.step,
        "units_per_second": run.speed,
        "padding_share": run.padding_share,
        "seconds": run.seconds,
        "memory": [
            {"phase": row.name, "planned_bytes": row.planned, "measured_bytes": row.measured,
             "reserved_bytes": row.reserved}
            for row in words.phase_rows(run)
        ],
        "restarts": len(run.restarts),
        "recoveries": len(run.recoveries),
        "events": [
            {"kind": each.kind, "step": each.step, "seconds": each.seconds, "words": each.words} for each in run.events
        ],
        "versions": run.versions,
        "plan_digest": None if run.plan is None else run.plan.digest,
        "settings": run.facts,
    }  # fmt: skip
