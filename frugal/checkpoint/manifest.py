"""The manifest of a checkpoint folder: its files with their checksums, and what wrote them.

Checkpoints are atomic. A folder is written as `NAME.tmp`, every file is flushed to the disk, `manifest.json` is written
last, then the folder is renamed to `NAME` and the pointer `latest` replaced. A crash at any point leaves the previous
checkpoint and its pointer as they were.
"""

import errno
import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from frugal import file_errors, files
from frugal.errors import CheckpointError

SCHEMA = 2
MANIFEST = "manifest.json"
POINTER = "latest"
MOST_BYTES = 1 << 30
"""The limit of files that are read as a whole. Ten thousand ranks have a manifest of 6 MB."""

_NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,14})(\.old)?", re.ASCII)
_FILE = re.compile(r"\w[\w.-]{,200}", re.ASCII)


_NEVER_READABLE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.EFBIG, errno.ELOOP}
"""Errors of the file itself; any other, such as EIO and ESTALE, may be gone at the next attempt."""


class OutOfReachError(ValueError):
    """A file that cannot be read for the moment; nothing is known of its content."""


def unreadable(error: OSError, path: Path) -> ValueError:
    """Return the error, with its reason, of a file of a checkpoint that cannot be read."""
    kind = ValueError if error.errno in _NEVER_READABLE else OutOfReachError
    return kind(file_errors.explain(error, path).because)


@dataclass(frozen=True, kw_only=True)
class File:
    """One file: its length in bytes, its SHA-256, and the rank that wrote it."""

    num_bytes: int
    sha256: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and what wrote them.

    Attributes:
        world_size: ranks that wrote it.
        zero_stage: 0 to 3.
        offload: place of the optimizer's states and of the parameters: none, cpu or nvme.
        strategy: all of the plan's strategy, in words.
        optimizer: in words; with its implementation, if that lays its states out differently.
        model: the request's reference to it.
        shapes: SHA-256 of the names and shapes of the model's parameters.
        base: digest of the frozen weights that are not in the checkpoint, see `frozen_base`; None: all weights are.
        recipe: what decides which weights come out, by name; it stays the same when a run is resumed.
    """

    schema: int = SCHEMA
    step: int
    world_size: int
    zero_stage: int
    offload: tuple[str, str]
    strategy: str
    optimizer: str
    model: str
    shapes: str
    recipe: dict[str, bool | int | float | str | None]
    plan_digest: str
    versions: dict[str, str]
    files: dict[str, File]
    base: str | None = None


def digest_of(shapes: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Return `Manifest.shapes` of names and shapes."""
    return hashlib.sha256(repr(list(shapes)).encode()).hexdigest()


def step_of(name: str) -> int | None:
    """Return the step of the checkpoint that has this name; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints by their names, unread: the one that `latest` names, then the others from new to old.

    `NAME.old` was being replaced by another of its name when a crash came.

    Raises:
        CheckpointError: the folder cannot be looked into.
    """
    entries: list[Path] = []
    failing = file_errors.failure(f"cannot look for checkpoints in {folder}", folder, raises=CheckpointError)
    with failing, suppress(FileNotFoundError, NotADirectoryError):
        entries = list(folder.iterdir())
    steps = {entry: step for entry in entries if (step := step_of(entry.name)) is not None}
    paths = sorted(steps, key=lambda path: (-steps[path], path.suffix))
    try:
        latest = files.read_regular(folder / POINTER, MOST_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        return paths
    return sorted(paths, key=lambda path: path.name != latest)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint to resume from, unread; None if there is none."""
    return next(iter(checkpoints_in(folder)), None)


def file_entry(path: Path, rank: int) -> File:
    """Flush a file to the disk, and return its entry in the manifest."""
    files.flush(path)
    with files.open_regular(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return File(num_bytes=path.stat().st_size, sha256=sha256, rank=rank)


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Complete the folder `NAME.tmp` with its manifest, rename it and point `latest` to it; return its path."""
    final = temporary.with_suffix("")
    files.write_file(temporary / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    files.replace_own_folder(temporary, final)
    files.write_file(final.parent / POINTER, final.name.encode() + b"\n")
    return final


def read(folder: Path) -> Manifest:
    """Return the folder's manifest.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another schema; the message says which.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(files.read_regular(path, MOST_BYTES), type=Manifest, strict=True)
    except OSError as error:
        raise unreadable(error, path) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a manifest: {error}") from None
    if manifest.schema != SCHEMA:
        raise ValueError(f"{path} has schema {manifest.schema}, this frugal reads schema {SCHEMA}")
    if not all(_FILE.fullmatch(name) for name in manifest.files):
        raise ValueError(f"{path} names files outside its folder")
    return manifest


def first_damage(folder: Path, manifest: Manifest, rank: int, world_size: int) -> str | None:
    """Return what is wrong with the files that this rank checks, or None. Over all ranks every file is checked once.

    Raises:
        ValueError: a file cannot be read; OutOfReachError: for the moment.
    """
    for name, file in manifest.files.items():
        if file.rank % world_size != rank:
            continue
        path = folder / name
        try:
            with files.open_regular(path) as opened:
                num_bytes = os.fstat(opened.fileno()).st_size
                if num_bytes != file.num_bytes:
                    return f"{path} has {num_bytes} bytes instead of {file.num_bytes}"
                if hashlib.file_digest(opened, "sha256").hexdigest() != file.sha256:
                    return f"{path} does not have the content that was written (SHA-256 differs)"
        except FileNotFoundError:
            return f"{path} is not there; rank {file.rank} of {manifest.world_size} wrote it"
        except OSError as error:
            raise unreadable(error, path) from None
    return None
