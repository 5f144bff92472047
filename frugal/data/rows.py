"""The rows of text, jsonl, json, csv and parquet files, with file and line of each that cannot be used.

Parsing is msgspec's, the csv module's and pyarrow's. The readers of `datasets` are not used: they name no line of a bad
row, give all rows the same fields (also those within messages), and read csv as pandas does, where "NA" is no text.
"""

import codecs
import csv
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import fsencode
from pathlib import Path
from typing import IO, Any, AnyStr

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
import pyarrow.compute as pc  # type: ignore[import-untyped]  # as above
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

from frugal.config.hardware.local_host import available_bytes
from frugal.config.run_settings import Format
from frugal.errors import RequestError, first_line
from frugal.units import GIB, format_bytes

DOCUMENT_BYTES = 1 << 16
"""A document of a text file has at least this many bytes, up to the end of a line."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a row by their role.

    `text` is for language models and classes, `label` for classes, `source` and `target` for pairs.
    """

    text: str = "text"
    label: str = "label"
    source: str = "source"
    target: str = "target"

    def needed(self, task: str) -> dict[str, str]:
        """Return role -> column for what the task reads."""
        match task:
            case "seq2seq":
                return {"source": self.source, "target": self.target}
            case "sequence-classification":
                return {"text": self.text, "label": self.label}
        return {"text": self.text}


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    reason: str


NEEDED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "tokens": ("input_ids",),
}
"""Columns without which a row does not have a format."""

COLUMNS = frozenset((
    *(column for columns in NEEDED.values() for column in columns), "tools", "system", "input", "labels",
    "attention_mask", "completion_mask", "assistant_masks", "chat_template_kwargs",
))  # fmt: skip
"""All columns that any format reads."""

Row = tuple[str, dict[str, Any] | BadRow]
"""Where a row is, such as `file:line`, and what it holds."""

CUT_AT_LINES = ("jsonl", "text", "source")
"""Kinds of files of which a part can be read, from one byte to another."""


def read(path: Path, kind: str, columns: Columns, begin: int = 0, end: int | None = None) -> Iterator[Row]:
    """Yield the rows of a file, or of a part of it.

    `kind` is `jsonl`, `json`, `csv`, `tsv`, `parquet`, `text`, or `source` for text that may not be UTF-8. `begin` and
    `end` are bytes for `CUT_AT_LINES` (lines that begin between them are read), and row groups for parquet.

    Raises:
        RequestError: the file cannot be read, or would fill the memory.
    """
    if kind == "parquet":
        return _read_parquet(path, columns, begin, end)
    with path.open("rb") as file:
        first = file.read(4)
    wrong = [reason for signature, reason in _SIGNATURES.items() if first.startswith(signature)]
    if wrong and begin == 0:
        return iter([(f"{shown(path)}:1", BadRow(wrong[0]))])
    if kind in ("csv", "tsv"):
        return _read_csv(path, "\t" if kind == "tsv" else ",")
    if kind == "json":
        return _read_json(path)
    end = path.stat().st_size if end is None else end
    return _read_jsonl(path, begin, end) if kind == "jsonl" else _read_text(path, kind, columns.text, begin, end)


_UTF_16 = "not UTF-8 text but UTF-16; iconv -f UTF-16 -t UTF-8 converts it"
_SIGNATURES = {
    codecs.BOM_UTF16_LE: _UTF_16,
    codecs.BOM_UTF16_BE: _UTF_16,
    b"\x1f\x8b": "not UTF-8 text but compressed by gzip; gunzip it first",
    b"\x28\xb5\x2f\xfd": "not UTF-8 text but compressed by zstd; unzstd it first",
    b"PK\x03\x04": "not UTF-8 text but a zip file; unzip it first",
}
_NUL = "a NUL byte, which text has not: a binary file, or UTF-16"


def shown(path: str | Path) -> str:
    """Return a name as it can be printed and kept: bytes that are not UTF-8 as `\\xff`."""
    return fsencode(path).decode("utf-8", "backslashreplace")


_PART_OF_MEMORY = 256
"""A line may take this part of the free memory: what a tokenizer makes of it takes up to 165 times its bytes."""


def _most_bytes() -> int:
    return available_bytes() // _PART_OF_MEMORY


def _read_line(file: IO[AnyStr], where: str, most: int) -> AnyStr:
    line = file.readline(most + 1)
    if len(line) > most:
        raise RequestError(
            f"{where} cannot be read",
            because=f"the line has more than {format_bytes(most)}, 1/{_PART_OF_MEMORY} of the memory that is free here",
            hint="cut it into several lines",
        )
    return line


