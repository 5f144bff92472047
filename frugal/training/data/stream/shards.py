"""The rows of sources in shards, which are read one after another, so that going on need not read what was before.

`datasets.IterableDataset` goes on at the shard where it stopped, and reads that one again up to its place. With files
as shards, as `load_dataset(..., streaming=True)` has them, that may be all of a file of a terabyte. So jsonl and text
are cut at the ends of lines into stretches of 64 MiB, and parquet into its row groups. Files of json and csv are one
shard each: where a row of theirs begins is known when all before was read. So is what a user's code yields.

A row goes through the library as the bytes it had in the file, or pickled, in columns of fixed types. `datasets` itself
gives all rows of a stretch the same fields, with None for those that a row lacks: arguments of a tool call, too.
"""

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from frugal.errors import RequestError, first_line
from frugal.training.data import sources as documents
from frugal.training.data.chat import formats
from frugal.training.data.rows import (
    STRETCH_BYTES,
    BadRow,
    Columns,
    Row,
    json_row,
    most_bytes,
    not_text,
    read,
    read_line,
    shown,
    text_row,
)  # fmt: skip
from frugal.training.data.sources import DocumentSource

SHARD_BYTES = 64 << 20
_LOOKED_AT = 64 << 10  # bytes of each end of a file that its fingerprint is of: reading all of it takes hours

_AS_BYTES = ("jsonl", "text", "source")


@dataclass(frozen=True)
class HeldOut:
    """Rows that are kept from training: of the first shard of a source each `every`-th, from the first on, `most`."""

    every: int
    most: int

    def has(self, number: int) -> bool:
        """Whether row `number` of the first shard, from 0, is one."""
        return number % self.every == 0 and number // self.every < self.most


@dataclass(frozen=True)
class Shard:
    """Rows that are read in one go.

    Attributes:
        part: number of the file, or of what else is a source, among those of all sources.
        name: of the file; of something else, as `--data` names it.
        kind: of the file; None: no file.
        begin, end: in bytes of the file; of parquet in row groups.
        columns: where the rows have their texts.
        held_out: what to leave out of it.
    """

    part: int
    name: str
    kind: str | None
    begin: int
    end: int
    columns: Columns
    held_out: HeldOut | None = None


@dataclass(frozen=True)
class StreamSource:
    """What one `--data` names: its shards in the order of the files. `fingerprint`: by size and ends of each file."""

    name: str
    fingerprint: str
    shards: tuple[Shard, ...]


def find_streams(names: Sequence[str], columns: Columns, held_out: HeldOut | None) -> list[StreamSource]:
    """The sources with these names, one for each, in order.

    Raises:
        RequestError: there is none, or it cannot be streamed.
    """
    if not names:
        raise RequestError("no data was given", hint="pass --data PATH")
    streams: list[StreamSource] = []
    number = 0
    parts = [list(_parts(name)) for name in names]
    documents.tell_repeated(each for each, _ in chain.from_iterable(parts) if isinstance(each, Path))
    for name, its_parts in zip(names, parts, strict=True):
        shards: list[Shard] = []
        prints: list[str] = []
        for each, kind in its_parts:
            if isinstance(each, Path):
                its_shards, its_print = _of_file(each, kind, number, columns)
            else:
                its_shards, its_print = [Shard(number, each.name, None, 0, 0, columns)], each.fingerprint
            shards += its_shards
            prints.append(its_print)
            number += bool(its_shards)  # an empty file has none
        if not shards:
            raise RequestError(f"there is no text in {shown(name)}", because="it is empty")
        shards[0] = replace(shards[0], held_out=held_out)
        digest = hashlib.sha256("\n".join(prints).encode()).hexdigest()
        streams.append(StreamSource(shown(name), f"stream:{digest}", tuple(shards)))
    return streams


def _parts(name: str) -> Iterator[tuple[Path | DocumentSource, str | None]]:
    """The files that a name stands for, with what they are where their names do not say it; or something else."""
    for each, parts in documents.find_named([name], _not_from_hub):
        if each == documents.STDLIB and isinstance(parts[0], DocumentSource):
            yield from ((path, "source") for path in documents.stdlib_files())
        else:
            yield from ((part, None) for part in parts)


def _not_from_hub(name: str) -> DocumentSource:
    raise RequestError(
        f"there is no data to stream at {name}",
        because="no such file or folder, and --stream reads no data set of the hub itself",
        hint="write a function that returns load_dataset(..., streaming=True), and name it: --data file.py:function",
    )


