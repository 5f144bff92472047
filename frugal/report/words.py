"""Numbers and events of runs as text, for the page and for the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from frugal.errors import RequestError
from frugal.planning.memory.timeline import BACKWARD, FORWARD
from frugal.report.run import RecordedRun, RunEvent
from frugal.units import format_bytes, format_seconds, plural

NONE = "-"
"""For a number that there is not."""


def number(value: float | None) -> str:
    """Format a loss."""
    return NONE if value is None else f"{value:.4f}"


def small(value: float | None) -> str:
    """Format a learning rate."""
    return NONE if value is None else f"{value:.2e}"


def count(value: float | None) -> str:
    """Format a speed, or steps."""
    return NONE if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format a share."""
    return NONE if value is None else f"{100 * value:.1f} %"


def size(value: int | None) -> str:
    """Format bytes."""
    return NONE if value is None else format_bytes(value)


def duration(value: float | None) -> str:
    """Format seconds."""
    return NONE if value is None else format_seconds(value)


FORMATS: dict[str, Callable[[float], str]] = {
    "number": number, "small": small, "count": count, "percent": percent, "seconds": duration,
}  # fmt: skip
"""By the names that the page's script knows."""


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """The memory of one phase, bytes. `is_of_less`: it was measured with smaller micro-batches than were planned."""

    name: str
    planned: int | None
    measured: int | None
    reserved: int | None
    is_of_less: bool = False

    @property
    def largest(self) -> int:
        """The larger of both, for the scale of bars; at least 1."""
        return max(self.planned or 0, self.measured or 0, 1)

    @property
    def difference(self) -> str:
        """Measured against planned in percent, where both are of the same work, or more was measured."""
        if not self.planned or self.measured is None or (self.is_of_less and self.measured < self.planned):
            return NONE
        return f"{100 * (self.measured / self.planned - 1):+.1f} %"


def phase_rows(run: RecordedRun) -> list[PhaseRow]:
    """Return the memory of each phase, and of the whole run."""
    is_of_less = run.memory is not None and run.memory.is_of_less
    rows = [
        PhaseRow(
            name=name, planned=phase.planned_bytes, measured=phase.measured_bytes, reserved=phase.reserved_bytes,
            is_of_less=is_of_less and name in (FORWARD, BACKWARD),
        )
        for name, phase in run.phases.items()
    ]  # fmt: skip
    reserved = max((step.reserved_bytes or 0 for step in run.steps[-1:]), default=0) or None
    whole = PhaseRow(
        name="whole run", planned=run.planned_bytes, measured=run.measured_bytes, reserved=reserved,
        is_of_less=is_of_less,
    )  # fmt: skip
    return [*rows, whole] if rows or whole.planned or whole.measured else []


def has_reserved(run: RecordedRun) -> bool:
    """Return whether an allocator's reserved memory was measured."""
    return any(row.reserved is not None for row in phase_rows(run))


def of_which_steps(run: RecordedRun) -> str:
    """Describe the micro-batches that memory was planned for and measured with."""
    record = run.memory
    if record is None or record.planned_micro_batch is None or record.largest_micro_batch is None:
        return ""
    planned, largest = record.planned_micro_batch, record.largest_micro_batch
    said = f"planned for micro-batches of {planned[0]} x {planned[1]} tokens"
    if record.is_of_less:
        said += f", measured with {largest[0]} x {largest[1]}: what depends on them is not compared"
    return said


def notes(runs: Sequence[RecordedRun]) -> list[str]:
    """Return notes on missing records and on numbers that are not comparable."""
    told = [note if len(runs) == 1 else f"{run.name}: {note}" for run in runs for note in run.notes]
    if not speaks_one_unit(runs):
        units = ", ".join(f"{run.name} in {run.unit}" for run in runs)
        told.append(f"losses and speeds are of different units ({units}): they are drawn apart, and not to be compared")
    return told


