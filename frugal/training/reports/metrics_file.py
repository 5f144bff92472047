"""`metrics.jsonl` as a file: records are appended to it, whatever other programs do to it meanwhile.

It is never shortened in place: what is dropped at a resume is left out of a new file, which replaces the old one when
it is on the disk. Where the disk is full, records wait in memory for room until the next checkpoint.
"""

import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from frugal import file_errors, files
from frugal.config.run_settings import METRICS
from frugal.errors import CheckpointError
from frugal.units import plural

logger = logging.getLogger("frugal")


class Records:
    """`metrics.jsonl`, open to append to, without records of steps after `last_step` or half a record.

    Before each write it is compared with the file of that name. An editor, `sed -i` or rsync put another one in its
    place, and one may be cut in place: the run goes on in the file that is there, with the records that came since.
    What is no file is renamed, and a new file begun.

    Raises:
        CheckpointError: it cannot be read or written; it is what it was.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path
        self._unwritten, self._num_written = bytearray(), 0  # so many bytes of it are in the file
        self._is_failing = False
        try:
            self._put_aside()
            self._descriptor = files.append(path)
            kept = _Kept(path, last_step)
            self.dropped_steps = max(0, kept.newest - last_step)
            if not kept.is_all:
                os.close(self._descriptor)
                files.write_file(path, kept.lines())
                self._descriptor = files.append(path)
            if kept.num_broken:
                number = plural(kept.num_broken, "line")
                logger.warning("%s: %s of it cannot be read as records, and are left out", path, number)
            self._folder, self._size = path.parent.stat(), os.fstat(self._descriptor).st_size
        except OSError as error:
            raise _cannot_write(path, error) from None

    def add(self, line: bytes) -> None:
        """Append a record, or keep it until there is room."""
        self._unwritten += line
        try:
            self._write()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                because, remedy = file_errors.explain(error, self._path)
                logger.warning("cannot write %s, it is kept for the next checkpoint: %s; %s", METRICS, because, remedy)
            self._is_failing = True

    def sync(self, path: Path) -> None:
        """Have all on the disk, under the name `path`. A file that was deleted is made again, with all its records.

        Raises:
            OSError: it cannot be written.
        """
        try:
            self._path, self._folder = path, path.parent.stat()
            self._write()
            self._write()  # another file may have come in its place meanwhile
            os.fsync(self._descriptor)
            if not path.exists():
                files.write_file(path, files.read_lines(Path(f"/proc/self/fd/{self._descriptor}")))
                os.close(self._descriptor)
                self._descriptor = files.append(path)
                logger.warning("%s is written anew, with all records of this run: the file was deleted", path)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise

    def close(self, *, in_error: bool) -> None:
        """The end, with what was kept; an error that is on its way is the one to tell."""
        try:
            self._write()
            self._write()
        except OSError as error:
            if not in_error:
                raise _cannot_write(self._path, error) from None
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        """Append what is unwritten. A disk that is nearly full takes a part; the next part is appended to it."""
        self._follow()
        while self._num_written < len(self._unwritten):
            part = self._unwritten[self._num_written : self._num_written + (1 << 20)]
            written = os.write(self._descriptor, part)
            self._num_written, self._size = self._num_written + written, self._size + written
        self._unwritten.clear()
        self._num_written = 0

    def _follow(self) -> None:
        """Go on in the file of this name, where it is another one or was changed, at the beginning of a line."""
        held = os.fstat(self._descriptor)
        try:
            if not os.path.samestat(self._path.parent.stat(), self._folder):
                return  # the run's folder was moved, and another has its name
            there = self._path.lstat()
        except OSError:  # `sync` makes it again, or knows where the folder is
            return
        if not os.path.samestat(held, there):
            self._put_aside()
            new, old = files.append(self._path), self._descriptor
            try:
                lacking = _records_behind(self._path, Path(f"/proc/self/fd/{old}"))
            except OSError:
                os.close(new)
                raise
            os.close(old)
            self._descriptor = new
            self._begin_line(lacking)
            number = plural(lacking.count(b"\n"), "record")
            logger.warning("%s was replaced: the run goes on in the new file, with %s it lacked", self._path, number)
        elif held.st_size != self._size:
            self._begin_line()
            logger.warning("%s was changed: the run goes on at its end", self._path)

    def _begin_line(self, lacking: bytes = b"") -> None:
        """Go on with the records that are `lacking` and the first that is not all written, behind the end of a line."""
        del self._unwritten[: self._unwritten.rfind(b"\n", 0, self._num_written) + 1]
        self._num_written, self._size = 0, os.fstat(self._descriptor).st_size
        is_cut = self._size > 0 and os.pread(self._descriptor, 1, self._size - 1) != b"\n"
        self._unwritten[:0] = b"\n" * is_cut + lacking

    def _put_aside(self) -> None:
        """Rename what has the file's name and is no file."""
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(self._path.lstat().st_mode):
                aside = self._path.with_name(f"{self._path.name}.aside-{secrets.token_hex(4)}")
                self._path.rename(aside)
                logger.warning("%s is no file: it is renamed to %s, and a new file begun", self._path, aside.name)


class _Record(msgspec.Struct):
    step: int
    event: str = ""
    time: float = 0.0


_HISTORY = ("start", "end", "recovery")
"""Events that stay, whatever becomes of their step: they did happen."""


class _Kept:
    """The records of steps up to `last_step` and of what the run went through; `newest`: the last step of all."""

    def __init__(self, path: Path, last_step: int) -> None:
        self._path, self._last_step = path, last_step
        self.newest = self.num_broken = 0
        self.is_all = True
        for line in files.read_lines(path):
            record = _decoded(line)
            if record is not None and record.event == "step":
                self.newest = max(self.newest, record.step)
            self.num_broken += record is None and line.endswith(b"\n") and not line.isspace()  # half: of a killed run
            self.is_all = self.is_all and self._has(line, record)

    def lines(self) -> Iterator[bytes]:
        """Yield the line of each."""
        return (line for line in files.read_lines(self._path) if self._has(line, _decoded(line)))

    def _has(self, line: bytes, record: _Record | None) -> bool:
        is_kept = record is not None and (record.step <= self._last_step or record.event in _HISTORY)
        return is_kept and line.endswith(b"\n")


def _decoded(line: bytes) -> _Record | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(line, type=_Record)
    return None


def _records_behind(path: Path, other: Path) -> bytes:
    """Return the records of the file `other` behind the last one of `path`, which is known by its time."""
    last, num_same = 0.0, 0
    for line in files.read_lines(path):
        if (record := _decoded(line)) is not None and record.time:
            last, num_same = record.time, num_same * (record.time == last) + 1
    lacking, num_seen = bytearray(), 0
    for line in files.read_lines(other) if last else ():
        if num_seen >= num_same and line.endswith(b"\n"):
            lacking += line
        elif (record := _decoded(line)) is not None:
            num_seen += record.time == last
    return bytes(lacking)


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    because, remedy = file_errors.explain(error, path)
    return CheckpointError(f"cannot write {path}", because=because, hint=file_errors.then_resume(remedy))
