"""At the end of a run: its page, and the record of an end that the run could not write itself.

A rank that is killed writes nothing. Whoever started the ranks sees how they ended, and says so in their place. A page
that cannot be written is no failure of the run: `frugal report` makes it later.
"""

import time
from pathlib import Path

import msgspec

from frugal import files
from frugal.config.run_settings import METRICS
from frugal.errors import FrugalError, first_line
from frugal.report.page import page
from frugal.report.records import read_history
from frugal.report.run import read_run

PAGE = "report.html"
"""In the run's folder."""

INTERRUPTED = "interrupted"
"""Why a run ended that somebody stopped with Ctrl-C: it is no failure."""

_CLOCKS_SECONDS = 5.0
"""By which the clocks of two hosts may differ."""


def write_page(folder: Path) -> str | None:
    """Write the page of the run in `folder`; return why it could not be written, None if it was."""
    try:
        files.write_file(folder / PAGE, page([read_run(folder)]).encode(), durable=False)
    except Exception as error:  # whatever it is, the run is over and its model saved
        return error.what if isinstance(error, FrugalError) else first_line(error)
    return None


def note_end(folder: Path, since: float, why: str) -> None:
    """Record that the run in `folder` failed because of `why`, or was interrupted, and write its page.

    Nothing is done where no start was recorded after `since` (Unix seconds), or its end was: then it was another run,
    or it has said itself how it ended. A rank that lost another knows less.
    """
    try:
        history = read_history(folder)
        last = history.of("start", "end")[-1:]
        if not last or last[0].status not in ("", "lost") or (last[0].time or 0.0) < since - _CLOCKS_SECONDS:
            return
        step = history.steps[-1].step if history.steps else last[0].step
        status, why = (INTERRUPTED, "") if why == INTERRUPTED else ("failed", why)
        record = {"event": "end", "step": step, "status": status, "why": why, "time": round(time.time(), 3)}
        files.append_lines(folder / METRICS, msgspec.json.encode(record) + b"\n")
    except (OSError, FrugalError):  # the folder was moved or deleted, or its disk is full: there is nothing to tell it
        return
    write_page(folder)
