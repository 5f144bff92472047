"""The files of a checkpoint folder: listed with their checksums, made durable, put in place at once.

A folder appears under its name only when it is whole: it is written aside as `NAME.tmp`, every file is flushed to
the disk, `manifest.json` is written last, then the folder is renamed and the pointer `latest` replaced. A crash at
any point leaves the previous checkpoint and its pointer as they were.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec

SCHEMA = 2
MANIFEST = "manifest.json"
POINTER = "latest"


@dataclass(frozen=True, kw_only=True)
class File:
    """One file: its length in bytes, its SHA-256, and the rank that wrote it and will read it."""

    num_bytes: int
    sha256: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of and what it was made by.

    Attributes:
        world_size: ranks that wrote it.
        zero_stage: 0 to 3.
        offload: where the optimizer's states and the parameters lived: none, cpu or nvme.
        strategy: all of the plan's strategy, in words.
        optimizer: in words; with its implementation, where that keeps its states in another way.
        model: as it was asked for.
        shapes: the SHA-256 of the names and shapes of the model's parameters.
        recipe: what decides which weights come out, by name: the same in a run that continues.
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


def candidates(folder: Path) -> list[Path]:
    """The complete-looking checkpoints: first the one `latest` names, then the others from new to old.

    `NAME.old` is one that was just making room for another of its name when a crash came.
    """
    found = sorted((path for path in folder.glob("step-*") if path.suffix in ("", ".old")), reverse=True)
    try:
        pointed = folder / (folder / POINTER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return found
    return [path for path in found if path == pointed] + [path for path in found if path != pointed]


def newest(folder: Path) -> Path | None:
    """The checkpoint to continue from, without looking into it; None if there is none."""
    return next(iter(candidates(folder)), None)


def checksum(path: Path) -> str:
    """SHA-256 of the file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe(path: Path, rank: int) -> File:
    """The file's entry in the manifest; the file is on the disk when this returns."""
    flush(path)
    return File(num_bytes=path.stat().st_size, sha256=checksum(path), rank=rank)


def flush(path: Path) -> None:
    """Wait until the disk has the file's content, or the folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(path: Path, data: bytes) -> None:
    """Put `data` in place of whatever `path` held, all of it or nothing."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(data)
    flush(aside)
    aside.replace(path)
    flush(path.parent)


def seal(aside: Path, manifest: Manifest) -> Path:
    """Write the manifest into the folder `NAME.tmp` and give it its name; a folder of that name makes room."""
    write(aside / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
    return put_in_place(aside)


def put_in_place(aside: Path) -> Path:
    """Rename the complete folder `NAME.tmp` to `NAME`; a folder of that name makes room."""
    final = aside.with_suffix("")
    if final.exists():
        old = final.with_suffix(".old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    aside.rename(final)
    flush(final.parent)
    shutil.rmtree(final.with_suffix(".old"), ignore_errors=True)
    return final


def read(folder: Path) -> Manifest:
    """The folder's manifest.

    Raises:
        ValueError: there is none, it cannot be read, or it is of another schema; the message says which.
    """
    path = folder / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest, strict=True)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a manifest: {error}") from None
    if manifest.schema != SCHEMA:
        raise ValueError(f"{path} has schema {manifest.schema}, this frugal reads schema {SCHEMA}")
    if any(Path(name).name != name for name in manifest.files):
        raise ValueError(f"{path} names files outside its folder")
    return manifest


def first_damage(folder: Path, manifest: Manifest, rank: int, world_size: int) -> str | None:
    """What is wrong with the files this rank answers for, or None. Over all ranks every file is checked once."""
    for name, file in manifest.files.items():
        if file.rank % world_size != rank:
            continue
        path = folder / name
        try:
            num_bytes = path.stat().st_size
            if num_bytes != file.num_bytes:
                return f"{path} has {num_bytes} bytes instead of {file.num_bytes}"
            if checksum(path) != file.sha256:
                return f"{path} does not have the content that was written (SHA-256 differs)"
        except FileNotFoundError:
            return f"{path} is not there; rank {file.rank} of {manifest.world_size} wrote it"
        except OSError as error:
            return f"{path}: {error.strerror}"
    return None
