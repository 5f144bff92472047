"""One voice when ranks fail: the first rank that fails says why, the others keep silent.

A rank that stops takes the others down: they see broken connections, which explain nothing. So the first one claims
the word in the store that all ranks share, and says it on stderr; the rest end without a sound, late enough for the
launcher to see the first one's exit code before theirs.
"""

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from frugal.distributed import process_group, rank_logs, signals
from frugal.errors import FrugalError

INTERRUPTED = 130
LINGER_SECONDS = 15.0  # launchers look after their ranks every second; a rank that is still here by then is alone
REPORT = "FRUGAL_REPORT"
"""Names a folder, shared by all nodes, in which the rank that fails first leaves a `Report` for whoever started it."""

STORE_SECONDS = 5.0  # for an answer from the store of ranks, whose host may be the one that is gone
_ending = threading.RLock()


class LostRankError(RuntimeError):
    """Another rank is gone.

    `is_elsewhere`: it was on another host than this rank. `is_silent`: nothing was heard of that host any more.
    """

    def __init__(self, what: str, why: str, *, is_elsewhere: bool, is_silent: bool) -> None:
        super().__init__(what)
        self.what, self.why = what, why
        self.is_elsewhere, self.is_silent = is_elsewhere, is_silent


def done() -> None:
    """Leave word that the run is through: launchers' exit codes alone do not say so (MPICH's and pdsh's can be 0)."""
    if (folder := os.environ.get(REPORT)) and _rank() == 0:
        (Path(folder) / _DONE).touch()


def is_done(folder: Path) -> bool:
    """Whether the run whose ranks report to `folder` is through."""
    return (folder / _DONE).exists()


_DONE, _FAILURE = "done", "failure.json"


class FailureReport(msgspec.Struct):
    """How a run failed: the rank that has the word, its host, its exit code, and what it said."""

    rank: int
    host: str
    code: int
    text: str


def reported(folder: Path) -> FailureReport | None:
    """What the rank that failed first left in `folder`, if one did."""
    try:
        return msgspec.json.decode((folder / _FAILURE).read_bytes(), type=FailureReport)
    except (OSError, msgspec.DecodeError):
        return None


def end(error: BaseException) -> NoReturn:
    """End this rank's process for `error`: with its message, or silently where another rank has the word."""
    code = error.exit_code if isinstance(error, FrugalError) else INTERRUPTED if _is_interrupt(error) else 1
    lost_rank = isinstance(error, LostRankError)
    lost_peer = lost_rank or (isinstance(error, RuntimeError) and "onnection" in str(error))
    if lost_peer and signals.is_told():
        os._exit(code)  # the launcher saw another rank end and is ending all; it waits for this one
    if threading.current_thread() is threading.main_thread():
        signals.end_at_once()  # when told so from here on
    if lost_peer and not lost_rank:
        time.sleep(1.0)  # the one who broke it speaks first, and the lifeline knows who that was
    if not _ending.acquire(blocking=False):  # another thread is at it
        threading.Event().wait()
    rank_logs.note("".join(traceback.format_exception(error)).rstrip())
    if lost_rank:
        time.sleep(1.0)
    may_speak = _may_speak()
    if may_speak is None:
        may_speak = isinstance(error, LostRankError) and error.is_elsewhere and _is_left_to_us(error)
    if not may_speak:
        if not _is_interrupt(error):  # that all ranks end with the same code
            _linger()
    elif isinstance(error, LostRankError):
        if not error.is_elsewhere:  # the launcher they share may know more: which signal ended it
            _linger()
        _say(f"error: {error.what}\n  because {error.why}", code)
    elif lost_peer:
        _linger()
        why = str(error).splitlines()[0]
        _say(f"error: rank {_rank()} lost the connection to another rank\n  because {why}", code)
    elif isinstance(error, FrugalError):
        _say(f"error: {error}", code)
    elif isinstance(error, SystemExit):  # rich ends so where nobody reads our output any more: `frugal train | head`
        pass
    elif _is_interrupt(error):
        _say("interrupted", code)
    else:
        log = rank_logs.where()
        place = f"rank {_rank()} on {socket.gethostname()}" + (f"; all it printed: {log}" if log else "")
        _say("".join(traceback.format_exception(error)).rstrip() + f"\n({place})", code)
    os._exit(code)  # not sys.exit: other ranks are gone, and gloo's and NCCL's destructors would wait for them


def _linger() -> None:
    """Wait for the launcher to end this rank for another's failure; if it does, without a word."""
    end = time.monotonic() + LINGER_SECONDS
    while time.monotonic() < end:
        if signals.is_told():
            os._exit(1)
        time.sleep(0.2)


def live(command: click.Command) -> None:
    """The whole life of a rank that measures: `command` with the process's arguments, ended as `end` does."""
    process_group.end_with_starter()
    try:
        command(sys.argv[1:], standalone_mode=False)
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        end(error)


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(text: str, code: int) -> None:
    with suppress(OSError):  # nobody reads it any more, or the disk it goes to is full
        if sys.stdout.isatty():
            sys.stdout.write("\x1b[?25h\n")  # the cursor, which the progress had hidden
        sys.stdout.flush()
    rank_logs.say(text)
    if folder := os.environ.get(REPORT):
        report = FailureReport(_rank(), socket.gethostname(), code, text)
        with suppress(OSError):
            (Path(folder) / _FAILURE).write_bytes(msgspec.json.encode(report))


def _may_speak() -> bool | None:
    """Whether no other rank has failed before; None where rank 0, which keeps the store, is gone."""
    import torch.distributed as dist

    from frugal.distributed import rendezvous

    store: dist.Store | None = rendezvous.store()
    if store is None and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    if store is None:
        return _is_first_here()  # all ranks of a node read the same files and flags
    claims: list[bool] = []

    def claim() -> None:
        with suppress(RuntimeError):
            claims.append(store.compare_set("frugal/failed", "", str(_rank())) == str(_rank()).encode())

    with _without_stderr():  # torch warns of a store that is gone, with its C++ stack
        asking = threading.Thread(target=claim, daemon=True)
        asking.start()
        asking.join(STORE_SECONDS)
    return claims[0] if claims else None


def _is_left_to_us(error: LostRankError) -> bool:
    """Whether nobody else can say that rank 0 is gone. One that failed has said why itself."""
    if not _is_first_here():
        return False
    if not error.is_silent:
        _linger()
    folder = os.environ.get(REPORT)
    return folder is None or reported(Path(folder)) is None


def _is_first_here() -> bool:
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Nothing reaches stderr, not even from C++."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
