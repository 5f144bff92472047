"""The rows of text, jsonl, json, csv and parquet files, with file and line of each that cannot be used.

Parsing is msgspec's, the csv module's and pyarrow's. The readers of `datasets` are not used: they name no line of a bad
row, give all rows the same fields (also those within messages), and read csv as pandas does, where "NA" is no text.

`.gz`, `.bz2`, `.xz` and `.zst` hold one file, of the kind that the rest of the name says: `chats.jsonl.gz`. A `.zip` is
read like a folder. Nothing is written to disk. zstd is pyarrow's: as other readers it reads all frames of a file, and a
file that was cut off is an error.
"""

import bz2
import codecs
import csv
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from os import fsencode
from pathlib import Path, PurePosixPath
from typing import IO, Any, AnyStr
from zipfile import BadZipFile, ZipFile, is_zipfile

import msgspec
import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
import pyarrow.compute as pc  # type: ignore[import-untyped]  # as above
import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

from frugal.config.hardware.local_host import available_bytes
from frugal.config.run_settings import Format
from frugal.errors import RequestError, failure, first_line, refuse
from frugal.units import GIB, format_bytes

_KINDS = {
    ".jsonl": "jsonl", ".jsonlines": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet",
}  # fmt: skip

ARCHIVE = ".zip"


