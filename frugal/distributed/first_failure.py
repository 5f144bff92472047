"""One message for a failed run: the rank that failed first prints its error, the others end without a message.

A rank that fails breaks the connections of the others, whose own errors explain nothing. So a failing rank first claims
a key in the store that all ranks share. The one that gets it prints its error to stderr and leaves a `FailureReport`
for its launcher. The others wait before they end, so that the launcher sees the first exit code.
"""

import atexit
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from frugal.distributed import env, parent, rank_logs, stop
from frugal.errors import INTERRUPTED, FrugalError

CAUSE_FIRST_SECONDS = 1.0
"""Head start of a rank that failed on its own over those that only lost their connection to it."""

LAUNCHER_SECONDS = 15.0
"""Launchers look after their ranks every second or so; one that has not ended this rank by then does not know more."""

STORE_SECONDS = 5.0
"""For an answer from the store that all ranks share: its host may be the one that failed."""

REPORT_FOLDER = "FRUGAL_REPORT"
"""A variable: the folder, shared by all nodes, in which ranks report to their launcher how the run ended."""

_DONE, _FAILURE, _CLAIM = "done", "failure.json", "frugal/failed"
_ending = threading.RLock()


class LostRankError(RuntimeError):
    """The loss of another rank.

    `is_elsewhere`: it was on another host than this rank. `is_unreachable`: that host does not answer any more.
    """

    def __init__(self, what: str, why: str, *, is_elsewhere: bool, is_unreachable: bool) -> None:
        super().__init__(what)
        self.what, self.why = what, why
        self.is_elsewhere, self.is_unreachable = is_elsewhere, is_unreachable


class ServiceError(Exception):
    """A thread that the whole run relies on has failed."""


class FailureReport(msgspec.Struct):
    """The report of how a run failed: the rank that failed first, its host, its exit code, and what it printed."""

    rank: int
    host: str
    code: int
    text: str


def report_folder() -> Path | None:
    """Return the folder in which ranks report how the run ended, if their launcher reads it."""
    return Path(folder) if (folder := os.environ.get(REPORT_FOLDER)) else None


def report_done() -> None:
    """Record that the run came to its end: launchers' exit codes alone do not show it (MPICH's can be 0)."""
    if (folder := report_folder()) is not None and env.rank() == 0:
        with suppress(OSError):  # the folder was moved or deleted under the run; then the exit code says it
            (folder / _DONE).touch()


def is_done(folder: Path, code: int) -> bool:
    """Return whether the run that ended with exit code `code`, and whose ranks report to `folder`, came to its end."""
    return (folder / _DONE).exists() or (code == 0 and not folder.exists())


def read_report(folder: Path) -> FailureReport | None:
    """Return the report of the rank that failed first; None if there is none in `folder`."""
    try:
        return msgspec.json.decode((folder / _FAILURE).read_bytes(), type=FailureReport)
    except (OSError, msgspec.DecodeError):
        return None


def run_command(command: Callable[[Sequence[str]], None]) -> NoReturn:
    """Run `command` with the process's arguments as a rank, and end the process; for an error as `end_rank` does."""
    end_for_threads()
    parent.end_with_parent(deliver)
    # Not as an exception, which is lost where it meets a finalizer.
    signal.signal(signal.SIGINT, lambda _number, _frame: end_rank(KeyboardInterrupt()))
    try:
        command(sys.argv[1:])
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        end_rank(error)
    os._exit(0)  # a thread of C++ that asks the store while the interpreter is taken down would end it with SIGABRT


def end_for_threads() -> None:
    """Have an exception on a thread of frugal's end this rank, instead of being printed while others wait."""

    def end(failed: threading.ExceptHookArgs) -> None:
        name = "" if failed.thread is None else failed.thread.name
        if name.startswith("frugal "):
            error = ServiceError(f"thread `{name}`: {failed.exc_type.__name__}: {failed.exc_value}")
            error.__cause__ = failed.exc_value
            end_rank(error)
        threading.__excepthook__(failed)  # a library's: transformers has some that fail without harm

    threading.excepthook = end


def deliver(number: int) -> None:
    """Do what the signal of this number, which the command received, asks of this rank."""
    if number == signal.SIGINT:
        end_rank(KeyboardInterrupt())
    stop.deliver(number)


