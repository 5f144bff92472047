"""A rank, or a process that dry-runs, ends with the process that started it, however that ends.

A parent that is killed runs no handlers, and where nobody reaps it, its number still names a process. So two things of
the kernel watch it: the parent death signal, where there is one (Linux), and a pipe whose write end the parent alone
holds. The signal ends a process that is in the midst of a long operation; the pipe also tells of a parent that was gone
before the signal could be set. Through the pipe the parent passes on the signals that it receives, too.
"""

import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

PIPE = "FRUGAL_PARENT_PIPE"
"""In the environment of a process that ends with its parent: the number of the pipe's read end."""

OVER_SSH = "FRUGAL_OVER_SSH"
"""In the environment of ranks that `frugal train --hostfile` started, and of no others."""

_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")
"""Set by launchers whose main thread waits for the ranks that it started: torchrun, DeepSpeed's."""

_PR_SET_PDEATHSIG = 1


def is_over_ssh() -> bool:
    """Return whether this rank was started over ssh by a `frugal train` elsewhere."""
    return OVER_SSH in os.environ


def end_with_parent(deliver: Callable[[int], None] | None = None) -> None:
    """End this process when the one that started it ends; does nothing where a user started it.

    `deliver` is called with each byte that comes through the pipe, on a thread of its own.
    """
    pipe = os.environ.pop(PIPE, None)  # processes that this one starts have no part in it
    if pipe is not None or any(name in os.environ for name in _LAUNCHERS):
        set_death_signal(signal.SIGKILL)
    if pipe is not None:  # without `deliver` what is written there is for others to read
        wait = partial(_read, int(pipe), deliver) if deliver is not None else partial(_wait_for_end, int(pipe))
        threading.Thread(target=wait, name="frugal parent", daemon=True).start()


def set_death_signal(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    with suppress(OSError, AttributeError):  # not on Linux: the pipe remains
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _wait_for_end(pipe: int) -> None:
    """End this process when all write ends are closed, which poll always reports."""
    held = select.poll()
    held.register(pipe, 0)
    held.poll()
    os._exit(1)


def _read(pipe: int, deliver: Callable[[int], None]) -> None:
    while content := os.read(pipe, 64):
        for byte in content:
            deliver(byte)
    os._exit(1)
