"""Data at an address of a storage, such as `s3://bucket/corpus/*.jsonl`: copied into the user's cache, then read.

So samples are those of the same files on a disk, to the byte. `datasets` could read addresses, too, but gives all rows
the same fields (`frugal.data.rows`), and refuses every storage where HF_HUB_OFFLINE keeps a cluster off the hub.

A copy is of one version of a file, by what the storage says of it (size, time, ETag): another version is another copy,
and the same is not fetched again. Copies are removed as tokenised data is: after 90 days without use, or beyond 200
GiB.
"""

import glob
import hashlib
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import platformdirs

from frugal import files, storages
from frugal.errors import RequestError
from frugal.units import GIB

OF_SAVED = ("state.json", "dataset_dict.json")
"""Files of which a dataset that `datasets` saved has one."""


def fetch(address: str) -> dict[str, Path] | None:
    """Return the copy of each file at an address, below it, or that matches it, by the file's address; sorted.

    None if that is a dataset that `datasets` saved, which reads it itself.

    Raises:
        RequestError: the storage has no such file, or cannot be read.
    """
    storages.check("--data", address)
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no type hints

    try:
        fs, path = url_to_fs(address)
        matches = (fs.glob if glob.has_magic(path) else fs.find)(path, detail=True).items()
        names = sorted(name for name, info in matches if info["type"] == "file" and "/." not in name.removeprefix(path))
        if any(name.endswith(OF_SAVED) for name in names):
            return None
        if not names:
            raise FileNotFoundError("no file of the storage, that is not hidden, has this name or is below it")
        return {fs.unstrip_protocol(name): _copy(fs, name) for name in names}
    except Exception as error:  # a storage's library may raise anything
        raise RequestError(
            f"cannot read the data {address}", because=storages.explained(error),
            hint="the storage's library finds credentials and endpoint itself, such as AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL of S3",
        ) from None  # fmt: skip


def _copy(fs: Any, name: str) -> Path:
    version = hashlib.sha256(f"{fs.unstrip_protocol(name)} {fs.ukey(name)}".encode()).hexdigest()
    copy = platformdirs.user_cache_path("frugal") / "fetched" / version / PurePosixPath(name).name
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with fs.open(name, "rb") as file:
            files.write_file(copy, iter(partial(file.read, 1 << 20), b""))
    files.touch(copy.parent)
    files.prune(copy.parents[1], 200 * GIB)
    return copy
