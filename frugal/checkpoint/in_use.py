"""Two runs in one folder: the second one is refused, on any host and any file system.

A run locks its folder (flock): on its own host the kernel refuses the second, and however a run ends, its lock ends
with it. Most file systems keep such a lock to one host. So a run also keeps a file in its folder, which it rewrites
every `BEAT_SECONDS`. Another run that finds the file of another host waits to see it change. It compares contents and
no times, since clocks of hosts may differ. A file that does not change for `STALE_SECONDS` belongs to a run that was
killed. If that run was only stopped for so long, it finds the file of its successor when it continues, and ends.
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
    """The content of the file: which process writes to the folder. `boot` names this start of its host's kernel."""

    host: str
    boot: str
    pid: int
    token: str
    beats: int = 0

    @classmethod
    def of_this_process(cls) -> "RunMark":
        """Return a mark with a new token."""
        boot = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(host=socket.gethostname()[:64], boot=boot, pid=os.getpid(), token=secrets.token_hex(8))

    def encode(self) -> bytes:
        """Return the content of the file, always of the same size: it is rewritten in place."""
        return msgspec.json.encode(self).ljust(_MARK_BYTES - 1) + b"\n"


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
    own, is_over = RunMark.of_this_process(), threading.Event()
    try:
        _claim(folder, path, own, out)
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
                fcntl.flock(folder, fcntl.LOCK_UN)  # also for processes that were forked meanwhile
    finally:
        os.close(folder)


def _claim(folder: int, path: Path, own: RunMark, out: Path) -> None:
    """Lock the folder, and create its file or replace that of a run which has ended."""
    is_locked = False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # `frugal report` sees it, too
        is_locked = True
    except BlockingIOError:
        raise in_use(out, read(path)) from None
    except OSError:  # a file system without locks
        pass
    while not _create(path, own):
        theirs = read(path)
        is_of_this_host = own.boot and theirs is not None and (theirs.host, theirs.boot) == (own.host, own.boot)
        if not (is_locked and is_of_this_host) and _is_gone_after_waiting(path, out):
            continue
        files.write_file(path, own.encode())
        time.sleep(min(1.0, STALE_SECONDS / 10))  # of several that found it the last one to write has it
        if not _is_own(now := read(path), own):
            raise in_use(out, now)
        return


def _create(path: Path, own: RunMark) -> bool:
    """Create the file, unless it exists. Of two processes at once one creates it, also on network file systems."""
    try:
        with path.open("xb") as file:
            _write(file, own)
    except FileExistsError:
        return False
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
