"""Each rank's own log file, `logs/rank_3.log` in the run's folder; the console shows rank 0's output alone.

What other ranks print, down to their C++ libraries, goes to their files. Rank 0's file has its log lines, too, without
the progress bar of a terminal, and what it writes to stderr. DeepSpeed's `--enable_each_rank_log` would take rank 0's
output away from the console.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

_file: TextIO | None = None
_console: int | None = None  # a copy of stderr from before it was redirected to the file


def path(folder: Path, rank: int) -> Path:
    """The log file of a rank of the run in `folder`."""
    return folder / "logs" / f"rank_{rank}.log"


def redirect(folder: Path, rank: int) -> None:
    """Send this rank's output to its file, which is appended to. If it cannot be opened, all stays on the console."""
    global _file, _console
    own = path(folder, rank)
    with suppress(OSError):
        own.parent.mkdir(parents=True, exist_ok=True)
        _file = own.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
        if rank == 0:
            sys.stderr = _Tee(sys.stderr, _file)
        else:
            _console = os.dup(2)
            os.dup2(_file.fileno(), 1)
            os.dup2(_file.fileno(), 2)


def file_name() -> str | None:
    """This rank's log file; None if it has none."""
    return None if _file is None else _file.name


def to_file(text: str) -> None:
    """A line for this rank's log file alone."""
    if _file is not None:
        with suppress(OSError):  # a full disk: the run itself reports it where it matters
            _file.write(text + "\n")


def to_console(text: str) -> None:
    """Lines for people: to the console's stderr, whatever the rank, and to the log file."""
    with suppress(OSError):  # on other ranks than 0 this is the file, and its disk may be full
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    if _console is not None:
        with suppress(OSError):  # a console that has gone
            os.write(_console, (text + "\n").encode(errors="backslashreplace"))


class _Tee:
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
