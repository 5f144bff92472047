"""Temporary folders that are always removed: making one also removes those of processes that were killed.

A process locks its folder (flock) while it lives, and the kernel unlocks it however the process ends: a folder that can
be locked belongs to no process. On a file system without such locks nothing is removed.
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
    """Make a folder for the time of the block, in `parent` or in the system's folder of temporary files.

    Raises:
        OSError: it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(parent, prefix)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, suffix=secrets.token_hex(4), dir=parent))
        with suppress(FileNotFoundError):  # another process, which found it without a lock, removed it
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(parent: Path, prefix: str, *, but: Path | None = None) -> None:
    """Remove the user's folders in `parent` that `folder` made and no process has locked, except `but`.

    A folder that cannot be removed stays.
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
