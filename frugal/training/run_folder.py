"""A run's folder: free for it, kept for it, and told what it is."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from frugal.errors import RequestError
from frugal.planning.files import write_plan
from frugal.planning.plan import Plan
from frugal.training import group, manifest, rank_log, settings
from frugal.training.settings import Settings

LEASE_SECONDS = 120.0
"""So long a run on several hosts that goes on waits for its folder: a cluster's file system keeps the locks of a host
that is gone for a minute or two."""


def begin(asked: Settings) -> Settings:
    """What was asked, as it is for this start. Its folder exists now.

    Raises:
        RequestError: it holds another run, or cannot be made.
    """
    newest = manifest.newest(asked.checkpoints)
    if newest is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        asked = replace(asked, resume=True)  # torchrun --max-restarts gives every start the same flags
    if newest is not None and not asked.resume:
        raise in_use(asked, newest)
    make(asked, asked.out)
    return asked


def make(asked: Settings, folder: Path) -> None:
    """Have `folder`, which is the run's or in it.

    Raises:
        RequestError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(asked, error) from None


def in_use(asked: Settings, newest: Path) -> RequestError:
    """The folder has another run in it."""
    return RequestError(
        f"{asked.out} holds a run already",
        because=f"its newest checkpoint is {newest.name}",
        hint="continue it with --resume, or choose another folder with --out",
    )


@contextmanager
def nobody_else_in(asked: Settings) -> Iterator[None]:
    """Keep the run's folder for this run; the kernel lets go of it when the process ends, however that comes about."""
    folder = os.open(asked.out, os.O_RDONLY)
    try:
        is_ours = _is_ours(folder)
        if not is_ours and asked.resume and group.OVER_SSH in os.environ:
            rank_log.say(f"waiting for {asked.out}, which another run still holds")
            end = time.monotonic() + LEASE_SECONDS
            while not is_ours and time.monotonic() < end:
                time.sleep(1)
                is_ours = _is_ours(folder)
        if not is_ours:
            raise RequestError(
                f"another run is writing to {asked.out}",
                because="two runs in one folder would overwrite each other's checkpoints",
                hint="wait for it to end, or choose another folder with --out",
            )
        yield
    finally:
        os.close(folder)


def _is_ours(folder: int) -> bool:
    """Take an open folder, unless somebody else has it."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, as NFS may be: then nobody is told
        pass
    return True


def record(plan: Plan, asked: Settings) -> None:
    """What the run is, in its folder: the plan, its print-out for DeepSpeed, and what was asked for."""
    write_plan(plan, asked.out)
    try:
        manifest.write(asked.out / settings.RECORD, asked.record())
    except OSError as error:
        raise _cannot_write(asked, error) from None


def _cannot_write(asked: Settings, error: OSError) -> RequestError:
    return RequestError(
        f"cannot write to {asked.out}", because=str(error.strerror), hint="choose another folder with --out"
    )