def facts(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Return the main numbers: name, number and remark."""
    best, phases = run.best_evaluation, phase_rows(run)
    first = run.steps[0].loss if run.steps else None
    whole = phases[-1] if phases else None
    return [
        ("loss", number(run.final_loss), f"from {number(first)}, a mean over {run.unit}"),
        (
            "best validation loss", number(best.loss if best else None),
            f"after step {best.step:,}" if best else "never evaluated",
        ),
        ("speed", count(run.speed), f"{run.unit} a second, median"),
        ("memory", size(whole.measured if whole else None), _planned(whole)),
        ("padding", percent(run.padding_share), "of all positions"),
        ("time", duration(run.seconds), _interruptions(run)),
    ]  # fmt: skip


def _planned(whole: PhaseRow | None) -> str:
    if whole is None or whole.planned is None:
        return "no prediction in the plan"
    if whole.is_of_less:
        return f"planned {size(whole.planned)}, for larger micro-batches"
    return f"planned {size(whole.planned)} ({whole.difference})" if whole.measured else f"planned {size(whole.planned)}"


def _interruptions(run: RecordedRun) -> str:
    recoveries = f"{len(run.recoveries)} {'recovery' if len(run.recoveries) == 1 else 'recoveries'}"
    return f"{plural(len(run.restarts), 'restart')}, {recoveries}" if run.starts else "restarts were not recorded"


def comparison(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return rows of the main numbers, one column a run."""
    rows: list[list[str]] = [["state", *(run.state for run in runs)]]
    rows.append(["steps", *(f"{run.last_step:,}" for run in runs)])
    for each in zip(*map(facts, runs), strict=True):
        rows.append([each[0][0], *(value for _, value, _ in each)])
    rows.insert(6, ["memory planned", *(size(run.planned_bytes) for run in runs)])
    rows += [["loss and speed per", *(run.unit for run in runs)]] if not speaks_one_unit(runs) else []
    rows.append(["restarts", *(str(len(run.restarts)) for run in runs)])
    rows.append(["recoveries", *(str(len(run.recoveries)) for run in runs)])
    return rows


def when(event: RunEvent) -> str:
    """Format the time of an event since the first start."""
    return NONE if event.seconds is None else format_seconds(event.seconds)


_MARKS = {
    "restart": "restart",
    "recovery": "out of memory",
    "left_out": "left out",
    "tuned": "tuned",
    "failed": "failed",
    "interrupted": "interrupted",
}
_DASHES = {
    "restart": [6, 3],
    "recovery": [2, 3],
    "left_out": [1, 4],
    "tuned": [4, 2],
    "failed": [],
    "interrupted": [],
}


def marks(run: RecordedRun, *, over_time: bool = False) -> list[dict[str, Any]]:
    """Return the vertical lines of a chart: events of the run."""
    return [
        {"x": event.seconds if over_time else event.step, "label": _MARKS[event.kind], "dash": _DASHES[event.kind]}
        for event in run.events
        if event.kind in _MARKS
        and (event.seconds is not None if over_time else event.kind not in ("failed", "interrupted"))
    ]


MOST_RUNS = 9
"""As many as a chart has colours and dashes for."""


def check(runs: Sequence[RecordedRun]) -> None:
    """Refuse more runs than one page can compare.

    Raises:
        RequestError: there are too many.
    """
    if len(runs) > MOST_RUNS:
        raise RequestError(
            f"{len(runs)} runs are too many for one page",
            because=f"a chart has colours and dashes for {MOST_RUNS} of them",
            hint="compare fewer at a time",
        )


def speaks_one_unit(runs: Sequence[RecordedRun]) -> bool:
    """Return whether losses and speeds of all runs are of the same unit."""
    return len({run.unit for run in runs}) == 1


def renamed(names: Sequence[str], longer: Sequence[str]) -> list[str]:
    """Return the names, longer ones where two are the same."""
    return [long if names.count(name) > 1 else name for name, long in zip(names, longer, strict=True)]


def differing(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return rows of settings and versions that are not the same in all runs: the name, and its value in each."""
    return [row for row in everything(runs) if len(set(row[1:])) > 1]


def everything(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return rows of all settings and versions: the name, and its value in each run."""
    sources = [
        {
            **run.facts,
            **(_decided(run) if len(runs) > 1 else {}),
            **{f"version of {name}": value for name, value in run.versions.items()},
        }
        for run in runs
    ]
    names = list(dict.fromkeys(name for facts in sources for name in facts))
    return [[name.replace("_", " "), *(facts.get(name, "-") for facts in sources)] for name in names]


def _decided(run: RecordedRun) -> dict[str, str]:
    """Return each choice of the planned strategy by name."""
    if run.plan is None:
        return {}
    strategy = run.plan.strategy
    decided = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    decided["activation_checkpointing"] = strategy.checkpointing  # with its layers
    return {f"planned {name}": str(value) for name, value in decided.items() if name != "layer_modes"}
