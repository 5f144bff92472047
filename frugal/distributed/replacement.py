"""A rank replaces its own process by a new one, which goes on from a checkpoint under another plan.

The new process has the number, the parent and the environment of the one before, so that every launcher (frugal's,
torchrun, DeepSpeed's) takes it for the same. Nothing of an engine is left over: memory, CUDA's contexts and connections
go with the old process, as every descriptor that this one has opened is closed. What the new process is told is in one
variable of its environment. All ranks replace themselves after the same step, once no rank waits for another any more.

A process may be a trial (`Replaced.is_trial`) until it has `settled`. Where a trial fails by an exception, on whatever
rank, that rank replaces itself once more, for the plan before, and so do the others, as they lose their connection to
it. A trial that is killed ends the run, like every process that is killed; the run's folder has the plan before.

Processes of different starts never meet: the number of the start is in what connections are proven by
(`frugal.distributed.rendezvous`).

Signals to stop that come meanwhile wait for the new process.
"""

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from frugal.distributed import rank_logs, stop
from frugal.errors import FrugalError, first_line

VARIABLE = "FRUGAL_REPLACED"
"""In the environment of a process that took the place of another: `Replaced`, as JSON."""

_ENVIRONMENT = dict(os.environ)  # before libraries, and what a plan asks for, change it
_DESCRIPTORS = Path("/proc/self/fd")


class Replaced(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a process tells the one that takes its place.

    Attributes:
        number: of the start, from 1; 0: the first one.
        is_trial: whether the new process runs a plan that is not the run's yet.
        began: when the one before ended its last step, Unix seconds.
        seconds: of the last steps before, for each token or sample.
        restart_seconds: that a restart was taken to need.
        failed: why the trial before it failed, if it did.
        requested: the number of a signal to stop that came before; 0: none did.
    """

    number: int = 0
    is_trial: bool = False
    began: float = 0.0
    seconds: tuple[float, ...] = ()
    restart_seconds: float = 0.0
    failed: str = ""
    requested: int = 0


FIRST = Replaced()

LOST = "another rank was lost"
"""In `Replaced.failed` of ranks that do not know more."""


def _inherited() -> frozenset[int]:
    """The descriptors that whoever started this process left to it."""
    with suppress(OSError):
        numbers = [int(path.name) for path in _DESCRIPTORS.iterdir()]
        return frozenset(number for number in numbers if _is_inheritable(number))
    return frozenset()


def _is_inheritable(descriptor: int) -> bool:
    with suppress(OSError):  # that of the listing itself, which is closed by now
        return os.get_inheritable(descriptor)
    return False


_INHERITED = _inherited()
_this = msgspec.json.decode(_ENVIRONMENT.get(VARIABLE) or "{}", type=Replaced)
_is_settled = not _this.is_trial
_due: tuple[list[str], Replaced] | None = None
_started = time.time()
_replacing = threading.Lock()


def this() -> Replaced:
    """What this process was told by the one before it; `FIRST`, where there was none."""
    return _this


def note_start() -> None:
    """The run starts in this process: from here on its start is counted."""
    global _started
    _started = time.time()


def hear_stop_signals() -> None:
    """Heed the signals to stop that came while this process took the place of another; inside `heed_stop_signals`."""
    if _this.number:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop.SIGNALS)
        if _this.requested:
            stop.deliver(_this.requested)


def start_seconds() -> float:
    """Since the run started in this process, or, where it took the place of another, since that one's last step."""
    return time.time() - (_this.began or _started)


def settled() -> None:
    """This process is no trial any more: what fails from here on is the run's own failure. On all ranks."""
    global _is_settled
    _is_settled = True


def plan_next(words: Sequence[str], told: Replaced) -> None:
    """Have `replace_if_due` start Python with these words; `told` says what for."""
    global _due
    _due = list(words), msgspec.structs.replace(told, number=_this.number + 1)


def is_due() -> bool:
    """Whether this process is to be replaced at its end."""
    return _due is not None


def replace_if_due() -> None:
    """Replace this process, where that is planned. After a barrier of all ranks, outside of all groups."""
    if _due is None:
        return
    _replacing.acquire()
    atexit._run_exitfuncs()
    _replace(*_due)


def fall_back(error: Exception, *, is_lost: bool) -> None:
    """Where this process is a trial, replace it for the plan before, as `error` came; otherwise return.

    `is_lost`: it only says that another rank is gone. A trial was started with the words to go on with. A run that is
    stopped or interrupted does not go on.
    """
    if _is_settled or stop.is_ending():
        return
    if not _replacing.acquire(blocking=False):
        threading.Event().wait()  # another thread is at it
    rank_logs.to_file(f"the trial of another plan failed: {error}")
    why = LOST if is_lost else error.what if isinstance(error, FrugalError) else first_line(error)
    _replace(sys.orig_argv[1:], Replaced(number=_this.number + 1, began=time.time(), failed=why))


def _replace(words: Sequence[str], told: Replaced) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS)  # they wait for `heed_stop_signals`
    told = msgspec.structs.replace(told, requested=int(stop.requested() or 0))
    rank_logs.release()
    with suppress(OSError):
        for number in (int(path.name) for path in _DESCRIPTORS.iterdir()):
            if number > 2 and number not in _INHERITED:
                with suppress(OSError):  # that of the listing
                    os.set_inheritable(number, False)
    environment = _ENVIRONMENT | {VARIABLE: msgspec.json.encode(told).decode()}
    os.execve(sys.executable, [sys.executable, *words], environment)
