"""The secret of a run, by which its ranks know each other from strangers.

`frugal train` makes one of 256 bits for each run and gives it to its ranks: in their environment, which only the same
user can read; on other hosts it arrives through ssh's standard input. Ranks that are started otherwise are given a
file, in FRUGAL_SECRET_FILE. Ranks of one host that were given nothing share a file in their user's cache folder.
"""

import os
import secrets
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

import platformdirs

from frugal.distributed import env
from frugal.errors import RequestError, failure, refuse

SECRET, SECRET_FILE = "FRUGAL_SECRET", "FRUGAL_SECRET_FILE"
"""Variables of the environment: the secret itself, and the file that holds it."""

FEWEST_BYTES, MOST_BYTES = 16, 4096
_MAKE_ONE = f"(umask 077; head -c 32 /dev/urandom | base64 > FILE), then export {SECRET_FILE}=FILE on every host"


def make() -> str:
    """Return a new secret of 256 bits."""
    return secrets.token_hex(32)


@cache  # the variable is taken out of the environment, where what a rank starts would inherit it
def of_run() -> bytes | None:
    """Return this run's secret; None where the ranks of several hosts were given none.

    Raises:
        RequestError: the file cannot be read, others could read it too, or it is too short.
    """
    text, path = os.environ.pop(SECRET, None), os.environ.get(SECRET_FILE)
    if text is None and path is not None:
        return read(Path(path))
    if text is None and env.is_on_one_host():
        return _of_user()
    return None if text is None else _long_enough(text.encode(), f"${SECRET}")


def read(path: Path) -> bytes:
    """Return the secret in a file. Raises as `of_run`."""
    with failure(f"cannot read {SECRET_FILE} {path}", OSError, hint=f"make one: {_MAKE_ONE}"):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a fifo would be waited for
    with open(descriptor, "rb") as file:  # noqa: PTH123  # the file that is checked must be the one that is read
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            why = "it is no regular file"
        elif status.st_uid != os.geteuid():
            why = f"it belongs to user {status.st_uid}, and this process to user {os.geteuid()}"
        elif status.st_mode & 0o077:
            why = f"its mode is {stat.S_IMODE(status.st_mode):03o}: others than its owner can read or change it"
        else:
            return _long_enough(file.read(MOST_BYTES), str(path))
    raise RequestError(f"{SECRET_FILE} {path} is no secret", because=why, hint=f"make a new one: {_MAKE_ONE}")


def _long_enough(secret: bytes, where: str) -> bytes:
    refuse(
        (
            len(secret.strip()) < FEWEST_BYTES,
            f"the secret in {where} is too short",
            f"it has {len(secret.strip())} bytes, and {FEWEST_BYTES} or more cannot be guessed",
            f"make one: {_MAKE_ONE}",
        )
    )
    return secret.strip()


def _of_user() -> bytes | None:
    """Return this user's secret on this host, made on first use; None where there is no folder for it."""
    path = Path(platformdirs.user_cache_dir("frugal")) / "secret"
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".secret-{secrets.token_hex(8)}")
        if not path.exists():
            new.touch(mode=0o600)
            new.write_text(make())
            with suppress(FileExistsError):  # another rank's, made at the same time
                path.hardlink_to(new)
            new.unlink()
        return read(path)
    return None
