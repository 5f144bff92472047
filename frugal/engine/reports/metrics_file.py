"""`metrics.jsonl` as a file: records are appended to it, whatever other programs do to it meanwhile.

It is never shortened in place: what is dropped at a resume is left out of a new file, which replaces the old one when
it is on the disk. Where the disk is full, records wait in memory for room until the next checkpoint.
"""

import errno
import logging
import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from frugal import file_errors, files
from frugal.config.run_settings import METRICS
from frugal.errors import CheckpointError
from frugal.units import plural

logger = logging.getLogger("frugal")


class Records:
    """`metrics.jsonl`, open for appending, without records of steps after `last_step` and without half a record.

    Before each write it is compared with the file of that name. If that is another one, which an editor, `sed -i` or
    rsync has put there, or no file at all, it is renamed, and the run's own is written anew with all records. So is one
    that was deleted. A file that was changed in place is continued on a new line.

    `is_folder_gone`: the run's folder was deleted or moved.

    Raises:
        CheckpointError: it cannot be read or written; it is what it was.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self._path = path = path.absolute()
        self._unwritten: deque[bytes] = deque()
        self._part = 0  # bytes of the first unwritten record that are in the file
        self._is_failing = self.is_folder_gone = False
        try:
            if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
                files.move_aside(path)
            self._open()
            self.dropped_steps, num_broken, is_all = _survey(path, last_step)
            if not is_all:
                os.close(self._descriptor)
                files.write_file(path, (line for line in files.read_lines(path) if _is_kept(line, last_step)))
                self._open()
            if num_broken:
                number = plural(num_broken, "line")
                logger.warning("%s: %s of it cannot be read as records, and are left out", path, number)
            self._folder = path.parent.stat()
        except OSError as error:
            raise _cannot_write(path, error) from None

    def _open(self) -> None:
        self._descriptor = files.append(self._path)
        self._size, self._part = os.fstat(self._descriptor).st_size, 0

    def add(self, line: bytes) -> None:
        """Append a record, or keep it until there is room."""
        self._unwritten.append(line)
        try:
            self._write()
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                because, remedy = file_errors.explain(error, self._path)
                logger.warning("cannot write %s, it is kept for the next checkpoint: %s; %s", METRICS, because, remedy)
            self._is_failing = True

    def sync(self) -> None:
        """Have all records on the disk.

        Raises:
            OSError: they cannot be written, or the run's folder was deleted or moved.
        """
        try:
            self._write()
            self._follow()  # the file may have been replaced meanwhile
            os.fsync(self._descriptor)
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise
        if self.is_folder_gone:
            what = "the run's folder was deleted or moved (moved back, it can be resumed)"
            raise FileNotFoundError(errno.ENOENT, what, str(self._path.parent))

    def close(self, *, in_error: bool) -> None:
        """Write what was kept, and close the file. `in_error`: another error is on its way, which is reported."""
        try:
            self._write()
            self._follow()
        except OSError as error:
            if not in_error:
                raise _cannot_write(self._path, error) from None
        finally:
            os.close(self._descriptor)

    def _write(self) -> None:
        """Append what is unwritten. A disk that is nearly full takes a part of a record; the rest is appended later."""
        self._follow()
        while self._unwritten:
            line = self._unwritten[0]
            while self._part < len(line):
                number = os.write(self._descriptor, line[self._part :])
                self._part, self._size = self._part + number, self._size + number
            self._unwritten.popleft()
            self._part = 0

    def _follow(self) -> None:
        """Have the file under its name, and at the beginning of a line unless a record is only partly written."""
        now = os.fstat(self._descriptor)
        try:
            self.is_folder_gone = not os.path.samestat(self._path.parent.stat(), self._folder)
        except (FileNotFoundError, NotADirectoryError):
            self.is_folder_gone = True
        if self.is_folder_gone:
            return
        if not os.path.lexists(self._path) or not os.path.samestat(now, self._path.lstat()):
            files.move_aside(self._path)
            own = files.read_lines(Path(f"/proc/self/fd/{self._descriptor}"))
            files.write_file(self._path, (line for line in own if line.endswith(b"\n")))
            os.close(self._descriptor)
            self._open()
            logger.warning("%s is written anew, with all records of this run: the file was replaced", self._path)
        elif now.st_size != self._size:
            if now.st_size > 0 and os.pread(self._descriptor, 1, now.st_size - 1) != b"\n":
                os.write(self._descriptor, b"\n")
            self._size, self._part = os.fstat(self._descriptor).st_size, 0
            logger.warning("%s was changed: the run continues at its end", self._path)


class _Record(msgspec.Struct):
    step: int
    event: str = ""


_HISTORY = ("start", "end", "recovery")
"""Events that stay, whatever becomes of their step: they did happen."""


def _decoded(line: bytes) -> _Record | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(line, type=_Record)
    return None


def _is_kept(line: bytes, last_step: int) -> bool:
    record = _decoded(line) if line.endswith(b"\n") else None
    return record is not None and (record.step <= last_step or record.event in _HISTORY)


def _survey(path: Path, last_step: int) -> tuple[int, int, bool]:
    """Return how many steps come after `last_step`, how many lines are no records, and whether all is to be kept."""
    newest, num_broken, is_all = last_step, 0, True
    for line in files.read_lines(path):
        record = _decoded(line)
        if record is not None and record.event == "step":
            newest = max(newest, record.step)
        num_broken += record is None and line.endswith(b"\n") and not line.isspace()  # half a line: of a killed run
        is_all = is_all and _is_kept(line, last_step)
    return newest - last_step, num_broken, is_all


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    because, remedy = file_errors.explain(error, path)
    return CheckpointError(f"cannot write {path}", because=because, hint=file_errors.then_resume(remedy))
