"""The records of a run's `metrics.jsonl`, as `frugal.engine.reports.metrics` writes them.

A line that cannot be read, half written by a killed run or of a later version, is counted and left out.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import msgspec

from frugal import files
from frugal.config.run_settings import METRICS
from frugal.errors import RequestError, failure


class PhaseRecord(msgspec.Struct, kw_only=True):
    """The memory of one phase, bytes: planned, measured, and reserved by the allocator on a GPU."""

    planned_bytes: int | None = None
    measured_bytes: int | None = None
    reserved_bytes: int | None = None


class RunRecord(msgspec.Struct, kw_only=True):
    """A line of the file, of any event; a field is None where the event or an older version has none."""

    event: str
    step: int
    time: float | None = None
    # step, evaluation
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    tokens: int | None = None
    positions: int | None = None
    memory_bytes: int | None = None
    reserved_bytes: int | None = None
    # evaluation, checkpoint
    seconds: float | None = None
    phase_bytes: int | None = None
    phase_reserved_bytes: int | None = None
    # start
    total_steps: int | None = None
    dropped_steps: int = 0
    resumed: bool | None = None
    task: str = ""
    strategy: str = ""
    devices: dict[str, int] = {}
    versions: dict[str, str] = {}
    changes: list[str] = []
    # recovery, left_out, end
    message: str = ""
    phase: str | None = None
    why: str = ""
    status: str = ""
    # memory
    planned_bytes: int | None = None
    measured_bytes: int | None = None
    planned_micro_batch: tuple[int, int] | None = None
    largest_micro_batch: tuple[int, int] | None = None
    phases: dict[str, PhaseRecord] = {}

    @property
    def padding_share(self) -> float | None:
        """The part of a step's positions that held no token."""
        return None if self.tokens is None or not self.positions else 1 - self.tokens / self.positions

    @property
    def is_of_less(self) -> bool:
        """True if memory was measured with fewer tokens a micro-batch than planned."""
        return has_fewer_tokens(self.largest_micro_batch, self.planned_micro_batch)


def has_fewer_tokens(largest: tuple[int, int] | None, planned: tuple[int, int] | None) -> bool:
    """Return whether the largest micro-batch of a run is known to have fewer tokens than the plan's.

    Both are (samples, tokens of each). Padding to the longest sample rarely fills the last 2 %.
    """
    return planned is not None and largest is not None and prod(largest) < 0.98 * prod(planned)


@dataclass(frozen=True, kw_only=True)
class History:
    """The records of a run. `steps` has one of each step, in order; the others are in the order of the file.

    `num_broken`: lines that could not be read, without a last one that is not complete. `num_left_out`: records beyond
    `MOST_RECORDS` of a kind, of which evenly spread steps and the newest others are kept.
    """

    steps: tuple[RunRecord, ...]
    others: tuple[RunRecord, ...]
    num_broken: int = 0
    num_left_out: int = 0

    def of(self, *events: str) -> list[RunRecord]:
        """Return the records of events other than `step`."""
        return [each for each in self.others if each.event in events]


MOST_RECORDS = 100_000
"""The most steps, and the most other records, kept in memory: a file of records may have any size."""


def read_history(folder: Path) -> History:
    """Read the records of the run in `folder`.

    Raises:
        RequestError: there is no such file, it cannot be read, or no line of it is a record.
    """
    path = folder / METRICS
    steps: dict[int, RunRecord] = {}
    others: deque[RunRecord] = deque(maxlen=MOST_RECORDS)
    last: RunRecord | None = None
    num_broken = num_steps = num_others = 0  # in the file
    stride = 1
    with failure(f"cannot read the records of {folder}, {path.name}", OSError, hint="is it a run's folder?"):
        for record in _decoded(path):
            if record is None:
                num_broken += 1
            elif record.event != "step":
                num_others += 1
                others.append(record)
            else:
                num_steps += 1
                last = record if last is None or record.step >= last.step else last
                if (record.step - 1) % stride == 0:
                    steps[record.step] = record
                while len(steps) > MOST_RECORDS:
                    stride *= 2
                    steps = {step: kept for step, kept in steps.items() if (step - 1) % stride == 0}
    if last is not None:
        steps[last.step] = last
    elif not others and path.stat().st_size:
        raise RequestError(f"no line of {path} is a record of a run", hint="see `frugal report --help`")
    num_left_out = num_others - len(others) + (num_steps - len(steps) if stride > 1 else 0)
    return History(
        steps=tuple(steps[step] for step in sorted(steps)), others=tuple(others), num_broken=num_broken,
        num_left_out=num_left_out,
    )  # fmt: skip


def _decoded(path: Path) -> Iterator[RunRecord | None]:
    """Yield the record of each line; None for one that is no record. A last line without an end is left out."""
    decoder = msgspec.json.Decoder(RunRecord)
    cut = False
    for line in files.read_lines(path):
        if cut:
            yield None
        cut = not line.endswith(b"\n")
        if cut or not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield None
