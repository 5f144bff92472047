"""A file with rows: what its name says of them, and its bytes, out of what they are compressed in.

`.gz`, `.bz2`, `.xz` and `.zst` hold one file, of the kind that the rest of the name says: `chats.jsonl.gz`. A `.zip` is
read like a folder. Nothing is written to disk. zstd is pyarrow's: as other readers it reads all frames of a file, and a
file that was cut off is an error.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import fsencode
from pathlib import Path, PurePosixPath
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints

from frugal.errors import RequestError, first_line

_KINDS = {
    ".jsonl": "jsonl", ".jsonlines": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet",
}  # fmt: skip

ARCHIVE = ".zip"


def _zstd(file: IO[bytes]) -> Any:
    return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd"))


_READERS: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _zstd}

SUFFIXES = frozenset((*_KINDS, *_READERS, ARCHIVE, ".txt"))
"""Ends of names that only files with rows have."""


@dataclass(frozen=True)
class DataFile:
    """A file with rows, by default of the kind that its name says.

    Attributes:
        path: of the file, or of the archive that it is in.
        kind: `jsonl`, `json`, `csv`, `tsv`, `parquet`, `text`, or `source` for text that may not be UTF-8.
        member: its name in the archive; empty for a file of its own.
        address: of what `path` is a copy of; empty for a file that is none.
    """

    path: Path
    kind: str = ""
    member: str = ""
    address: str = ""

    def __post_init__(self) -> None:
        if not self.kind:
            name = PurePosixPath(self.member or self.path)
            name = name if self._reader is None else name.with_suffix("")
            object.__setattr__(self, "kind", _KINDS.get(name.suffix.lower(), "text"))

    @property
    def name(self) -> str:
        """Its name as it can be printed and kept."""
        return f"{self.address}/{self.member}".rstrip("/") if self.address else shown(self.path / self.member)

    @property
    def is_plain(self) -> bool:
        """True if it can be read from any byte on."""
        return not self.member and self._reader is None

    @property
    def _reader(self) -> Callable[[Any], Any] | None:
        return _READERS.get(PurePosixPath(self.member or self.path).suffix.lower())

    @contextmanager
    def open(self) -> Iterator[io.BufferedReader]:
        """Open the file; what is read is not compressed.

        Raises:
            RequestError: it is damaged.
            OSError: it cannot be read.
        """
        try:
            with ExitStack() as opened:
                file: Any = opened.enter_context(self.path.open("rb"))
                if self.member:
                    file = opened.enter_context(opened.enter_context(ZipFile(file)).open(self.member))
                if self._reader is not None:
                    file = opened.enter_context(self._reader(file))
                yield file
        except (EOFError, zlib.error, lzma.LZMAError, BadZipFile, RuntimeError, KeyError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise RequestError(f"{self.name} cannot be decompressed", because=first_line(error)) from None


def files_at(path: Path) -> list[DataFile]:
    """Return the file at `path`, or those in an archive: sorted, without hidden ones, as in a folder.

    Raises:
        RequestError: it is no archive, or an empty one.
    """
    if path.suffix.lower() != ARCHIVE:
        return [DataFile(path)]
    try:
        with ZipFile(path) as archive:
            names = [each.filename for each in archive.infolist() if not each.is_dir()]
    except (BadZipFile, ValueError, NotImplementedError) as error:
        raise RequestError(f"{shown(path)} is no zip archive", because=first_line(error)) from None
    visible = (name for name in names if not any(part.startswith((".", "__MACOSX")) for part in name.split("/")))
    members = [DataFile(path, member=name) for name in sorted(visible)]
    if not members:
        raise RequestError(f"the archive {shown(path)} is empty", because="it has no file that is not hidden")
    return members


def shown(path: str | Path) -> str:
    """Return a name as it can be printed and kept: bytes that are not UTF-8 as `\\xff`."""
    return fsencode(path).decode("utf-8", "backslashreplace")
