"""A run as its folder records it: settings, plan, measurements and events."""

from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from frugal.config.request import Request
from frugal.config.run_settings import METRICS, earlier_settings
from frugal.errors import FrugalError, RequestError, refuse
from frugal.planning.plan import Plan
from frugal.report.records import History, PhaseRecord, RunRecord, read_history
from frugal.units import plural

PLAN = "plan.json"
RUNNING, UNKNOWN = "running", "unknown"
"""States of a run without a record of its end."""

UNITS = {"sequence-classification": "samples", "": "targets"}
"""The unit of losses and speeds, by task; other tasks: target tokens."""

_NOT_SETTINGS = ("data", "out", "lengths")


@dataclass(frozen=True, kw_only=True)
class RunEvent:
    """An event of a run after `step` steps (a recovery: in step `step`). `seconds`: since its first start."""

    kind: str
    step: int
    seconds: float | None
    words: str


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """A run. `plan` is its last plan, None where it cannot be read; `notes` say what is missing.

    `steps` has the record of each step; `starts` is empty in runs of earlier versions; `evaluations` are on the
    validation samples; `recoveries` from out of memory. `settings`: the user's, by name. `is_locked`: a process holds
    the folder, as a run does.
    """

    name: str
    history: History
    steps: tuple[RunRecord, ...]
    starts: list[RunRecord]
    evaluations: list[RunRecord]
    recoveries: list[RunRecord]
    plan: Plan | None
    settings: dict[str, Any]
    notes: tuple[str, ...]
    is_locked: bool = False

    @property
    def last_step(self) -> int:
        """The number of the last step."""
        return self.steps[-1].step if self.steps else 0

    @property
    def total_steps(self) -> int | None:
        """The steps that the run is to have."""
        return self.starts[-1].total_steps if self.starts else self.settings.get("steps")

    @cached_property
    def state(self) -> str:
        """`done`, `stopped`, `interrupted`, `failed`, `lost`, `running`, or `unknown`: nothing recorded its end."""
        last = self.history.of("start", "end")[-1:]
        if last and last[0].event == "end":
            return last[0].status
        return RUNNING if self.is_locked else UNKNOWN

    @property
    def state_in_words(self) -> str:
        """The state as a sentence: how the run ended, and after which step."""
        after = f"after step {self.last_step:,}" + (f" of {self.total_steps:,}" if self.total_steps else "")
        if self.state == UNKNOWN:
            return f"{after}; no end was recorded: it was killed, or is of an earlier version"
        if self.state == RUNNING:
            return f"still running {after}"
        why = self.history.of("end")[-1].why
        state = "failed" if self.state == "lost" else self.state
        return f"{state} {after}: {why}" if why and state != "done" else f"{state} {after}"

    @property
    def unit(self) -> str:
        """The unit that losses are means over and speeds count."""
        task = self.starts[-1].task if self.starts else "" if self.plan is None else self.plan.model.task
        return UNITS.get(task, "target tokens" if task in ("causal-lm", "masked-lm", "seq2seq") else "targets")

    @property
    def best_evaluation(self) -> RunRecord | None:
        """The evaluation with the smallest loss."""
        finite = [each for each in self.evaluations if each.loss is not None]
        return min(finite, key=lambda each: each.loss or 0.0, default=None)

    @cached_property
    def speed(self) -> float | None:
        """The median of `unit` a second; the first steps of a start are slower."""
        speeds = [each.tokens_per_second for each in self.steps if each.tokens_per_second]
        return median(speeds) if speeds else None

    @property
    def padding_share(self) -> float | None:
        """The share of padding in all positions of the steps that recorded it."""
        known = [each for each in self.steps if each.positions and each.tokens is not None]
        positions = sum(each.positions or 0 for each in known)
        return 1 - sum(each.tokens or 0 for each in known) / positions if positions else None

    @property
    def memory(self) -> RunRecord | None:
        """The latest record of planned and measured memory, over the first two steps of a start."""
        return self.history.of("memory")[-1] if self.history.of("memory") else None

    @cached_property
    def phases(self) -> dict[str, PhaseRecord]:
        """The memory of each phase, in the order of a step; evaluation and checkpoint where measured."""
        record = self.memory
        phases = dict(record.phases) if record is not None else {}
        if not phases and self.plan is not None:
            phases = {name: PhaseRecord(planned_bytes=size) for name, size in self.plan.memory.phase_peaks.items()}
        for event in ("evaluation", "checkpoint"):
            measured = [each for each in self.history.of(event) if each.phase_bytes is not None]
            if measured:
                fullest = max(measured, key=lambda each: each.phase_bytes or 0)
                reserved = max((each.phase_reserved_bytes or 0 for each in measured), default=0) or None
                phases[event] = PhaseRecord(measured_bytes=fullest.phase_bytes, reserved_bytes=reserved)
        return phases

    @property
    def planned_bytes(self) -> int | None:
        """The planned peak of live tensors; None where the plan has none."""
        if self.memory is not None and self.memory.planned_bytes:
            return self.memory.planned_bytes
        return self.plan.memory.live_bytes or None if self.plan is not None else None

    @property
    def restarts(self) -> list[RunRecord]:
        """The starts after the first."""
        return self.starts[1:]

    @cached_property
    def _times(self) -> list[float]:
        return [each.time for each in (*self.history.others, *self.steps) if each.time]

    @cached_property
    def begin(self) -> float | None:
        """The time of the first record, Unix seconds."""
        return min(self._times, default=None)

    @property
    def seconds(self) -> float | None:
        """The time from the first record to the last, with idle time."""
        return max(self._times) - min(self._times) if self._times else None

    def since_begin(self, record: RunRecord) -> float | None:
        """Return the seconds from the first record to this one."""
        return None if record.time is None or self.begin is None else record.time - self.begin

    @cached_property
    def events(self) -> list[RunEvent]:
        """The events in order of time."""
        num_starts = 0
        events: list[RunEvent] = []
        for record in sorted(self.history.others, key=lambda record: record.time or 0.0):
            num_starts += record.event == "start"
            if record.event not in _WORDS:
                continue
            kind = record.status if record.event == "end" else record.event
            if record.event == "start" and num_starts > 1:
                kind = "restart"
            elif record.event == "recovery" and record.phase is None:
                kind = "note"
            if events and events[-1].kind == "lost":  # what came of it is known better
                events.pop()
            words, seconds = _WORDS[record.event](record), self.since_begin(record)
            events.append(RunEvent(kind=kind, step=record.step, seconds=seconds, words=words))
        return events

    @cached_property
    def versions(self) -> dict[str, str]:
        """The versions installed at the last start; for runs of earlier versions those of the plan."""
        if self.starts:
            return self.starts[-1].versions
        return {} if self.plan is None else self.plan.all_versions

    @cached_property
    def facts(self) -> dict[str, str]:
        """The settings and decisions as text by name, without those that nobody set."""
        told: dict[str, Any] = {}
        if self.plan is not None:
            request = self.plan.request
            names = Counter(device.name for device in self.plan.cluster.devices)
            told = {f.name: getattr(request, f.name) for f in fields(Request) if f.name not in _NOT_SETTINGS} | {
                "devices": ", ".join(f"{number} x {name}" for name, number in names.items()),
                "learning_rate": request.scaled_learning_rate,
                "strategy": str(self.plan.strategy),
                "batch": self.plan.arithmetic,
            }
        told |= {name: value for name, value in self.settings.items() if name != "out"}
        return {name: _as_text(value) for name, value in told.items() if value not in (None, (), [])}


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _start_words(record: RunRecord) -> str:
    devices = ", ".join(f"{number} x {name}" for name, number in record.devices.items())
    words = f"resumes after step {record.step:,}" if record.resumed else "starts"
    words += f" on {devices}" if devices else ""
    if record.dropped_steps:
        words += f"; {plural(record.dropped_steps, 'step')} after it are done again"
    return "; ".join([words, *record.changes])


