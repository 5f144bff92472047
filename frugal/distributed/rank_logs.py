"""Each rank's own file, `logs/rank_3.log` in the run's folder; the console has rank 0's stream alone.

What other ranks print, down to their C++ libraries, goes to their files. Rank 0's file has its lines, too, without the
progress of a terminal, and what it writes to standard error. DeepSpeed's `--enable_each_rank_log` does not do: it takes
rank 0's stream away from the console.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_file: TextIO | None = None
_console: int | None = None  # what was standard error before it went to the file


def path(folder: Path, rank: int) -> Path:
    """Where a rank of the run in `folder` writes."""
    return folder / "logs" / f"rank_{rank}.log"


def keep(folder: Path, rank: int) -> None:
    """Begin this rank's file, behind what an earlier start of the run left there. A folder that cannot be written to
    is not this module's business: then all stays on the console."""
    global _file, _console
    own = path(folder, rank)
    with suppress(OSError):
        own.parent.mkdir(parents=True, exist_ok=True)
        _file = own.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        if rank == 0:
            sys.stderr = _Both(sys.stderr, _file)
        else:
            _console = os.dup(2)
            os.dup2(_file.fileno(), 1)
            os.dup2(_file.fileno(), 2)


def note(text: str) -> None:
    """A line for this rank's file alone."""
    if _file is not None:
        with suppress(OSError):  # a full disk: the run itself says so where it matters
            _file.write(text + "\n")


def say(text: str) -> None:
    """Lines for people: to the console's standard error, and to the file."""
    with suppress(OSError):  # on other ranks than 0 this is the file, and its disk may be full
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    if _console is not None:
        with suppress(OSError):  # a console that has gone
            os.write(_console, (text + "\n").encode(errors="backslashreplace"))


def where() -> str | None:
    """This rank's file, if it has one."""
    return None if _file is None else _file.name


class _Both:
    """Writes to a stream and to a file; is the stream in all else."""

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self._stream = stream
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
