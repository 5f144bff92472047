"""One voice when ranks fail: the first rank that fails says why, the others keep silent.

A rank that stops takes the others down: they see broken connections, which explain nothing. So the first one claims
the word in the store that all ranks share, and says it on stderr; the rest end without a sound, late enough for the
launcher to see the first one's exit code before theirs.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import click

from frugal.errors import FrugalError
from frugal.training import group, stopping

INTERRUPTED = 130
LINGER_SECONDS = 15.0  # launchers look after their ranks every second; a rank that is still here by then is alone


def end(error: BaseException) -> NoReturn:
    """End this rank's process for `error`: with its message, or silently where another rank has the word."""
    code = error.exit_code if isinstance(error, FrugalError) else INTERRUPTED if _is_interrupt(error) else 1
    lost_peer = isinstance(error, RuntimeError) and "onnection" in str(error)
    if lost_peer and stopping.is_told():
        os._exit(code)  # the launcher saw another rank end and is ending all; it waits for this one
    stopping.end_at_once()  # when told so from here on
    if lost_peer:
        time.sleep(1.0)  # the one who broke it speaks first
    if not _may_speak():
        time.sleep(LINGER_SECONDS)
    elif lost_peer:
        time.sleep(LINGER_SECONDS)
        _say(f"error: rank {_rank()} lost the connection to another rank\n  because {str(error).splitlines()[0]}")
    elif isinstance(error, FrugalError):
        _say(f"error: {error}")
    elif isinstance(error, SystemExit):  # rich ends so where nobody reads our output any more: `frugal train | head`
        pass
    elif _is_interrupt(error):
        _say("interrupted")
    else:
        _say("".join(traceback.format_exception(error)).rstrip() + f"\n(rank {_rank()})")
    os._exit(code)  # not sys.exit: other ranks are gone, and gloo's and NCCL's destructors would wait for them


def live(command: click.Command) -> None:
    """The whole life of a rank that measures: `command` with the process's arguments, ended as `end` does."""
    group.end_with_starter()
    try:
        command(sys.argv[1:], standalone_mode=False)
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        end(error)


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(text: str) -> None:
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")  # the cursor, which the progress had hidden
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _may_speak() -> bool:
    """Whether no other rank has failed before."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return int(os.environ.get("LOCAL_RANK", "0")) == 0  # all ranks of a node read the same files and flags
    try:
        with _without_stderr():  # torch warns of a store that is gone, with its C++ stack
            store = dist.distributed_c10d._get_default_store()
            return bool(store.compare_set("frugal/failed", "", str(_rank())) == str(_rank()).encode())
    except RuntimeError:  # rank 0 keeps the store: it is gone, and has said why
        return False


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
