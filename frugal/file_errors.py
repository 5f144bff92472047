"""The reason why a file could not be written or read, with the numbers of its file system, and a remedy.

The system reports many causes with the same error: no space may be bytes, inodes or a quota. `statvfs` tells which.
"""

import errno
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from frugal.errors import FrugalError, RequestError
from frugal.units import format_bytes


class Explanation(NamedTuple):
    """The reason of an error, one line with the file and the numbers, and a remedy, the beginning of a sentence."""

    because: str
    remedy: str


_NETWORK = "see that the file system is reachable again"
_REMEDIES = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room, or have the quota raised (`quota -s` shows it)",
    errno.EROFS: "mount it for writing (after a disk error Linux mounts read-only: see `dmesg`)",
    errno.EACCES: "ask its owner for the right to write there",
    errno.EPERM: "ask its owner for the right to write there",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`), or choose a file system that has larger ones",
    errno.ELOOP: "remove the link, if it is not yours",
    errno.EMFILE: "raise the limit on open files (`ulimit -n 4096`)",
    errno.ENFILE: "end other programs, or raise the limit on open files of this machine (sysctl fs.file-max)",
    errno.EIO: "look at the disk (`dmesg`)",
    **dict.fromkeys((errno.ESTALE, errno.ENOTCONN, errno.EREMOTEIO, errno.EHOSTDOWN, errno.ETIMEDOUT), _NETWORK),
}


def explain(error: OSError, path: Path | None = None) -> Explanation:
    """Explain an error of a file; `path` is that file, if the error does not name it."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
    because = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "see to it that it can be written")
    if name is not None:
        numbers = ""
        with suppress(OSError):  # a file system that does not answer either
            numbers, remedy = _cause(error.errno, Path(name).absolute(), remedy)
        because = f"{name}: {because}" + (f" ({numbers})" if numbers else "")
        because = because.encode(errors="backslashreplace").decode()  # names need not be text
    return Explanation(because, remedy)


OR_ELSEWHERE = "{}, or choose another folder with --out"
"""The hint of a run that has not begun, around the remedy."""

THEN_RESUME = "{}, then continue with --resume"
"""The hint of a run that can be resumed, around the remedy."""


@contextmanager
def failure(what: str, path: Path, hint: str = "{}", *, raises: type[FrugalError] = RequestError) -> Iterator[None]:
    """Turn an OSError inside the `with` block into one of a user, with its reason, and the remedy within `hint`.

    Raises:
        FrugalError: of the type `raises`.
    """
    try:
        yield
    except OSError as error:
        because, remedy = explain(error, path)
        raise raises(what, because=because, hint=hint.format(remedy)) from None


def _cause(number: int | None, path: Path, remedy: str) -> tuple[str, str]:
    """Return the numbers that matter for a cause, and its remedy."""
    path = next(each for each in (path, *path.parents) if os.path.exists(each))  # noqa: PTH110  # False for loops, too
    real = path.resolve()
    mount = next(each for each in (real, *real.parents) if each.is_mount())
    if number in (errno.ENOSPC, errno.EDQUOT):
        disk = os.statvfs(path)
        free, size = format_bytes(disk.f_bavail * disk.f_frsize), format_bytes(disk.f_blocks * disk.f_frsize)
        numbers = f"{free} of {size} are free at {mount}"
        if number == errno.EDQUOT:
            return f"the quota of {_user(os.geteuid())} is used up; {numbers}", remedy
        if disk.f_files and not disk.f_favail:
            remedy = f"remove files at {mount}: it is their number that is too large, not their size"
            return f"all {disk.f_files} inodes are in use at {mount}; {numbers}", remedy
        return numbers, f"{remedy} at {mount}"
    if number in (errno.EACCES, errno.EPERM):
        status = path.stat()
        mode = stat.filemode(status.st_mode)
        return f"{path} is {mode} of {_user(status.st_uid)}, we are {_user(os.geteuid())}", remedy
    if remedy == _NETWORK or number in (errno.EIO, errno.EROFS):
        return f"on the file system mounted at {mount}", remedy
    return "", remedy


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
