"""Tokenised data on disk: written atomically, checked whenever it is opened, made anew where it is damaged.

An entry is a folder: Arrow files, and `report.json`, which has their sizes and checksums and one over itself. A byte
that has changed inside a token is another token, on which training would go on without a word. So all bytes are checked
at each start, by one rank of a node, with xxh3-128 (https://xxhash.com); SHA-256 would take 14 times as long, and there
is nobody to keep out: who can write here can write a record, too. What was read is then in the page cache.

An entry is made in a hidden folder beside it, flushed and renamed. What a builder that was killed has left is removed
by the next one.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import xxhash

from frugal import files
from frugal.errors import RequestError
from frugal.training.data.report import BuildReport
from frugal.units import MIB, format_bytes

RECORD = "report.json"
BLOCK_BYTES = 4 * MIB
MAX_THREADS = 8
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class DamagedError(Exception):
    """An entry is not what was written."""


class StoredFile(msgspec.Struct, frozen=True):
    """Size, and the checksum of each `BLOCK_BYTES` of a file."""

    num_bytes: int
    blocks: tuple[str, ...]


class Record(msgspec.Struct, frozen=True):
    """What an entry has in it. `made` is another one for each time that it is made."""

    made: str
    report: BuildReport
    files: dict[str, StoredFile]


class _Sealed(msgspec.Struct, frozen=True):
    """`checksum` is that of the text of `record`."""

    checksum: str
    record: msgspec.Raw


def read(folder: Path, *, all_bytes: bool) -> Record:
    """What the entry `folder` has in it; `all_bytes`: also whether its files are what was written.

    Raises:
        FileNotFoundError: there is no such entry.
        DamagedError: it is not what was written.
    """
    if not folder.is_dir():
        if not os.path.lexists(folder):
            raise FileNotFoundError(folder)
        raise DamagedError("it is no folder")
    try:
        sealed = msgspec.json.decode(files.read_regular(folder / RECORD), type=_Sealed)
        if sealed.checksum != _checksum(bytes(sealed.record)):
            raise DamagedError(f"{RECORD} has another checksum than it had")
        record = msgspec.json.decode(sealed.record, type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedError(f"{RECORD} cannot be read: {_reason(error)}") from None
    for name, file in record.files.items():
        _check_size(folder / name, file)
    if all_bytes:
        _check_blocks(folder, record)
    return record


def _check_size(path: Path, file: StoredFile) -> None:
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {_reason(error)}") from None
    if num_bytes != file.num_bytes:
        raise DamagedError(f"{path.name} has {num_bytes:,} of {file.num_bytes:,} bytes")


def _check_blocks(folder: Path, record: Record) -> None:
    for name, file in record.files.items():
        try:
            for number, checksum in enumerate(_checksums(folder / name)):
                if checksum != file.blocks[number]:
                    end = min((number + 1) * BLOCK_BYTES, file.num_bytes)
                    raise DamagedError(f"{name} has other bytes than it had, from {number * BLOCK_BYTES:,} to {end:,}")
        except OSError as error:
            raise DamagedError(f"{name} cannot be read: {_reason(error)}") from None


def _checksums(path: Path) -> Iterator[str]:
    """Of each block of a file, in order."""
    own = threading.local()  # a buffer a thread: new memory for each block would take longer than the checksum

    def make_buffer() -> None:
        own.buffer = bytearray(BLOCK_BYTES)

    def checksum(start: int) -> str:
        return _checksum(memoryview(own.buffer)[: os.preadv(descriptor, [own.buffer], start)])

    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        starts = range(0, os.fstat(descriptor).st_size, BLOCK_BYTES)
        with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS), initializer=make_buffer) as pool:
            yield from pool.map(checksum, starts)
    finally:
        os.close(descriptor)


def _checksum(data: bytes | memoryview) -> str:
    return str(xxhash.xxh3_128_hexdigest(data))


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def build(folder: Path, write: Callable[[Path], BuildReport], *, damaged: bytes | None = None) -> None:
    """Make the entry `folder` of the files that `write` makes in the folder it is given.

    Where another process was first, its entry stays. `damaged`: what `identity` said of the entry to be replaced.

    Raises:
        RequestError: the disk is full.
        OSError: it cannot be written.
    """
    with _new_folder(folder) as temporary:
        try:
            report = write(temporary)
            _write_record(temporary, report)
        except OSError as error:
            if error.errno in _IS_FULL:
                _refuse_full_disk(folder.parent, temporary, error)
            raise
        with _locked(folder.parent):
            if damaged is not None:
                _remove(folder, damaged)
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
        files.flush(folder.parent)


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One process or thread at a time replaces entries, so that a new one is not taken for the damaged one."""
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_record(temporary: Path, report: BuildReport) -> None:
    """Record and flush what was written."""
    stored = {}
    for path in sorted(temporary.iterdir()):
        files.flush(path)
        stored[path.name] = StoredFile(path.stat().st_size, tuple(_checksums(path)))
    record = msgspec.json.encode(Record(secrets.token_hex(8), report, stored))
    sealed = _Sealed(_checksum(record), msgspec.Raw(record))
    files.write_file(temporary / RECORD, msgspec.json.encode(sealed))


def _refuse_full_disk(cache: Path, temporary: Path, error: OSError) -> NoReturn:
    written = sum(file.stat().st_size for file in temporary.iterdir())
    free = shutil.disk_usage(cache).free + written
    raise RequestError(
        f"the tokenised data does not fit on the disk of {cache}",
        because=f"{os.strerror(error.errno or 0)} after {format_bytes(written)}; {format_bytes(free)} were free",
        hint="free some space, or set XDG_CACHE_HOME to a folder on another disk",
    ) from None


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder beside `folder`, locked while it is filled; removed at the end, unless it was renamed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.{host}.", suffix=_UNFINISHED, dir=folder.parent))
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield temporary
    finally:
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)


_UNFINISHED = ".unfinished"
_YOUNG_SECONDS = 60.0  # a folder may have been made and not yet locked


def _remove_abandoned(cache: Path) -> None:
    """What builders have left that were killed: on this host at once, on others after a day, as locks may not reach."""
    host = re.sub(r"[^\w.-]", "_", socket.gethostname())
    for entry in cache.glob(f".*{_UNFINISHED}"):
        with contextlib.suppress(OSError):
            unused = time.time() - max(path.stat().st_mtime for path in (entry, *entry.iterdir()))
            if unused > (_YOUNG_SECONDS if f".{host}." in entry.name else files.DAY) and not _is_locked(entry):
                shutil.rmtree(entry, ignore_errors=True)


def _is_locked(folder: Path) -> bool:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def identity(folder: Path) -> bytes:
    """What tells an entry from one that was made in its place."""
    with contextlib.suppress(OSError):
        return files.read_regular(folder / RECORD)
    return b""


def _remove(folder: Path, damaged: bytes) -> None:
    """Remove the damaged entry at once, not file by file. One that another process has put in its place stays."""
    if identity(folder) != damaged:
        return
    aside = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.damaged")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    if aside.is_dir() and not aside.is_symlink():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink(missing_ok=True)