def _lines(path: Path, begin: int, end: int, least_bytes: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield whole lines together, at least `least_bytes`, with the name and line number to report them by.

    Where the file is not read from its beginning, lines are counted from a byte that the name has.
    """
    name, most, place, line = shown(path), _most_bytes(), begin, 1
    with path.open("rb") as file:
        if begin:  # the line that begins before it is another part's
            file.seek(begin - 1)
            place += len(_read_line(file, f"{name} (from byte {begin - 1}):1", most)) - 1
        while place < end:
            name_here, line_here = (f"{name} (from byte {place})", 1) if begin else (name, line)
            lines = file.read(min(least_bytes, end - place))
            lines += _read_line(file, f"{name_here}:{line_here}", most)
            if not lines:
                return
            place, line = place + len(lines), line + lines.count(b"\n")
            yield name_here, line_here, lines


def _read_text(path: Path, kind: str, column: str, begin: int, end: int) -> Iterator[Row]:
    for name, line, document in _lines(path, begin, end, DOCUMENT_BYTES):
        try:
            if 0 in document:
                yield f"{name}:{line + document[: document.index(0)].count(10)}", BadRow(_NUL)
                continue
            text = document.decode("utf-8", errors="replace" if kind == "source" else "strict")
            yield f"{name}:{line}", {column: text.removeprefix("\ufeff")}
        except UnicodeDecodeError as error:
            yield f"{name}:{line + document[: error.start].count(10)}", BadRow("not UTF-8 text")


def _read_jsonl(path: Path, begin: int, end: int) -> Iterator[Row]:
    for name, number, line in _lines(path, begin, end, 0):
        if not line.isspace():
            yield f"{name}:{number}", _object(line.removeprefix(codecs.BOM_UTF8).strip())


def _read_json(path: Path) -> Iterator[Row]:
    """Yield the objects of an array, or of jsonl with the wrong suffix."""
    name, most, size = shown(path), available_bytes() // 4, path.stat().st_size
    with path.open("rb") as file:
        is_array = file.read(DOCUMENT_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_array:
        yield from _read_jsonl(path, 0, size)
        return
    if size > most:
        raise RequestError(
            f"{name} cannot be read",
            because=f"it is one array of {format_bytes(size)}; {format_bytes(most)} are a quarter of the free memory",
            hint=f"write an object a line: jq -c '.[]' {name} > text.jsonl",
        )
    data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        yield f"{name}:1", BadRow(str(error))
        return
    for number, item in enumerate(items, 1):
        yield f"{name}:item {number}", _object(bytes(item).strip())


def _object(text: bytes) -> dict[str, Any] | BadRow:
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(str(error))
    return row if isinstance(row, dict) else BadRow(f"{type_in_words(row)}, not an object")


def _read_csv(path: Path, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)  # a text longer than csv's default of 128 KiB is no mistake
    name, most = shown(path), _most_bytes()
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = iter(lambda: _read_line(file, name, most), "")
        reader = csv.DictReader(lines, delimiter=delimiter)
        while True:
            where = f"{name}:{reader.line_num + 1 if reader.line_num else 2}"
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield where, BadRow(str(error))
                continue
            if row is None:
                return
            surplus = row.pop(None, [])  # where csv keeps surplus fields
            num_fields = sum(value is not None for value in row.values()) + len(surplus)
            if num_fields != len(reader.fieldnames or ()):
                yield where, BadRow(f"{num_fields} fields, the header has {len(reader.fieldnames or ())}")
            elif any("\0" in text for text in row.values()):
                yield where, BadRow(_NUL)
            else:
                yield where, row


_MOST_EXPANDED, _LEAST_EXPANDED_BYTES = 1000, GIB
"""How many times a parquet file's size may come out of it: text is compressed by 3 to 10, the same rows by some 100."""


def _read_parquet(path: Path, columns: Columns, begin: int, end: int | None) -> Iterator[Row]:
    """Yield the rows of some row groups, in batches that fit into memory, by what the metadata say of their sizes."""

    name, size, num_bytes, number = shown(path), path.stat().st_size, 0, 0
    try:
        with pq.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            groups = range(begin, len(sizes) if end is None else end)
            number = before = sum(group.num_rows for group in sizes[:begin])
            read = COLUMNS.union(asdict(columns).values())
            wanted = [column for column in file.schema_arrow.names if column in read]
            largest = max((sizes[group].total_byte_size for group in groups), default=0)
            rows = min(256, max(1, available_bytes() // 8 // max(largest, 1)))  # one row may have nearly all of a group
            for batch in file.iter_batches(batch_size=rows, row_groups=list(groups), columns=wanted or None):
                num_bytes += sum(map(_expanded_bytes, batch.columns))
                if num_bytes > max(_LEAST_EXPANDED_BYTES, _MOST_EXPANDED * size):
                    raise RequestError(
                        f"{name} expands to more than {_MOST_EXPANDED:,} times its size",
                        because=f"of its {format_bytes(size)} {number - before + batch.num_rows:,} rows have become "
                        f"{format_bytes(num_bytes)}",
                        hint="if that is meant, write it plainly: pyarrow.parquet.write_table(table, FILE, "
                        "compression='none', use_dictionary=False)",
                    )
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}:row {number}", row
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        because = first_line(error)
        raise RequestError(f"{name} cannot be read after row {number}", because=because) from None


def _expanded_bytes(column: Any) -> int:
    """Return the bytes of a column's values, those of a dictionary as often as they are used."""

    if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type):
        return pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
    return int(column.nbytes)


def parquet_schema(path: Path) -> tuple[tuple[str, ...], int]:
    """Return the names of a parquet file's columns, and the number of its row groups.

    Raises:
        RequestError: it is no parquet file.
    """

    try:
        metadata = pq.read_metadata(path)
        return tuple(metadata.schema.to_arrow_schema().names), int(metadata.num_row_groups)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{shown(path)} is not a parquet file", because=first_line(error)) from None


def type_in_words(value: Any) -> str:
    """Return what a JSON value is, for people."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
