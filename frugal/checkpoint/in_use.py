"""Two runs in one folder: the second one is refused, on any host and any file system.

A run keeps a file in its folder, which it rewrites every `BEAT_SECONDS`. Another run that finds the file looks for its
process, if that is on its own host. If not, it waits to see the file change. It compares contents and no times, since
clocks of hosts may differ. A file that does not change for `STALE_SECONDS` belongs to a run that was killed. If that
run was only stopped for so long, it finds the file of its successor when it continues, and ends.
"""

import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec

from frugal import files
from frugal.distributed import first_failure, rank_logs
from frugal.errors import RequestError

MARK = ".running"
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
_MARK_BYTES = 512


class RunMark(msgspec.Struct, kw_only=True):
    """The content of the file: which process writes to the folder.

    `boot` and `namespace` say which processes `pid` counts, `began` that it is not a later one. `folder`: the inode of
    the folder; a copy of it has another one.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    began: str
    folder: int
    token: str
    beats: int = 0

    @classmethod
    def of_this_process(cls, folder: Path) -> "RunMark":
        """Return a mark for `folder` with a new token."""
        boot = namespace = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            namespace = str(Path("/proc/self/ns/pid").readlink())
        return cls(
            host=socket.gethostname()[:64], boot=boot, namespace=namespace, pid=os.getpid(), began=_began(os.getpid()),
            folder=folder.stat().st_ino, token=secrets.token_hex(8),
        )  # fmt: skip

    def encode(self) -> bytes:
        """Return the content of the file, always of the same size: it is rewritten in place."""
        return msgspec.json.encode(self).ljust(_MARK_BYTES - 1) + b"\n"


def _began(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; nothing if there is none, or it has ended.

    A process that was killed and that no parent has reaped is still listed, in some containers for ever.
    """
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    return ""


def _is_running(theirs: RunMark, own: RunMark) -> bool | None:
    """Return whether the process of a mark runs; None if it is on another host, or `/proc` hides it from this user."""
    if not own.boot or (theirs.boot, theirs.namespace) != (own.boot, own.namespace):
        return None
    if not Path(f"/proc/{theirs.pid}").exists():
        try:
            os.kill(theirs.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # it is another user's
            pass
        return None
    return _began(theirs.pid) == theirs.began


def read(path: Path) -> RunMark | None:
    """Return the mark in the file `path`; None if there is none, or something else is in it."""
    with suppress(FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(files.read_regular(path, 8 * _MARK_BYTES), type=RunMark)
    return None


@contextmanager
def marked(out: Path) -> Iterator[None]:
    """Keep the file that says that this process writes to the folder `out`.

    Raises:
        RequestError: another run writes there.
        OSError: the file cannot be written.
    """
    folder = os.open(out, os.O_RDONLY)
    path = Path(f"/proc/self/fd/{folder}", MARK)  # in this folder, wherever it is moved to
    try:
        own = RunMark.of_this_process(path.parent)
        _claim(path, own, out)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that `frugal report` knows that the run is alive
        is_over = threading.Event()
        beating = threading.Thread(target=_beat, args=(path, own, out, is_over), name="heartbeat", daemon=True)
        beating.start()
        try:
            yield
        finally:
            is_over.set()
            beating.join(BEAT_SECONDS)  # its file system may be away
            with suppress(OSError):
                if _is_own(read(path), own):
                    path.unlink(missing_ok=True)
    finally:
        os.close(folder)


def _claim(path: Path, own: RunMark, out: Path) -> None:
    """Create the file, or replace that of a run which has ended."""
    while not _create(path, own):
        theirs = read(path)
        is_running = None if theirs is None else _is_running(theirs, own)
        if theirs is not None and is_running and theirs.folder == own.folder:
            raise in_use(out, theirs)
        if is_running is None and _is_gone_after_waiting(path, out):  # hosts may number one folder differently
            continue
        files.write_file(path, own.encode())
        time.sleep(min(1.0, STALE_SECONDS / 10))  # of several that found it the last one to write has it
        if not _is_own(now := read(path), own):
            raise in_use(out, now)
        return


def _create(path: Path, own: RunMark) -> bool:
    """Create the file, unless it exists. Of two processes at once one creates it, also on network file systems."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, "wb") as file:  # noqa: PTH123  # a Path has no descriptor
        _write(file, own)
    return True


def _write(file: IO[bytes], own: RunMark) -> None:
    file.write(own.encode())
    file.flush()
    os.fsync(file.fileno())


def _is_gone_after_waiting(path: Path, out: Path) -> bool:
    """Wait until the file of another run is gone, or has not changed for long: its run was killed.

    Raises:
        RequestError: it has changed.
    """
    seen = read(path)
    host = "another run" if seen is None else f"a run on {seen.host}"
    rank_logs.to_console(f"waiting {STALE_SECONDS:.0f} s to see whether {host} still writes to {out}")
    end = time.monotonic() + STALE_SECONDS
    while time.monotonic() < end:
        time.sleep(min(1.0, STALE_SECONDS / 10))
        if not os.path.lexists(path):
            return True
        if (now := read(path)) != seen:
            raise in_use(out, now or seen)
    return False


def _is_own(mark: RunMark | None, own: RunMark) -> bool:
    return mark is not None and mark.token == own.token


def _beat(path: Path, own: RunMark, out: Path, is_over: threading.Event) -> None:
    """Rewrite the file again and again, and end this rank if another run has put its own there."""
    while not is_over.wait(BEAT_SECONDS):
        with suppress(OSError):  # of a file system that is away for the moment
            if _create(path, own):
                continue
            if (there := read(path)) is None or _is_own(there, own):  # None: it was damaged, and is repaired
                own.beats += 1
                with path.open("r+b") as file:
                    _write(file, own)
            elif not is_over.is_set():
                first_failure.end_rank(in_use(out, there))


def in_use(out: Path, theirs: RunMark | None) -> RequestError:
    """Return the error of a second run in the folder `out`."""
    who = "" if theirs is None else f": process {theirs.pid} on {theirs.host}"
    return RequestError(
        f"another run is writing to {out}{who}",
        because="two runs in one folder would overwrite each other's checkpoints",
        hint="wait for it to end, or choose another folder with --out",
    )
