"""Tokenised data on disk: written atomically, checked whenever it is opened, made anew where it is damaged.

An entry is a folder: Arrow files, `report.json`, and `checksums.json` of all of them. A byte that has changed inside a
token is another token, on which training would continue without a message. So all bytes are checked at each start, by
one rank of a node, with xxh3-128 (https://xxhash.com); SHA-256 would take 14 times as long,
and would keep nobody out: a user who can write here can write a record, too. What was read is then in the page cache.

One process at a time makes an entry, others wait for it. It is made in a temporary folder beside it, flushed and
renamed.
"""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from frugal import files, temporary
from frugal.data.report import BuildReport
from frugal.errors import logger

REPORT, CHECKSUMS = "report.json", "checksums.json"


class DamagedError(Exception):
    """An entry is not what was written."""


def read(folder: Path) -> BuildReport:
    """Check all bytes of an entry, and return its report.

    Raises:
        FileNotFoundError: there is no such entry.
        DamagedError: it is not what was written.
    """
    if not folder.exists():
        raise FileNotFoundError(folder)
    name = CHECKSUMS
    try:
        checksums = msgspec.json.decode(files.read_regular(folder / name), type=dict[str, str])
        if unknown := {REPORT, *(path.name for path in folder.glob("*.arrow"))} - checksums.keys():
            raise DamagedError(f"{name} lacks {min(unknown)}")
        for name, checksum in checksums.items():
            if _checksum(folder / name) != checksum:
                raise DamagedError(f"{name} has other bytes than it had")
        return msgspec.json.decode(files.read_regular(folder / REPORT), type=BuildReport)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DamagedError(f"{name} cannot be read: {reason}") from None


def _checksum(path: Path) -> str:
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def read_or_build(folder: Path, write: Callable[[Path], BuildReport]) -> BuildReport:
    """Return the report of an entry. It is made where there is none or it is damaged, of the files that `write` makes.

    Raises:
        OSError: it cannot be written.
    """
    with contextlib.suppress(FileNotFoundError, DamagedError):  # is looked at again when no other process makes it
        return read(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _turn(folder):
        try:
            return read(folder)
        except FileNotFoundError:
            pass
        except DamagedError as error:
            logger.warning("the tokenised data in %s is damaged (%s): making it anew", folder, error)
            files.remove(folder)
        with temporary.folder(folder.parent, "making-") as around:
            made = around / folder.name
            made.mkdir()
            report = write(made)
            (made / REPORT).write_bytes(msgspec.json.encode(report))
            checksums = {path.name: _checksum(path) for path in sorted(made.iterdir())}
            (made / CHECKSUMS).write_bytes(msgspec.json.encode(checksums))
            files.flush_all(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process made it, on a file system without locks
                    raise
            files.flush(folder.parent)
        return report


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other process makes the entry. On a file system without locks several do: the first one's stays."""
    lock = folder.with_name(f".{folder.name}.lock")
    descriptor = files.append(lock)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("waiting for another process that makes the same tokenised data, %s", folder)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)