def _of_file(path: Path, kind: str | None, part: int, columns: Columns) -> tuple[list[Shard], str]:
    """The shards of a file, and what tells it from others."""
    kind = kind or documents.kind_of(path)
    try:
        size = path.stat().st_size
        its_print = f"{path.name}:{size}:{_ends(path, size)}"
    except OSError as error:
        raise RequestError(f"cannot read {shown(path)}", because=str(error.strerror)) from None
    if kind == "parquet":
        borders = list(range(_num_row_groups(path) + 1))
    else:
        borders = [*range(0, size, SHARD_BYTES if kind in _AS_BYTES else max(size, 1)), size]
    return [Shard(part, str(path), kind, *pair, columns) for pair in pairwise(borders)], its_print


def _ends(path: Path, size: int) -> str:
    with path.open("rb") as file:
        first = file.read(_LOOKED_AT)
        file.seek(max(0, size - _LOOKED_AT))
        return hashlib.blake2b(first + file.read()).hexdigest()


def _num_row_groups(path: Path) -> int:
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

    try:
        return int(pq.read_metadata(path).num_row_groups)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{shown(path)} is not a parquet file", because=first_line(error)) from None


FEATURES = {"part": "int32", "where": "string", "kind": "string", "row": "binary"}
"""Of an example that the library is given: where a row is from, and its bytes."""


def examples(shards: list[Shard]) -> Iterator[dict[str, Any]]:
    """What `datasets.IterableDataset.from_generator` is given: the rows of these shards as examples."""
    for shard in shards:
        for number, example in enumerate(_examples(shard)):
            if shard.held_out is None or not shard.held_out.has(number):
                yield example


def held_out(shard: Shard) -> Iterator[dict[str, Any]]:
    """The rows of a first shard that are kept from training."""
    if shard.held_out is None:
        return
    for number, example in enumerate(_examples(shard)):
        if number // shard.held_out.every >= shard.held_out.most:
            return
        if shard.held_out.has(number):
            yield example


def row_of(example: dict[str, Any], columns: Columns) -> Row:
    """The row that an example was made of."""
    where, kind, raw = example["where"], example["kind"], example["row"]
    if kind == "jsonl":
        return where, json_row(raw)
    if kind in ("text", "source"):
        name, _, line = where.rpartition(":") if ", byte " not in where else (where, "", "1")
        return text_row(raw, kind, columns, where, name, int(line))
    return where, pickle.loads(raw)  # this process has pickled it


def _examples(shard: Shard) -> Iterator[dict[str, Any]]:
    try:
        if shard.kind in _AS_BYTES:
            rows: Iterator[tuple[str, bytes | dict[str, Any] | BadRow]] = _stretches(shard)
        elif shard.kind == "parquet":
            rows = _row_groups(shard)
        elif shard.kind is None:
            ((_, [source]),) = documents.find_named([shard.name], _not_from_hub)
            assert isinstance(source, DocumentSource)
            rows = iter(source.rows(shard.columns))
        else:
            rows = iter(read(Path(shard.name), shard.kind, shard.columns))
        for where, row in rows:
            as_bytes = isinstance(row, bytes)
            yield {
                "part": shard.part, "where": where, "kind": shard.kind if as_bytes else "pickled",
                "row": row if as_bytes else pickle.dumps(row),
            }  # fmt: skip
    except OSError as error:
        raise RequestError(f"cannot read {shown(shard.name)}", because=error.strerror or str(error)) from None


def _stretches(shard: Shard) -> Iterator[tuple[str, bytes | BadRow]]:
    """The lines of a shard of jsonl, or the documents of a text: those that begin in it."""
    path, place, line = Path(shard.name), shard.begin, 1
    name, most = shown(path), most_bytes()
    if place == 0 and (wrong := not_text(path)) is not None:
        yield wrong
        return
    with path.open("rb") as file:
        if place:  # behind the line that begins before
            file.seek(place - 1)
            place += len(read_line(file, f"{name}, byte {place - 1}", most)) - 1
        while place < shard.end:
            piece = b"" if shard.kind == "jsonl" else file.read(min(STRETCH_BYTES, shard.end - place))
            piece += read_line(file, f"{name}, byte {place}", most)
            where = f"{name}:{line}" if shard.begin == 0 else f"{name}, byte {place}"
            if not piece:
                return
            place, line = place + len(piece), line + piece.count(10)
            if shard.kind != "jsonl":
                yield where, piece
            elif not piece.isspace():
                yield where, piece.removeprefix(b"\xef\xbb\xbf")
            del piece  # it may be long, and so may be the next


def _row_groups(shard: Shard) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of some row groups of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    name, number = shown(shard.name), 0
    try:
        with pq.ParquetFile(shard.name) as file:
            known = formats.COLUMNS | set(vars(shard.columns).values())
            wanted = [column for column in file.schema_arrow.names if column in known] or None
            groups = list(range(shard.begin, shard.end))
            number = sum(file.metadata.row_group(group).num_rows for group in range(shard.begin))
            for batch in documents.parquet_batches(file, Path(shard.name), wanted, groups):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}:row {number}", row
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise RequestError(f"{name} cannot be read after row {number}", because=first_line(error)) from None
