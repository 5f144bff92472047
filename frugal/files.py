"""Files that are written atomically, and caches of them that do not grow without bound.

Atomic: a reader of a name finds all of its content or nothing, whenever the writer was killed. Content is written under
a temporary name in the same folder and renamed when it is complete. Durable writes are also flushed (fsync), the
content before the rename and the folder's list of names after it, so that they survive a power failure. Files that can
be made again, such as a cache, need not be durable.

Safe: nothing is written through a symbolic link in the place of a file, or through another user's in the place of a
folder, and nothing but regular files is read: reading a pipe or a device may never end.

Frugal removes only its own files: a folder from which entries are removed by name has a record of the names written
there (`WRITTEN`), and an entry of such a name that is not in the record is moved aside.

Bounded: a cache keeps at most a number of bytes, and removes entries that are unused for long. An entry is a file or a
folder. It was last used when it was last modified, which `touch` sets. Once a day, after something was added, the least
recently used entries beyond the limit are removed, except those used within a day or locked with `lock`.
"""

import codecs
import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO

from frugal.errors import logger

WRITTEN = "written.json"
"""The record of the names in its folder that frugal wrote."""

_UNFINISHED = re.compile(r"\.?(.+)\.tmp-[0-9a-f]{8}")
"""Names of folders that `unfinished` names, and of files that `write_file` has not renamed yet."""


def write_file(path: Path, data: bytes | Iterable[bytes], *, durable: bool = True) -> None:
    """Replace the content of `path`, or create it, with `data`, which may come in parts.

    Raises:
        OSError: it cannot be written; `path` is unchanged, and the error names it.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.writelines((data,) if isinstance(data, bytes) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
        if durable:
            flush(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        error.filename, error.filename2 = str(path), None
        raise


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    """Remove unfinished files and folders `names` that a killed process has left in `folder`.

    Nobody may write to the folder meanwhile.
    """
    with contextlib.suppress(OSError):
        for path in list(folder.iterdir()):
            if (match := _UNFINISHED.fullmatch(path.name)) and match[1] in names:
                remove(path)


def unfinished(final: Path) -> Path:
    """Return a new name beside `final` for a folder that is written there and renamed when it is complete."""
    return final.with_name(f"{final.name}.tmp-{secrets.token_hex(4)}")


def append(path: Path) -> int:
    """Open a file for appending, which is created if there is none, and return its descriptor; close it.

    Raises:
        OSError: it cannot be written, or a link, a pipe or something else that is no file is in its place.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"it is a symbolic link to {path.readlink()}", str(path)) from None
        raise
    return _regular(descriptor, path)