def end_rank(error: BaseException, code: int | None = None) -> NoReturn:
    """End this rank's process for `error`: with its message if this rank failed first, otherwise without one.

    `code`: to end with; None: that of the error.
    """
    if code is None and isinstance(error, KeyboardInterrupt):
        code = INTERRUPTED
    elif code is None:
        code = error.exit_code if isinstance(error, FrugalError) else 1
    if (isinstance(error, LostRankError) or lost_connection(error)) and stop.is_ending():
        os._exit(code)  # the launcher saw another rank end and is ending all; it waits for this one
    if threading.current_thread() is threading.main_thread():
        stop.restore_defaults()  # a signal from here on ends the process
    if lost_connection(error):
        time.sleep(CAUSE_FIRST_SECONDS)
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # another thread is ending this process
    rank_logs.to_file("".join(traceback.format_exception(error)).rstrip())
    if isinstance(error, LostRankError):  # with the lock held: the peer watch knows more than a lost connection
        time.sleep(CAUSE_FIRST_SECONDS)
    if _may_print(error):
        _print(error, code)
    elif not isinstance(error, KeyboardInterrupt):  # interrupted ranks all end with the same code
        _wait_for_launcher(code)
    os._exit(code)  # not sys.exit: other ranks are gone, and gloo's and NCCL's destructors would wait for them


def lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank closed its connection.

    The errors of gloo, NCCL, the store and our votes for that have no class in common, only words, as in "Connection
    closed by peer", "Connection to another rank was lost" and the store's "Broken pipe".
    """
    is_collective_error = isinstance(error, RuntimeError) and not isinstance(error, LostRankError)
    return is_collective_error and any(word in str(error).lower() for word in ("connection", "broken pipe"))


def _wait_for_launcher(code: int = 1) -> None:
    """Give the launcher time to end this rank because of another's failure, with `code` and without a message."""
    end = time.monotonic() + LAUNCHER_SECONDS
    while time.monotonic() < end:
        if stop.is_ending():
            os._exit(code)
        time.sleep(0.2)


def _may_print(error: BaseException) -> bool:
    """Return whether this rank failed first, or reports the loss of rank 0, on whose host the store was."""
    claimed = _claim_first_failure()
    if claimed is not None:
        return claimed
    if not isinstance(error, LostRankError):
        return isinstance(error, ServiceError)  # it may be what serves the store
    if not error.is_elsewhere or env.local_rank() != 0:
        return False
    if not error.is_unreachable:
        _wait_for_launcher()
    folder = report_folder()
    return folder is None or read_report(folder) is None  # another has reported it, or rank 0 its own failure


def _claim_first_failure() -> bool | None:
    """Return whether no other rank has failed before; None where the store does not answer."""
    rendezvous = sys.modules.get("frugal.distributed.rendezvous")  # not imported for this: it brings torch
    store, dist = getattr(rendezvous, "joined", None), sys.modules.get("torch.distributed")
    if store is None and dist is not None and dist.group.WORLD is not None:  # the user's own process group
        store = dist.group.WORLD.get_group_store()
    if store is None:
        return env.local_rank() == 0  # before ranks met: all of a node read the same files and flags
    own = str(env.rank())
    with suppress(RuntimeError, TimeoutError):
        holder = ThreadPoolExecutor(1).submit(store.compare_set, _CLAIM, "", own).result(STORE_SECONDS)
        return holder == own.encode()
    return None


def _print(error: BaseException, code: int) -> None:
    """Print the error's message and leave it in the report."""
    # Of a rank on its own host or behind a connection the launcher may know more: which signal ended it.
    if lost_connection(error) or (isinstance(error, LostRankError) and not error.is_elsewhere):
        _wait_for_launcher()
    text = _message(error)
    with suppress(OSError):  # nobody reads it any more, or the disk it goes to is full
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h\n")  # the cursor, which the progress bar had hidden
        sys.stdout.flush()
    rank_logs.to_console(text)
    report(code, text)


def report(code: int, text: str) -> None:
    """Write how the run failed for its launcher, if that reads it."""
    if (folder := report_folder()) is not None:
        failed = FailureReport(env.rank(), socket.gethostname(), code, text)
        with suppress(OSError):
            (folder / _FAILURE).write_bytes(msgspec.json.encode(failed))


def _message(error: BaseException) -> str:
    """Return what is printed; for a bug of ours the traceback."""
    if isinstance(error, LostRankError):
        return f"error: {error.what}\n  because {error.why}"
    if lost_connection(error):
        reason = str(error).splitlines()[0]
        return f"error: rank {env.rank()} lost the connection to another rank\n  because {reason}"
    if isinstance(error, FrugalError):
        return f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    log = rank_logs.file_name()
    origin = f"rank {env.rank()} on {socket.gethostname()}" + (f"; all it printed: {log}" if log else "")
    return "".join(traceback.format_exception(error)).rstrip() + f"\n({origin})"
