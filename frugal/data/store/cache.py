"""Tokenised data on disk: written atomically, checked whenever it is opened, made anew where it is damaged.

An entry is a folder: Arrow files, and `report.json`, which has their sizes and checksums and one over itself. A byte
that has changed inside a token is another token, on which training would continue without a message. So all bytes are
checked at each start, by one rank of a node, with xxh3-128 (https://xxhash.com); SHA-256 would take 14 times as long,
and would keep nobody out: a user who can write here can write a record, too. What was read is then in the page cache.

One process at a time makes an entry, others wait for it. It is made in a folder beside it, flushed and renamed. What a
killed process has left is removed when nothing has changed in it for an hour.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from frugal import files
from frugal.data.report import BuildReport
from frugal.errors import RequestError
from frugal.units import format_bytes

RECORD = "report.json"
_ABANDONED_SECONDS = 3600
_NOTICE_SECONDS = 5.0
"""A wait for another process is reported only if it lasts longer."""

logger = logging.getLogger("frugal")


class DamagedError(Exception):
    """An entry is not what was written."""


class Record(msgspec.Struct, frozen=True):
    """A record of an entry: the size in bytes and the checksum of each file, by name."""

    report: BuildReport
    files: dict[str, tuple[int, str]]


class _Sealed(msgspec.Struct, frozen=True):
    """A record with a checksum of its text."""

    checksum: str
    record: msgspec.Raw


def read(folder: Path) -> BuildReport:
    """Check all bytes of an entry, and return its report.

    Raises:
        FileNotFoundError: there is no such entry.
        DamagedError: it is not what was written.
    """
    if not folder.exists():
        raise FileNotFoundError(folder)
    name = RECORD
    try:
        sealed = msgspec.json.decode(files.read_regular(folder / RECORD), type=_Sealed)
        if sealed.checksum != xxhash.xxh3_128_hexdigest(bytes(sealed.record)):
            raise DamagedError(f"{RECORD} has another checksum than it had")
        record = msgspec.json.decode(sealed.record, type=Record)
        for name, (num_bytes, checksum) in record.files.items():
            if (there := (folder / name).stat().st_size) != num_bytes:
                raise DamagedError(f"{name} has {there:,} of {num_bytes:,} bytes")
            if _checksum(folder / name) != checksum:
                raise DamagedError(f"{name} has other bytes than it had")
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise DamagedError(f"{name} cannot be read: {reason}") from None
    return record.report


def _checksum(path: Path) -> str:
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def read_or_build(folder: Path, write: Callable[[Path], BuildReport]) -> BuildReport:
    """Return the report of an entry. It is made where there is none or it is damaged, of the files that `write` makes.

    Raises:
        RequestError: the disk is full.
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
        _remove_abandoned(folder.parent)
        return _build(folder, write)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other process makes the entry. On a file system without locks several do: the first one's stays."""
    lock = folder.with_name(f".{folder.name}.lock")
    descriptor = files.append(lock)
    waiting = "waiting for another process that makes the same tokenised data, %s"
    notice = threading.Timer(_NOTICE_SECONDS, logger.warning, (waiting, folder))
    notice.start()
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        notice.cancel()
        yield
    finally:
        notice.cancel()
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _build(folder: Path, write: Callable[[Path], BuildReport]) -> BuildReport:
    temporary = files.unfinished(folder)
    temporary.mkdir()
    try:
        report = write(temporary)
        stored = {}
        for path in sorted(temporary.iterdir()):
            files.flush(path)
            stored[path.name] = (path.stat().st_size, _checksum(path))
        record = msgspec.json.encode(Record(report, stored))
        sealed = _Sealed(xxhash.xxh3_128_hexdigest(record), msgspec.Raw(record))
        files.write_file(temporary / RECORD, msgspec.json.encode(sealed))
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process made it, on a file system without locks
                raise
        files.flush(folder.parent)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        written = sum(path.stat().st_size for path in temporary.iterdir())
        free = shutil.disk_usage(folder.parent).free + written
        raise RequestError(
            f"the tokenised data does not fit on the disk of {folder.parent}",
            because=f"{os.strerror(error.errno)} after {format_bytes(written)}; {format_bytes(free)} were free",
            hint="free some space, or set XDG_CACHE_HOME to a folder on another disk",
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return report


def _remove_abandoned(cache: Path) -> None:
    for entry in cache.glob("*.tmp-*"):
        with contextlib.suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (entry, *entry.iterdir())) > _ABANDONED_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)