def append_lines(path: Path, lines: bytes, *, durable: bool = False) -> None:
    """Append all of `lines` or nothing, behind the end of a line that was cut off. Raises as `append`.

    Raises:
        OSError: there is no room; a disk that is nearly full takes a part, which is removed.
    """
    descriptor = append(path)
    try:
        size = os.fstat(descriptor).st_size
        is_cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        rest = b"\n" + lines if lines and is_cut else lines
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if durable:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def read_regular(path: Path, most_bytes: int = 1 << 30) -> bytes:
    """Return the content of a regular file, without waiting for anything else in its place.

    Raises:
        OSError: there is none, it is a folder, a pipe or a device, or it has more than `most_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


LONGEST_LINE_BYTES = 1 << 24
"""Most records have a few hundred bytes, a list of samples a few MiB."""

_SKIPPED_BYTES = 1 << 16  # the rest of a longer line is read in pieces: of 16 MiB they took 80 MiB together


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a regular file with their ends, one in memory at a time. Raises as `read_regular`.

    A line longer than `LONGEST_LINE_BYTES` is cut, and has no end.
    """
    with open_regular(path) as file:
        while line := file.readline(LONGEST_LINE_BYTES):
            yield line
            rest = line if len(line) == LONGEST_LINE_BYTES else b""
            while rest and rest[-1:] != b"\n":
                rest = file.readline(_SKIPPED_BYTES)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading. Raises as `read_regular`."""
    _check_regular(path.stat(), path)  # before it is opened: to open a device is to do something with it
    descriptor = _regular(os.open(path, os.O_RDONLY | os.O_NONBLOCK), path)
    return open(descriptor, "rb")  # noqa: PTH123  # a Path has no descriptor; the caller closes it


_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, and not a file", str(path))


def _regular(descriptor: int, path: Path) -> int:
    """Return the descriptor of a regular file; close any other."""
    try:
        _check_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def refuse_foreign_link(folder: Path) -> None:
    """Refuse a link of another user in the place of a folder; one of our own or the administrator's is followed.

    Raises:
        OSError: `folder` is a symbolic link of another user's.
    """
    with contextlib.suppress(FileNotFoundError):
        status = folder.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, f"it is another user's symbolic link to {folder.readlink()}", str(folder))


def remove(path: Path) -> None:
    """Remove a file, a link (which is not followed), or a folder with all that is in it, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def without_bom(data: bytes) -> bytes:
    """Return the UTF-8 text of a file without the mark with which some editors begin it.

    Raises:
        ValueError: it is UTF-16.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("it is UTF-16 and must be UTF-8; iconv -f UTF-16 -t UTF-8 converts it")
    return data.removeprefix(codecs.BOM_UTF8)


def written(folder: Path) -> set[str]:
    """Return the names in `folder` that frugal wrote, by its record; none where that is missing or cannot be read."""
    try:
        names = json.loads(read_regular(folder / WRITTEN, 1 << 20))
    except (OSError, ValueError, RecursionError):
        return set()
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def record_written(folder: Path, names: Iterable[str]) -> None:
    """Record `names` as those that frugal wrote in `folder`.

    Raises:
        OSError: it cannot be written.
    """
    write_file(folder / WRITTEN, (json.dumps(sorted(names)) + "\n").encode())


def move_aside(path: Path) -> None:
    """Rename a file or folder that frugal did not write and whose name it needs, if there is one."""
    if not os.path.lexists(path):
        return
    kept = path.with_name(f"{path.name}.kept")
    while os.path.lexists(kept):
        kept = path.with_name(f"{path.name}.kept-{secrets.token_hex(4)}")
    path.rename(kept)
    logger.warning("%s was not written by this run, and was moved to %s", path, kept.name)


def replace_own_folder(temporary: Path, final: Path) -> None:
    """Give a complete folder, whose files are flushed, its final name, and record it as written; durable.

    An earlier folder of that name is kept as `NAME.old` until the new one is in place. One that is not in the record is
    then moved aside, not removed.
    """
    folder, old, ours = final.parent, final.with_name(f"{final.name}.old"), written(final.parent)
    is_foreign = os.path.lexists(final) and final.name not in ours
    if old.name not in ours:
        move_aside(old)
    record_written(folder, {*ours, final.name} - {old.name} if is_foreign else {*ours, final.name, old.name})
    if os.path.lexists(final):
        remove(old)
        final.rename(old)
    temporary.rename(final)
    flush(folder)
    if is_foreign:
        move_aside(old)
    else:
        with contextlib.suppress(OSError):
            remove(old)
    record_written(folder, {*ours, final.name} - {old.name})


def name_folder(temporary: Path, final: Path) -> None:
    """Give a complete folder a name that nothing has yet; durable.

    Raises:
        OSError: something has it.
    """
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    temporary.rename(final)
    flush(final.parent)


def flush_all(folder: Path) -> None:
    """Wait until the disk has a folder with all that is in it."""
    for parent, _, names in os.walk(folder):
        for name in names:
            flush(Path(parent, name))
        flush(Path(parent))


def flush(path: Path) -> None:
    """Wait until the disk has a file's content, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


DAY = 24 * 3600  # seconds
UNUSED_SECONDS = 90 * DAY


def touch(entry: Path) -> None:
    """Note that a cache's entry is used now, at most once a day. A failure to write it is no error."""
    with contextlib.suppress(OSError):
        if time.time() - entry.stat().st_mtime > DAY:
            os.utime(entry)


def lock(file: Path) -> IO[bytes]:
    """Keep a file, and the cache's entry it belongs to, from being removed until the result is closed.

    Other hosts see the lock if the file system shares locks.

    Raises:
        OSError: there is no such file.
    """
    locked = file.open("rb")
    with contextlib.suppress(OSError):  # a file system without locks: `touch` keeps it for a day
        fcntl.flock(locked, fcntl.LOCK_SH)
    return locked


def prune(folder: Path, limit_bytes: int) -> None:
    """Remove the entries of `folder` that were not used for `UNUSED_SECONDS`, or are beyond `limit_bytes`.

    The least recently used go first. Done at most once a day; a failure to write is no error.
    """
    now = time.time()
    with contextlib.suppress(OSError):
        stamp = folder.with_name(f".{folder.name}.pruned")  # says when it was done
        if stamp.exists() and now - stamp.stat().st_mtime < DAY:
            return
        stamp.touch()
        last_used = {entry: entry.stat().st_mtime for entry in folder.iterdir()}
        total = 0
        for entry in sorted(last_used, key=lambda entry: -last_used[entry]):
            unused = now - last_used[entry]
            total += sum(file.stat().st_size for file in _files(entry))
            if unused > DAY and (unused > UNUSED_SECONDS or total > limit_bytes) and not _is_locked(entry):
                removed = entry.with_name(f".{entry.name}.removed")
                entry.rename(removed)  # a folder disappears at once, not file by file
                remove(removed)


def _files(entry: Path) -> list[Path]:
    return [file for file in entry.rglob("*") if file.is_file()] if entry.is_dir() else [entry]


def _is_locked(entry: Path) -> bool:
    """Return whether a process reads the entry, or this one may not write it."""
    try:
        for file in _files(entry):
            with file.open("rb+") as opened:  # network file systems lock no file that is open for reading only
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
