"""The run's folder, held open, so that a run notices when it is moved or deleted under it.

A run that goes by the folder's name alone would make a new folder of that name at its next save, in which the earlier
checkpoints are missing, or save into another run's. Held open, a folder that was moved still tells where it is, and the
run goes on there: its files are all together, and nothing is lost. Of one that was deleted nothing is left but what the
ranks have in memory. `frugal.training.checkpoint.saving` saves that once more, into a new folder, and the run ends.

Locks do not reach everywhere: some network file systems have none, and NFS locks a folder for its own host alone. So a
run keeps a file there, too, and writes it anew every `BEAT_SECONDS`. Another run that finds it waits to see it change.
It compares what it reads with what it has read before, and no times: clocks of hosts may differ. A file that does not
change for `STALE_SECONDS` is of a run that was killed. Should that run only have been stopped for so long, it finds the
file of its successor in the place of its own when it goes on, and ends.
"""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from frugal import files
from frugal.config.run_settings import RunSettings
from frugal.distributed import first_failure, rank_logs
from frugal.errors import RequestError

if TYPE_CHECKING:
    import torch.distributed as dist

logger = logging.getLogger("frugal")

MARK = ".running"
BEAT_SECONDS, STALE_SECONDS = 10.0, 60.0
_MARK_BYTES = 512


class HeldFolder:
    """Where a run's folder is by now, the same on all ranks.

    `descriptor`: of the open folder, on rank 0; None on others, and where nobody looks whether it is still there.
    `settings`: those of the run, whose `out` is where the folder was when ranks last asked.
    """

    def __init__(self, settings: RunSettings, descriptor: int | None = None) -> None:
        self.settings = replace(settings, out=settings.out.absolute())
        self._descriptor = descriptor
        self._status = None if descriptor is None else os.fstat(descriptor)  # network disks may not say it later

    def follow(self, votes: "dist.ProcessGroup | None") -> bool:
        """Ask rank 0 where the folder is: whether it is anywhere. Collective."""
        from frugal.distributed.exchange import from_rank_0  # brings torch along, which a parent of ranks does not need

        before = self.settings.out
        now = from_rank_0(os.fsencode(self.look() or b""), bytes, votes)
        if now and now != os.fsencode(before):
            self.settings = replace(self.settings, out=Path(os.fsdecode(now)))
            if self._descriptor is not None:
                logger.warning(
                    "the run's folder was moved: %s is now %s, where the run goes on", before, self.settings.out
                )
        return bool(now)

    def replace(self, out: Path) -> None:
        """Go on in another folder, in place of one that is gone."""
        self.settings, self._descriptor = replace(self.settings, out=out), None

    @property
    def is_deleted(self) -> bool:
        """Whether this rank knows that it was deleted; quickly asked."""
        return self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0

    def look(self) -> Path | None:
        """Where it is; None if it was deleted, or no name leads to it any more."""
        out = self.settings.out
        if self._descriptor is None or self._is_at(out):
            return out
        now = Path(f"/proc/self/fd/{self._descriptor}").readlink()
        return now if self._is_at(now) else None

    def _is_at(self, path: Path) -> bool:
        try:
            return self._status is not None and os.path.samestat(self._status, path.stat())
        except OSError:
            return False


class _Mark(msgspec.Struct, kw_only=True):
    """Who writes to a run's folder. `boot` and `namespace` say which `pid` is meant, `began` that it is not another's.

    `folder`: the inode that it was written for; a copy of the folder has another one.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    began: str
    folder: int
    token: str
    beats: int = 0

    def encode(self) -> bytes:
        """Return the content of the file, always of the same size: it is written in place."""
        return msgspec.json.encode(self).ljust(_MARK_BYTES - 1) + b"\n"


def _own_mark(folder: int) -> _Mark:
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return _Mark(
        host=socket.gethostname()[:64], boot=boot, namespace=namespace, pid=os.getpid(), began=_began(os.getpid()),
        folder=os.fstat(folder).st_ino, token=secrets.token_hex(8),
    )  # fmt: skip


def _began(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; nothing if there is none."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


@contextmanager
def marked(out: Path, folder: int, *, is_locked: bool) -> Iterator[None]:
    """Keep the file that says that this process writes to `out`, of which `folder` is a descriptor.

    `is_locked`: it has the lock as well, which no other process of this host has then.

    Raises:
        RequestError: another run writes there.
        OSError: the file cannot be written.
    """
    own, path = _own_mark(folder), Path(f"/proc/self/fd/{folder}", MARK)  # wherever the folder is moved to
    was_there = False
    while not (_is_made(path, own) and (not was_there or _is_kept(path, own))):
        was_there = _wait_for_end(path, own, out, is_locked=is_locked)
    is_over = threading.Event()
    beating = threading.Thread(target=_beat, args=(path, own, out, is_over), name="heartbeat", daemon=True)
    beating.start()
    try:
        yield
    finally:
        is_over.set()
        beating.join(BEAT_SECONDS)  # its file system may be away
        if _holder(_read(path)) == own.token:
            path.unlink(missing_ok=True)


def _is_made(path: Path, own: _Mark) -> bool:
    """Make the file, unless there is one; of two processes at once one makes it, on network file systems, too."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, own.encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True


