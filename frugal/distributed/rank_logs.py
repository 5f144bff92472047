"""Each rank's own log file, `logs/rank_3.log` in the run's folder; the console shows rank 0's output alone.

What other ranks print, down to their C++ libraries, goes to their files. Rank 0's file has its log lines, too, without
the progress bar of a terminal, and what it writes to stderr. DeepSpeed's `--enable_each_rank_log` would take rank 0's
output away from the console.

A console that is gone (its terminal closed, its reader left, its disk full) ends no run: what is printed from then on
is discarded, from C++, too, and the log file notes it.
"""

import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from frugal import files

LOST = "FRUGAL_CONSOLE_LOST"
"""In the environment of ranks: what their command, or a rank itself, has to say of a console that is gone."""

_file: TextIO | None = None
_console: int | None = None  # a copy of stderr from before it was redirected to the file
lost_console: dict[str, OSError] = {}
_losing = threading.Lock()


def path(folder: Path, rank: int) -> Path:
    """Return the log file of a rank of the run in `folder`."""
    return folder / "logs" / f"rank_{rank}.log"


def guard_console() -> None:
    """Have a standard stream that cannot be written to raise nothing, and replace one that is closed by /dev/null."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:  # the next file that is opened would be taken for it
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(descriptor, "r" if name == "stdin" else "w"))
    for name, in_words in (("stdout", "standard output"), ("stderr", "standard error")):
        if not isinstance(getattr(sys, name), _Guarded):
            setattr(sys, name, _Guarded(getattr(sys, name), in_words))


def redirect(folder: Path, rank: int) -> None:
    """Send this rank's output to its file, which is appended to. If it cannot be opened, all stays on the console."""
    global _file, _console
    guard_console()
    own = path(folder, rank)
    with suppress(OSError):
        files.refuse_foreign_link(own.parent)
        own.parent.mkdir(parents=True, exist_ok=True)
        _file = open(  # noqa: SIM115 - stays open; Path has no opener
            own, "a", 1, "utf-8", "backslashreplace", opener=lambda path, _flags: files.append(Path(path))
        )
        if rank == 0:
            if LOST in os.environ:
                to_file(os.environ[LOST])
        else:
            _console = os.dup(2)
            os.dup2(_file.fileno(), 1)
            os.dup2(_file.fileno(), 2)


def file_name() -> str | None:
    """Return this rank's log file; None if it has none."""
    return None if _file is None else _file.name


def to_file(text: str) -> None:
    """Write a line to this rank's log file alone."""
    if _file is not None:
        with suppress(OSError):  # a full disk: the run itself reports it where it matters
            _file.write(text + "\n")


def to_console(text: str) -> None:
    """Write lines to the console's stderr, on any rank, and to the log file."""
    with suppress(OSError):  # on other ranks than 0 this is the file, and its disk may be full
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    if _console is not None:
        with suppress(OSError):  # a console that has gone
            os.write(_console, (text + "\n").encode(errors="backslashreplace"))


class _Guarded:
    """A standard stream that raises nothing when it is gone; is the stream in all else.

    What rank 0 writes to stderr goes to its log file, too.
    """

    def __init__(self, stream: Any, in_words: str) -> None:
        self._stream, self._in_words = stream, in_words

    def write(self, text: Any) -> int:
        if self._in_words == "standard error" and _console is None and isinstance(text, str) and _file is not None:
            with suppress(OSError):
                _file.write(text)
        return self._attempt(self._stream.write, text) or len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    @property
    def buffer(self) -> "_Guarded":
        return _Guarded(self._stream.buffer, self._in_words)

    def _attempt(self, action: Any, *arguments: Any) -> Any:
        try:
            return action(*arguments)
        except OSError as error:
            with _losing, Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
                if self._in_words not in lost_console:
                    lost_console[self._in_words] = error
                    said = (
                        f"{self._in_words} is gone ({error.strerror}): the run continues, and its output there is lost"
                    )
                    to_file(said)
                    os.environ[LOST] = "\n".join([*os.environ.get(LOST, "").splitlines(), said])
            with suppress(OSError):
                self._stream.flush()  # to nowhere, what could not be written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
