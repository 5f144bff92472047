"""Why a file could not be written or read, with the numbers of its file system, and what would help.

What the system says is the same for many causes: no space may be bytes, inodes or a quota. `statvfs` tells them apart.
"""

import errno
import os
import pwd
import resource
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from frugal.units import format_bytes


class Explanation(NamedTuple):
    """`because`: one line with the file and the numbers. `remedy`: what to do, as the begin of a sentence."""

    because: str
    remedy: str


def explain(error: OSError, path: Path | None = None) -> Explanation:
    """What an error of a file comes from; `path` is that file, where the error does not name it."""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else path
    what = error.strerror or str(error) or type(error).__name__
    if name is None:
        return Explanation(what, _REMEDIES.get(error.errno or 0, _ANYTHING))
    path = Path(name)
    place = _existing(path)
    numbers, remedy = "", _REMEDIES.get(error.errno or 0, _ANYTHING)
    with suppress(OSError):  # a file system that says nothing either
        numbers, remedy = _of_cause(error.errno, path, place, remedy)
    because = f"{path}: {what}" + (f" ({numbers})" if numbers else "")
    return Explanation(because.encode(errors="backslashreplace").decode(), remedy)  # names need not be text


def or_elsewhere(remedy: str) -> str:
    """The hint of a run that is not begun."""
    return f"{remedy}, or choose another folder with --out"


def then_resume(remedy: str) -> str:
    """The hint of a run that has something to continue from."""
    return f"{remedy}, then continue with --resume"


_ANYTHING = "see to it that it can be written"

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


def _of_cause(number: int | None, path: Path, place: Path, remedy: str) -> tuple[str, str]:
    """The numbers that matter for a cause, and what helps."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        return _space(number, place, remedy)
    if number == errno.EROFS:
        return f"the file system mounted at {_mount(place)} is read-only", remedy
    if number in (errno.EACCES, errno.EPERM):
        status = place.stat()
        return (
            f"{place} is {stat.filemode(status.st_mode)} of {_user(status.st_uid)}, we are {_user(os.geteuid())}",
            remedy,
        )
    if number == errno.ENAMETOOLONG:
        longest = max(path.parts, key=lambda part: len(os.fsencode(part)))
        most = os.statvfs(place).f_namemax
        return f"a name has {len(os.fsencode(longest))} bytes, and may have {most}", remedy
    if number == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return "" if most == resource.RLIM_INFINITY else f"a file may have {format_bytes(most)} here", remedy
    if number == errno.EMFILE:
        return f"a process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} open files here", remedy
    if remedy == _NETWORK or number == errno.EIO:
        return f"on the file system mounted at {_mount(place)}", remedy
    return "", remedy


def _space(number: int, place: Path, remedy: str) -> tuple[str, str]:
    """Which of bytes, inodes and quota is used up."""
    of, mount = os.statvfs(place), _mount(place)
    free = f"{format_bytes(of.f_bavail * of.f_frsize)} of {format_bytes(of.f_blocks * of.f_frsize)} are free at {mount}"
    if number == errno.EDQUOT:
        return f"the quota of {_user(os.geteuid())} is used up; {free}", remedy
    if of.f_files and not of.f_favail:
        return (
            f"all {of.f_files} inodes are in use at {mount}; {free}",
            f"remove files at {mount}: it is their number that is too large, not their size",
        )
    return free, f"{remedy} at {mount}"


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that can be looked at."""
    path = path.absolute()
    for each in (path, *path.parents):
        try:
            each.stat()
        except OSError:
            continue
        return each
    return path


def _mount(place: Path) -> Path:
    """Where the file system of a path is mounted."""
    place = place.resolve()
    while not place.is_mount():
        place = place.parent
    return place


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