def _is_kept(path: Path, own: _Mark) -> bool:
    """Whether the file is still there after a while: of two that remove an old one, the slower may remove the new."""
    time.sleep(min(1.0, STALE_SECONDS / 10))
    return _holder(_read(path)) == own.token


def _wait_for_end(path: Path, own: _Mark, out: Path, *, is_locked: bool) -> bool:
    """Wait until the file of another run is gone, or is known to be of one that has ended, and is removed.

    Returns whether another process may be doing the same.

    Raises:
        RequestError: that run has not ended.
    """
    seen = _read(path)
    if seen is None:
        return True
    theirs = _decoded(seen)
    if not _has_ended(theirs, own, is_locked=is_locked):
        if theirs is not None and _is_of_here(theirs, own):
            raise _in_use(out, theirs)
        host = "another run" if theirs is None else f"a run on {theirs.host}"
        rank_logs.to_console(f"waiting {STALE_SECONDS:.0f} s to see whether {host} still writes to {out}")
        end = time.monotonic() + STALE_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, STALE_SECONDS / 10))
            if (now := _read(path)) != seen:
                if now is None:
                    return True
                raise _in_use(out, _decoded(now) or theirs)
    aside = path.with_name(f"{MARK}-{own.token}")
    with suppress(FileNotFoundError):  # another process was first
        path.rename(aside)
        if _read(aside) != seen:  # it was first, and has made its own
            with suppress(OSError):  # its next beat makes it again
                os.link(aside, path)
        aside.unlink()
    return not (is_locked and theirs is not None and theirs.boot == own.boot)


def _is_of_here(theirs: _Mark, own: _Mark) -> bool:
    """Whether its number of a process means one of those that this process can see."""
    return bool(own.boot) and (theirs.boot, theirs.namespace) == (own.boot, own.namespace)


def _has_ended(theirs: _Mark | None, own: _Mark, *, is_locked: bool) -> bool:
    """Whether it is known without waiting that the run which wrote this does so no longer."""
    if theirs is None:
        return False
    if theirs.folder != own.folder or (is_locked and own.boot and theirs.boot == own.boot):
        return True
    return _is_of_here(theirs, own) and (theirs.pid == own.pid or _began(theirs.pid) != theirs.began)


def _beat(path: Path, own: _Mark, out: Path, is_over: threading.Event) -> None:
    """Write the file anew again and again, and end this rank where another run has put its own there."""
    while not is_over.wait(BEAT_SECONDS):
        with suppress(OSError):  # of a file system that is away for the moment
            there = _read(path)
            if there is None:
                _is_made(path, own)
            elif _holder(there) == own.token:
                own.beats += 1
                with path.open("r+b") as file:
                    file.write(own.encode())
                    file.flush()
                    os.fsync(file.fileno())
            elif not is_over.is_set():
                first_failure.end_rank(_in_use(out, _decoded(there)))


def _read(path: Path) -> bytes | None:
    try:
        return files.read_regular(path, 8 * _MARK_BYTES)
    except FileNotFoundError:
        return None


def _decoded(content: bytes | None) -> _Mark | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content or b"", type=_Mark)
    return None


def _holder(content: bytes | None) -> str | None:
    mark = _decoded(content)
    return None if mark is None else mark.token


def _in_use(out: Path, theirs: _Mark | None) -> RequestError:
    who = "" if theirs is None else f": process {theirs.pid} on {theirs.host}"
    return RequestError(
        f"another run is writing to {out}{who}",
        because="two runs in one folder would overwrite each other's checkpoints",
        hint="wait for it to end, or choose another folder with --out",
    )
