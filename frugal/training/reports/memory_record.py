"""The record `memory` of a run's `metrics.jsonl`, for whoever looks at the run from outside. No torch here."""

import math
from contextlib import suppress
from pathlib import Path

import msgspec

from frugal.errors import RequestError
from frugal.report.records import read_history

FULL = 0.98
"""Of a planned micro-batch's tokens: padding to the longest sample rarely fills the last ones."""


class MemoryRecord(msgspec.Struct, kw_only=True):
    """What the record `memory` says, in bytes, and samples and tokens; `run_seconds`: of the whole run so far."""

    measured_bytes: int
    planned_micro_batch: tuple[int, int] | None = None
    largest_micro_batch: tuple[int, int] | None = None
    run_seconds: float = 0.0

    @property
    def is_of_less(self) -> bool:
        """Whether the largest micro-batch is known to have fewer tokens than the plan's."""
        return (
            self.planned_micro_batch is not None
            and self.largest_micro_batch is not None
            and math.prod(self.largest_micro_batch) < FULL * math.prod(self.planned_micro_batch)
        )


def memory_record(folder: Path) -> MemoryRecord | None:
    """The one of the run in `folder`; None where it has none that can be read."""
    with suppress(RequestError):
        history = read_history(folder)
        records = [record for record in history.of("memory") if record.measured_bytes is not None]
        if records:
            times = [record.time for record in (*history.others, *history.steps) if record.time is not None]
            return MemoryRecord(
                measured_bytes=records[-1].measured_bytes or 0,
                planned_micro_batch=records[-1].planned_micro_batch,
                largest_micro_batch=records[-1].largest_micro_batch,
                run_seconds=max(times) - min(times) if times else 0.0,
            )
    return None
