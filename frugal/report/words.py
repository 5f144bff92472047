"""Numbers and events of runs as text, for the page and for the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from frugal.errors import refuse
from frugal.planning.memory.timeline import BACKWARD, FORWARD
from frugal.report.run import RecordedRun
from frugal.units import format_bytes, format_number, format_rate, format_seconds, plural

NONE = "-"
"""For a number that there is not."""


FORMATS: dict[str, Callable[[Any], str]] = {
    "number": format_number,
    "small": "{:.2e}".format,
    "count": format_rate,
    "percent": lambda share: f"{100 * share:.1f} %",
    "seconds": format_seconds,
    "bytes": format_bytes,
}
"""Formats of losses, learning rates, speeds and steps, shares, durations and sizes, by the names that the page's
script knows."""


def shown(value: float | None, kind: str) -> str:
    """Format a number by one of `FORMATS`; `NONE` where there is none."""
    return NONE if value is None else FORMATS[kind](value)


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    """The memory of one phase, bytes. `is_of_less`: it was measured with smaller micro-batches than were planned."""

    name: str
    planned: int | None
    measured: int | None
    reserved: int | None
    is_of_less: bool = False

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
    last = run.steps[-1] if run.steps else None
    peaks = [last.memory_bytes if last else None, run.memory.measured_bytes if run.memory else None]
    whole = PhaseRow(
        name="whole run", planned=run.planned_bytes, measured=max((each for each in peaks if each), default=None),
        reserved=last.reserved_bytes or None if last else None, is_of_less=is_of_less,
    )  # fmt: skip
    return [*rows, whole] if rows or whole.planned or whole.measured else []


def memory_columns(run: RecordedRun) -> tuple[list[str], list[list[str]]]:
    """Return the memory of each phase in columns, which have names, apart from the phases' own."""
    rows = phase_rows(run)
    has_reserved = any(row.reserved is not None for row in rows)  # an allocator's
    names = ["planned", "measured", "difference", *(["reserved"] if has_reserved else [])]
    sizes = [(shown(row.planned, "bytes"), shown(row.measured, "bytes"), row.difference) for row in rows]
    reserved = [[shown(row.reserved, "bytes")] if has_reserved else [] for row in rows]
    return names, [[*size, *more] for size, more in zip(sizes, reserved, strict=True)]


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
    first, last = (run.steps[0].loss, run.steps[-1].loss) if run.steps else (None, None)
    whole = phases[-1] if phases else None
    planned = "no prediction in the plan"
    if whole is not None and whole.planned is not None:
        compared = f" ({whole.difference})" if whole.measured else ""
        planned = f"planned {shown(whole.planned, 'bytes')}"
        planned += ", for larger micro-batches" if whole.is_of_less else compared
    recoveries = f"{len(run.recoveries)} {'recovery' if len(run.recoveries) == 1 else 'recoveries'}"
    interruptions = f"{plural(len(run.restarts), 'restart')}, {recoveries}"
    return [
        ("loss", shown(last, "number"), f"from {shown(first, 'number')}, a mean over {run.unit}"),
        (
            "best validation loss", shown(best.loss if best else None, "number"),
            f"after step {best.step:,}" if best else "never evaluated",
        ),
        ("speed", shown(run.speed, "count"), f"{run.unit} a second, median"),
        ("memory", shown(whole.measured if whole else None, "bytes"), planned),
        ("padding", shown(run.padding_share, "percent"), "of all positions"),
        ("time", shown(run.seconds, "seconds"), interruptions if run.starts else "restarts were not recorded"),
    ]  # fmt: skip


def comparison(runs: Sequence[RecordedRun]) -> list[list[str]]:
    """Return rows of the main numbers, one column a run."""
    rows = [
        ["state", *(run.state for run in runs)],
        ["steps", *(f"{run.last_step:,}" for run in runs)],
        *([each[0][0], *(value for _, value, _ in each)] for each in zip(*map(facts, runs), strict=True)),
    ]
    rows.insert(6, ["memory planned", *(shown(run.planned_bytes, "bytes") for run in runs)])
    rows += [["loss and speed per", *(run.unit for run in runs)]] if not speaks_one_unit(runs) else []
    return [
        *rows,
        ["restarts", *(str(len(run.restarts)) for run in runs)],
        ["recoveries", *(str(len(run.recoveries)) for run in runs)],
    ]


_MARKS: dict[str, tuple[str, list[int]]] = {
    "restart": ("restart", [6, 3]),
    "recovery": ("out of memory", [2, 3]),
    "left_out": ("left out", [1, 4]),
    "failed": ("failed", []),
    "interrupted": ("interrupted", []),
}
"""The events that charts mark, in words and in dashes."""


def marks(run: RecordedRun, *, over_time: bool = False) -> list[dict[str, Any]]:
    """Return the vertical lines of a chart: events of the run."""
    return [
        {"x": event.seconds if over_time else event.step, "label": _MARKS[event.kind][0], "dash": _MARKS[event.kind][1]}
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
    refuse(
        (
            len(runs) > MOST_RUNS,
            f"{len(runs)} runs are too many for one page",
            f"a chart has colours and dashes for {MOST_RUNS} of them",
            "compare fewer at a time",
        )
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
    sources = []
    for run in runs:
        facts = dict(run.facts)
        if run.plan is not None and len(runs) > 1:
            decided = asdict(run.plan.strategy) | {"activation_checkpointing": run.plan.strategy.checkpointing}
            facts |= {f"planned {name}": str(value) for name, value in decided.items() if name != "layer_modes"}
        sources.append(facts | {f"version of {name}": value for name, value in run.versions.items()})
    names = list(dict.fromkeys(name for facts in sources for name in facts))
    return [[name.replace("_", " "), *(facts.get(name, "-") for facts in sources)] for name in names]