_WORDS = {
    "start": _start_words,
    "recovery": lambda record: record.message + (f" (in {record.phase})" if record.phase else ""),
    "left_out": lambda record: f"nothing was updated: {record.why}",
    "end": lambda record: record.why,
}


def read_run(folder: Path) -> RecordedRun:
    """Read the run in `folder`.

    Raises:
        RequestError: there is no such folder, or it is not a run's.
    """
    refuse(
        (
            not folder.is_dir(),
            f"there is no run in {folder}",
            "it is a file" if folder.exists() else "there is no such folder",
            "give the --out of a run",
        ),
        (
            not (folder / METRICS).exists(),
            f"{folder} is not a run's folder",
            f"it has no {METRICS}",
            "give the --out of a run that has begun to train",
        ),
    )
    history = read_history(folder)
    plan, settings, notes = None, {}, []
    try:
        plan = Plan.read(folder / PLAN)
    except (FrugalError, msgspec.DecodeError) as error:
        what = error.what if isinstance(error, FrugalError) else "it cannot be read"
        notes.append(f"{PLAN}: {what}; what was planned is missing")
    try:
        settings = earlier_settings(folder)
    except RequestError as error:
        notes.append(str(error).replace("\n  ", ", "))
    if history.num_broken:
        notes.append(f"{plural(history.num_broken, 'line')} of {METRICS} cannot be read, and are left out")
    if history.num_left_out:
        notes.append(
            f"{METRICS} has {history.num_left_out:,} records more than are kept in memory: sums, medians and curves "
            "are of steps evenly spread"
        )
    if not history.of("start"):
        notes.append("the run is of a version that did not record starts, ends, recoveries and padding")
    if history.steps and not history.of("memory"):
        notes.append("memory was not measured yet: it is after the second step")
    return RecordedRun(
        name=folder.resolve().name, history=history, steps=history.steps, starts=history.of("start"),
        evaluations=history.of("evaluation"),
        recoveries=[each for each in history.of("recovery") if each.phase is not None],
        plan=plan, settings=settings, notes=tuple(notes), is_locked=_is_locked(folder),
    )  # fmt: skip


def _is_locked(folder: Path) -> bool:
    """Return whether a process of this host holds the folder. Trying to lock it could stop a start."""
    try:
        inode = folder.stat().st_ino
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(f":{inode} " in line and " FLOCK " in line and "->" not in line for line in locks)
