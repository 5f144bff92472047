"""The record `memory` of a run's `metrics.jsonl`, for whoever looks at the run from outside. No torch here."""

import math
from contextlib import suppress
from pathlib import Path

import msgspec

from frugal import files
from frugal.config.run_settings import METRICS

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
    made, times = None, []
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        for line in files.read_regular(folder / METRICS).splitlines():
            record = msgspec.json.decode(line)
            times.append(record["time"])
            if record["event"] == "memory":
                made = msgspec.convert(record, MemoryRecord)
    if made is not None:
        made.run_seconds = max(times) - min(times)
    return made
