"""Temporary folders of which nothing stays: whoever makes the next one removes those of processes that were killed.

A process locks its folder (flock) while it lives, and the kernel unlocks it however the process ends: what can be
locked is nobody's any more. On a file system without such locks nothing can be, and nothing is removed.
"""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "frugal-tmp-"

_RANDOM = r"[a-z0-9_]{8}[0-9a-f]{8}"
"""The end of a folder's name: tempfile's part, and ours."""


@contextmanager
def folder(parent: Path | None = None, prefix: str = PREFIX) -> Iterator[Path]:
    """A folder for the time of the block, in `parent` or where the system has temporary files.

    Raises:
        OSError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(parent, prefix)
    path, descriptor = _made(parent, prefix)
    try:
        yield path
    finally:
        with suppress(OSError):  # it may have been moved, together with what it is in
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(parent: Path, prefix: str, *, but: Path | None = None) -> None:
    """Remove the user's folders in `parent` that `folder` made and no process has locked, and not `but`.

    What cannot be removed stays: it is no error.
    """
    with suppress(OSError):
        for path in list(parent.iterdir()):
            if path != but and re.fullmatch(re.escape(prefix) + _RANDOM, path.name):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.geteuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(descriptor)


def _made(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=secrets.token_hex(4), dir=parent))
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:  # removed by another process, which found it without a lock
            continue
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:  # otherwise removed just before it was locked
            return path, descriptor
        os.close(descriptor)
