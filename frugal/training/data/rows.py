"""The rows of text, jsonl, json and csv files, one after another, with file and line of each that is wrong."""

import codecs
import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, AnyStr

import msgspec

from frugal.config.hardware.local_host import available_bytes
from frugal.errors import RequestError
from frugal.training.data.long_text import PIECE_BYTES, LongText
from frugal.units import format_bytes

STRETCH_BYTES = 1 << 16
"""Of a text file: a document, up to the end of a line."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which column of a row plays which role.

    `text` is for language models and classes, `label` for classes, `source` and `target` for pairs.
    """

    text: str = "text"
    label: str = "label"
    source: str = "source"
    target: str = "target"

    def needed(self, task: str) -> dict[str, str]:
        """Role -> column, of what the task reads."""
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


Row = tuple[str, dict[str, Any] | BadRow]  # where it is, and what is in it


def read(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    """The rows of a file of this kind: `jsonl`, `json`, `csv`, `tsv`, `text`, or `source` for text that may be none."""
    reader = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "tsv": _read_csv}.get(kind, _read_text)
    wrong = not_text(path)
    return iter([wrong]) if wrong is not None else reader(path, kind, columns)


def not_text(path: Path) -> tuple[str, BadRow] | None:
    """Where and why a file cannot be read as text, where its first bytes say so."""
    with path.open("rb") as file:
        first = file.read(4)
    reasons = [reason for signature, reason in _SIGNATURES.items() if first.startswith(signature)]
    return (f"{shown(path)}:1", BadRow(reasons[0])) if reasons else None


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
    """A name as it can be printed and kept: bytes that are no UTF-8 as `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def most_bytes() -> int:
    """Return what of a file may be in memory at once: a quarter of what is free, as what is made of it takes more."""
    return available_bytes() // 4


def read_line(file: IO[AnyStr], where: str, most: int) -> AnyStr:
    """Return the next line.

    Raises:
        RequestError: it is longer than `most`.
    """
    line = file.readline(most + 1)
    if len(line) > most:
        raise RequestError(
            f"{where} cannot be read",
            because=f"the line has more than {format_bytes(most)}, a quarter of the memory that is free here",
            hint="cut it into several lines",
        )
    return line


def _read_text(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    name, line, most = shown(path), 1, most_bytes()
    with path.open("rb") as file:
        while piece := file.read(STRETCH_BYTES):
            piece += read_line(file, f"{name}:{line}", most)
            where, num_lines = f"{name}:{line}", piece.count(10)
            line += num_lines
            yield text_row(piece, kind, columns, where, name, line - num_lines)
            del piece  # it may be long, and so may be the next


def text_row(piece: bytes, kind: str, columns: Columns, where: str, name: str, line: int) -> Row:
    """A stretch of a text file that begins at `line`."""
    try:
        if 0 in piece:
            return f"{name}:{line + piece[: piece.index(0)].count(10)}", BadRow(_NUL)
        if len(piece) > PIECE_BYTES:
            text = LongText(piece.removeprefix(codecs.BOM_UTF8), is_json=False)
            text.check()
            return where, {columns.text: text}
        decoded = piece.decode("utf-8", errors="replace" if kind == "source" else "strict")
        return where, {columns.text: decoded.removeprefix("\ufeff")}
    except UnicodeDecodeError as error:
        return f"{name}:{line + piece[: error.start].count(10)}", BadRow("not UTF-8 text")


def _read_jsonl(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    name, most = shown(path), most_bytes()
    with path.open("rb") as file:
        line = read_line(file, f"{name}:1", most).removeprefix(codecs.BOM_UTF8)
        for number in count(1):
            row = json_row(line) if line and not line.isspace() else None
            del line  # it may be long, and so may be the next
            if row is not None:
                yield f"{name}:{number}", row
            del row
            line = read_line(file, f"{name}:{number + 1}", most)
            if not line:
                return


def _read_json(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    """An array of objects, or jsonl with the wrong suffix."""
    name, most = shown(path), most_bytes()
    with path.open("rb") as file:
        if not file.read(STRETCH_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from _read_jsonl(path, kind, columns)
            return
    if (size := path.stat().st_size) > most:
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
        yield f"{name}:item {number}", json_row(item)


def json_row(text: bytes | msgspec.Raw) -> dict[str, Any] | BadRow:
    try:
        if memoryview(text).nbytes > PIECE_BYTES:
            values = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            return {name: _json_value(value) for name, value in values.items()}
        row = msgspec.json.decode(bytes(text).strip())
    except msgspec.ValidationError:
        return BadRow("not an object")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(str(error))
    return row if isinstance(row, dict) else BadRow(f"{type_in_words(row)}, not an object")


def _json_value(raw: msgspec.Raw) -> Any:
    """What stands in a row; a long text not yet decoded."""
    view = memoryview(raw)
    if view.nbytes > PIECE_BYTES and view[:1] == b'"':
        text = LongText(view[1:-1], is_json=True)
        text.check()
        return text
    return msgspec.json.decode(raw)


def _read_csv(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)  # a text longer than csv's default of 128 KiB is no mistake
    name, most = shown(path), most_bytes()
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = iter(lambda: read_line(file, name, most), "")
        reader = csv.DictReader(lines, delimiter="\t" if kind == "tsv" else ",")
        while True:
            where = f"{name}:{reader.line_num + 1 if reader.line_num else 2}"
            try:
                row = next(reader, None)
            except csv.Error as error:
                yield where, BadRow(str(error))
                continue
            if row is None:
                return
            num_columns = len(reader.fieldnames or ())
            if None in row:
                num_fields = num_columns + len(row[None])  # where csv keeps surplus fields
                yield where, BadRow(f"{num_fields} fields, the header has {num_columns}")
            elif None in row.values():
                num_fields = sum(value is not None for value in row.values())
                yield where, BadRow(f"{num_fields} fields, the header has {num_columns}")
            elif any("\0" in text for text in row.values()):
                yield where, BadRow(_NUL)
            else:
                yield where, row


def type_in_words(value: Any) -> str:
    """What a JSON value is, for people."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