_READERS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
    ".zst": lambda file: io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")),
}  # fmt: skip

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
                if self.member or self.path.suffix.lower() == ARCHIVE:
                    file = opened.enter_context(opened.enter_context(ZipFile(file)).open(self.member))
                if self._reader is not None:
                    file = opened.enter_context(self._reader(file))
                yield file
        except (EOFError, zlib.error, lzma.LZMAError, BadZipFile, RuntimeError, KeyError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise RequestError(
                f"{self.name} cannot be decompressed",
                because=first_line(error),
                hint="fetch or compress it again, or leave it out of --data",
            ) from None


def files_at(path: Path) -> list[DataFile]:
    """Return the file at `path`, or those in an archive: sorted, without hidden ones, as in a folder.

    What is no archive is told where it is opened, as other files that are damaged are.

    Raises:
        RequestError: it is an empty archive.
    """
    if path.suffix.lower() != ARCHIVE or not is_zipfile(path):
        return [DataFile(path)]
    with failure(f"the archive {shown(path)} cannot be read"), ZipFile(path) as archive:
        names = [each.filename for each in archive.infolist() if not each.is_dir()]
    visible = (name for name in names if not any(part.startswith((".", "__MACOSX")) for part in name.split("/")))
    members = [DataFile(path, member=name) for name in sorted(visible)]
    refuse((not members, f"the archive {shown(path)} is empty", "it has no file that is not hidden", None))
    return members


def shown(path: str | Path) -> str:
    """Return a name as it can be printed and kept: bytes that are not UTF-8 as `\\xff`."""
    return fsencode(path).decode("utf-8", "backslashreplace")


DOCUMENT_BYTES = 1 << 16
"""A document of a text file has at least this many bytes, up to the end of a line."""


_OWN_ROLES = ("text", "label", "source", "target")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a row by their role.

    `text` is for language models and classes, `label` for classes, `source` and `target` for pairs. `renamed`: of what
    has another name than formats know, its name: of their columns, of a message's `role` and `content`, and of the
    roles `user` and `assistant`.
    """

    text: str = "text"
    label: str = "label"
    source: str = "source"
    target: str = "target"
    renamed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, str]) -> "Columns":
        """Return the columns that have these names, by their roles; the others have the usual ones."""
        own = {role: name for role, name in given.items() if role in _OWN_ROLES}
        return cls(**own, renamed={role: name for role, name in given.items() if role not in own})

    @property
    def names(self) -> set[str]:
        """The names that were given, or are usual; of `translation.en` also `translation`."""
        named = (self.text, self.label, self.source, self.target, *self.renamed.values())
        return {part for name in named for part in (name, name.partition(".")[0])}

    def options(self) -> dict[str, Any]:
        """Return them for a record of how samples are made."""
        return {**{role: getattr(self, role) for role in _OWN_ROLES}, **dict(sorted(self.renamed.items()))}

    def needed(self, task: str) -> dict[str, str]:
        """Return role -> column for what the task reads."""
        roles = {"seq2seq": ("source", "target"), "sequence-classification": ("text", "label")}.get(task, ("text",))
        return {role: getattr(self, role) for role in roles}

    def standard(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a row with the names that formats know."""
        if not self.renamed:
            return row
        made = {**row, **{role: row[name] for role, name in self.renamed.items() if name in row}}
        for column in ("messages", "conversations", "prompt", "completion"):
            if isinstance(messages := made.get(column), list):
                made[column] = [self._message(each) if isinstance(each, dict) else each for each in messages]
        if "system" in self.renamed and made.get("system") and isinstance(made.get("messages"), list):
            made["messages"] = [{"role": "system", "content": made["system"]}, *made["messages"]]
        return made

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with ShareGPT's names, whose roles have several words each."""
        keys = {"role": "from", "content": "value"}
        renamed = {self.renamed[role]: key for role, key in keys.items() if role in self.renamed}
        hidden = {each for role, key in keys.items() if role in self.renamed for each in (role, key)}
        made = {
            renamed.get(name, name): value for name, value in message.items() if name in renamed or name not in hidden
        }
        words = {self.renamed[word]: word for word in ("user", "assistant") if word in self.renamed}
        for key in ("from", "role"):
            if isinstance(said := made.get(key), str):
                made[key] = words.get(said, said)
        return made


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose objects' fields are columns, too: `translation.en` of `{"translation": {"en": ...}}`."""
    objects = {name: fields for name, fields in row.items() if isinstance(fields, dict)}
    return row | {f"{name}.{key}": value for name, fields in objects.items() for key, value in fields.items()} | row


def column_names(schema: Any) -> tuple[str, ...]:
    """Return the names of an arrow schema's columns, and those of the fields of its structs as `flat` makes them."""
    return tuple(dict.fromkeys((*schema.names, *schema.empty_table().flatten().column_names)))


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    reason: str


NEEDED: dict[Format, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt-completion": ("prompt", "completion"),
    "prompt-response": ("prompt", "response"),
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


def read(file: DataFile, columns: Columns, begin: int = 0, end: int | None = None) -> Iterator[Row]:
    """Yield the rows of a file, or of a part of it, if it is not compressed.

    `begin` and `end` are bytes for `CUT_AT_LINES` (lines that begin between them are read), and row groups for parquet.

    Raises:
        RequestError: the file cannot be read, or would fill the memory.
    """
    if file.kind == "parquet":
        return _read_parquet(file, columns, begin, end)
    with file.open() as opened:
        first = opened.read(_HEAD_BYTES)
    wrong = [reason for (place, signature), reason in _SIGNATURES.items() if first.startswith(signature, place)]
    if wrong and begin == 0:
        return iter([(f"{file.name}:1", BadRow(wrong[0]))])
    if file.kind in ("csv", "tsv"):
        return _read_csv(file, "\t" if file.kind == "tsv" else ",")
    if file.kind == "json":
        return _read_json(file)
    return _read_jsonl(file, begin, end) if file.kind == "jsonl" else _read_text(file, columns.text, begin, end)


_UTF_16 = "not UTF-8 text but UTF-16; iconv -f UTF-16 -t UTF-8 converts it"
_SIGNATURES = {
    (0, codecs.BOM_UTF16_LE): _UTF_16,
    (0, codecs.BOM_UTF16_BE): _UTF_16,
    (0, b"\x1f\x8b"): "not UTF-8 text but compressed by gzip; give it a name that ends in .gz",
    (0, b"\x28\xb5\x2f\xfd"): "not UTF-8 text but compressed by zstd; give it a name that ends in .zst",
    (0, b"BZh91AY&SY"): "not UTF-8 text but compressed by bzip2; give it a name that ends in .bz2",
    (0, b"\xfd7zXZ\0"): "not UTF-8 text but compressed by xz; give it a name that ends in .xz",
    (0, b"7z\xbc\xaf\x27\x1c"): "not UTF-8 text but a 7z archive; unpack it with 7z x",
    (0, b"PK\x03\x04"): "not UTF-8 text but a zip file, as .xlsx and .docx are; unzip it, or save it as .csv or .txt",
    (0, b"PAR1\x15"): "not UTF-8 text but parquet; give it a name that ends in .parquet",
    (0, b"ARROW1\0"): "not UTF-8 text but an Arrow file; write it as parquet: pyarrow.feather.read_table, "
    "pyarrow.parquet.write_table",
    (0, b"\x93NUMPY"): "not UTF-8 text but a numpy array; write tokens as rows of `input_ids`",
    (0, b"%PDF-"): "not UTF-8 text but a PDF; pdftotext makes text of it",
    (257, b"ustar"): "not UTF-8 text but a tar archive; unpack it with tar -xf",
}
"""Bytes that only files of another kind begin with, by their place."""

_HEAD_BYTES = 262
_NUL = "a NUL byte, which text has not: a binary file, or UTF-16"


_PART_OF_MEMORY = 256
"""A line may take this part of the free memory: what a tokenizer makes of it takes up to 165 times its bytes."""


def _read_line(file: IO[AnyStr], where: str, most: int) -> AnyStr:
    line = file.readline(most + 1)
    if len(line) > most:
        raise RequestError(
            f"{where} cannot be read",
            because=f"the line has more than {format_bytes(most)}, 1/{_PART_OF_MEMORY} of the memory that is free here",
            hint="cut it into several lines",
        )
    return line


def _lines(file: DataFile, begin: int, end: int | None, least_bytes: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield whole lines together, at least `least_bytes`, with the name and line number to report them by.

    Where the file is not read from its beginning, lines are counted from a byte that the name has.
    """
    name, most, place, line = file.name, available_bytes() // _PART_OF_MEMORY, begin, 1
    with file.open() as opened:
        if begin:  # the line that begins before it is another part's
            opened.seek(begin - 1)
            place += len(_read_line(opened, f"{name} (from byte {begin - 1}):1", most)) - 1
        while end is None or place < end:
            name_here, line_here = (f"{name} (from byte {place})", 1) if begin else (name, line)
            lines = opened.read(least_bytes if end is None else min(least_bytes, end - place))
            lines += _read_line(opened, f"{name_here}:{line_here}", most)
            if not lines:
                return
            place, line = place + len(lines), line + lines.count(b"\n")
            yield name_here, line_here, lines


def _read_text(file: DataFile, column: str, begin: int, end: int | None) -> Iterator[Row]:
    for name, line, document in _lines(file, begin, end, DOCUMENT_BYTES):
        try:
            if 0 in document:
                yield f"{name}:{line + document[: document.index(0)].count(10)}", BadRow(_NUL)
                continue
            text = document.decode("utf-8", errors="replace" if file.kind == "source" else "strict")
            yield f"{name}:{line}", {column: text.removeprefix("\ufeff")}
        except UnicodeDecodeError as error:
            yield (
                f"{name}:{line + document[: error.start].count(10)}",
                BadRow("not UTF-8 text; iconv -f ENCODING -t UTF-8 converts it"),
            )


def _read_jsonl(file: DataFile, begin: int, end: int | None) -> Iterator[Row]:
    for name, number, line in _lines(file, begin, end, 0):
        if not line.isspace():
            yield f"{name}:{number}", _object(line.removeprefix(codecs.BOM_UTF8).strip())


def _read_json(file: DataFile) -> Iterator[Row]:
    """Yield the objects of an array, or of jsonl with the wrong suffix."""
    with file.open() as opened:
        is_array = opened.read(DOCUMENT_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    if not is_array:
        yield from _read_jsonl(file, 0, None)
        return
    hint = f"write an object a line: jq -c '.[]' {file.name} > text.jsonl"
    data = _whole(file, "one array", hint).removeprefix(codecs.BOM_UTF8)
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        yield f"{file.name}:1", BadRow(str(error))
        return
    for number, item in enumerate(items, 1):
        yield f"{file.name}:item {number}", _object(bytes(item).strip())


_PART_BYTES = 1 << 24


def _whole(file: DataFile, what: str, hint: str) -> bytes:
    """Return all bytes of a file, which is `what`.

    Raises:
        RequestError: they would take more than a quarter of the free memory.
    """
    most, size, data = available_bytes() // 4, file.path.stat().st_size if file.is_plain else 0, bytearray()
    with file.open() as opened:
        while size <= most and (part := opened.read(_PART_BYTES)):
            data += part
            size = max(size, len(data))
    refuse(
        (
            size > most,
            f"{file.name} cannot be read",
            f"it is {what} of {'' if file.is_plain else 'at least '}{format_bytes(size)}; {format_bytes(most)} "
            "are a quarter of the free memory",
            hint,
        )
    )
    return bytes(data)


def _object(text: bytes) -> dict[str, Any] | BadRow:
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        lines = "; an object takes one line: `jq -c .` writes it so" if text == b"{" else ""
        return BadRow(f"{error}{'; NaN is no JSON, null is' if b'NaN' in text else lines}")
    return row if isinstance(row, dict) else BadRow(f"{type_in_words(row)}, not an object")


def _read_csv(file: DataFile, delimiter: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)  # a text longer than csv's default of 128 KiB is no mistake
    name, most = file.name, available_bytes() // _PART_OF_MEMORY
    with file.open() as opened:
        text = io.TextIOWrapper(opened, encoding="utf-8-sig", errors="surrogateescape", newline="")
        reader = csv.DictReader(iter(lambda: _read_line(text, name, most), ""), delimiter=delimiter)
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


def _read_parquet(file: DataFile, columns: Columns, begin: int, end: int | None) -> Iterator[Row]:
    """Yield the rows of some row groups, in batches that fit into memory, by what the metadata say of their sizes."""

    name, size, num_bytes, number = file.name, file.path.stat().st_size, 0, 0
    try:
        with pq.ParquetFile(_parquet(file)) as table:
            sizes = [table.metadata.row_group(group) for group in range(table.metadata.num_row_groups)]
            groups = range(begin, len(sizes) if end is None else end)
            number = before = sum(group.num_rows for group in sizes[:begin])
            read = COLUMNS.union(columns.names)
            wanted = [column for column in table.schema_arrow.names if column in read]
            largest = max((sizes[group].total_byte_size for group in groups), default=0)
            rows = min(256, max(1, available_bytes() // 8 // max(largest, 1)))  # one row may have nearly all of a group
            for batch in table.iter_batches(batch_size=rows, row_groups=list(groups), columns=wanted or None):
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
        raise RequestError(f"{name} cannot be read after row {number}", because=first_line(error)) from None


def _expanded_bytes(column: Any) -> int:
    """Return the bytes of a column's values, those of a dictionary as often as they are used."""

    if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type):
        return pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
    return int(column.nbytes)


def _parquet(file: DataFile) -> Any:
    """Return what pyarrow opens: the path, or the bytes of what is compressed, since it reads the end first."""
    hint = "decompress it first: parquet is compressed within"
    return file.path if file.is_plain else pa.BufferReader(_whole(file, "parquet", hint))


def parquet_schema(file: DataFile) -> tuple[tuple[str, ...], int]:
    """Return the names of a parquet file's columns, and the number of its row groups.

    Raises:
        RequestError: it is no parquet file.
    """
    with failure(f"{file.name} is not a parquet file"):
        metadata = pq.read_metadata(_parquet(file))
        return column_names(metadata.schema.to_arrow_schema()), int(metadata.num_row_groups)


def type_in_words(value: Any) -> str:
    """Return what a JSON value is, for people."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")
