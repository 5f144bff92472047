"""Where documents come from: files, globs, folders, saved datasets, the hub, Python's own library, a user's stream.

Rows are read by our own loops rather than by `datasets`, because a message about a bad row has to name file and line.
`Provenance` records what samples were made of, so that a run that continues on other data can say what has changed.
"""

import csv
import glob
import hashlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from frugal.errors import FrugalError, RequestError
from frugal.training.models import factories

STDLIB = "stdlib"

_PIECE_BYTES = 1 << 16  # of a long text file
_KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip


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


@dataclass(frozen=True)
class DocumentSource:
    """Something with rows. `columns` are its columns if they are known before reading."""

    name: str
    fingerprint: str
    rows: Callable[[Columns], Iterator[Row]]
    columns: tuple[str, ...] | None = None
    label_names: tuple[str, ...] = ()


def find_sources(sources: Sequence[str]) -> list[DocumentSource]:
    """Everything the user named, in order; files of a folder or glob sorted."""
    if not sources:
        raise RequestError("no data was given", hint=f"pass --data PATH, or --data {STDLIB} for Python's own library")
    return [document_source for source in sources for document_source in _find(source)]


def _find(source: str) -> list[DocumentSource]:
    path = Path(source).expanduser()
    if source == STDLIB and not path.exists():
        return _stdlib()
    if path.is_file():
        return [_file(path)]
    if path.is_dir():
        if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
            return [_saved(source, path)]
        inside = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in inside if p.is_file())
        if not files:
            raise RequestError(f"the folder {source} is empty", because="it has no file that is not hidden")
        return [_file(p) for p in files]
    if glob.has_magic(source):
        files = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())  # noqa: PTH207  # absolute patterns
        if not files:
            raise RequestError(f"no file matches {source}", because=f"it was looked for from {Path.cwd()}")
        return [_file(p) for p in files]
    if source.rpartition(":")[0].endswith(".py"):
        return [_stream(source)]
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix in {*_KINDS, ".txt"}
    if looks_like_path:
        raise RequestError(f"there is no data at {source}", because="no such file or folder")
    return [_hub_dataset(source)]


def _file(path: Path, kind: str | None = None) -> DocumentSource:
    kind = kind or _KINDS.get(path.suffix.lower(), "text")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise RequestError(f"cannot read {path}", because=str(error.strerror)) from None
    if kind == "parquet":
        return _parquet(path, digest)
    reader = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "tsv": _read_csv}.get(kind, _read_text)
    return DocumentSource(str(path), f"{kind}:{digest}", lambda columns: reader(path, kind, columns))


def _stream(source: str) -> DocumentSource:
    """Rows from `path/to/file.py:name`, a callable that gives an iterable of them, such as a streaming dataset.

    It is read once, into the same cache as files are, so that its rows are drawn in the same order as any others. Its
    code stands for its content: rows that change while the file stays are not noticed.
    """
    make = factories.import_callable(source)
    code = Path(source.rpartition(":")[0]).expanduser().read_bytes()

    def rows(columns: Columns) -> Iterator[Row]:
        number = 0
        try:
            for number, row in enumerate(make(), 1):
                yield (
                    f"{source}:row {number}",
                    row if isinstance(row, dict) else BadRow(f"{type_in_words(row)}, not an object"),
                )
        except (FrugalError, GeneratorExit):
            raise
        except Exception as error:  # a user's code may raise anything
            raise RequestError(f"{source} failed after {number} rows", because=factories.first_line(error)) from None

    return DocumentSource(source, f"stream:{hashlib.blake2b(code + source.encode()).hexdigest()}", rows)


def _stdlib() -> list[DocumentSource]:
    """The sources of the running Python's library, without its tests, which not every distribution has."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not left_out.intersection(p.relative_to(root).parts))
    if not files:
        raise RequestError(
            "Python's library has no sources here", because=f"{root} has no .py file", hint="pass --data PATH"
        )
    return [_file(path, "source") for path in files]


def _saved(source: str, path: Path) -> DocumentSource:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged dataset fails in many ways
        raise RequestError(f"the dataset {source} cannot be opened", because=factories.first_line(error)) from None
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded:
            raise RequestError(
                f"the dataset {source} has no split `train`",
                because=f"its splits are {', '.join(loaded)}",
                hint=f"give one of them: --data {path / next(iter(loaded))}",
            )
        loaded = loaded["train"]
    return _dataset(source, loaded)


def _hub_dataset(source: str) -> DocumentSource:
    import datasets

    if not factories.hub_is_reachable():
        factories.use_hub_cache_only()
    name, _, configuration = source.partition(":")
    try:
        loaded = datasets.load_dataset(name, configuration or None, split="train")
    except Exception as error:  # a dataset script, the network and the hub fail in many ways
        raise RequestError(
            f"there is no data at {source}",
            because=("no such file or folder", factories.why_hub_failed(error)),
            hint=f"pass --data PATH, or --data {STDLIB} for Python's own library",
        ) from None
    return _dataset(source, loaded)


def _dataset(name: str, dataset: Any) -> DocumentSource:
    def rows(columns: Columns) -> Iterator[Row]:
        for i, row in enumerate(dataset):
            yield f"{name}:row {i + 1}", row

    label_names = {
        column: tuple(feature.names) for column, feature in dataset.features.items() if hasattr(feature, "names")
    }
    return DocumentSource(
        name,
        f"dataset:{dataset._fingerprint}",
        rows,
        tuple(dataset.column_names),
        next(iter(label_names.values()), ()),
    )


def _read_text(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    line = 1
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            piece += file.readline()
            try:
                text = piece.decode("utf-8", errors="replace" if kind == "source" else "strict")
                yield f"{path}:{line}", {columns.text: text.removeprefix("\ufeff")}
            except UnicodeDecodeError as error:
                yield f"{path}:{line + piece[: error.start].count(10)}", BadRow("not UTF-8 text")
            line += piece.count(10)


def _read_jsonl(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _json_row(line.strip())


def _read_json(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    """An array of objects, or jsonl with the wrong suffix."""
    data = path.read_bytes()
    if not data.lstrip().startswith(b"["):
        yield from _read_jsonl(path, kind, columns)
        return
    try:
        items = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        yield f"{path}:1", BadRow(str(error))
        return
    for number, item in enumerate(items, 1):
        yield f"{path}:item {number}", _json_row(bytes(item))


def _json_row(text: bytes) -> dict[str, Any] | BadRow:
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return BadRow(str(error))
    return row if isinstance(row, dict) else BadRow(f"{type_in_words(row)}, not an object")


def _read_csv(path: Path, kind: str, columns: Columns) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)  # a text longer than csv's default of 128 KiB is no mistake
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if kind == "tsv" else ",")
        while True:
            where = f"{path}:{reader.line_num + 1 if reader.line_num else 2}"
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
            else:
                yield where, row


def _parquet(path: Path, digest: str) -> DocumentSource:
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

    try:
        names = tuple(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{path} is not a parquet file", because=factories.first_line(error)) from None

    def rows(columns: Columns) -> Iterator[Row]:
        number = 0
        with pq.ParquetFile(path) as file:
            wanted = [name for name in names if name in asdict(columns).values()]
            for batch in file.iter_batches(batch_size=256, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row

    return DocumentSource(str(path), f"parquet:{digest}", rows, names)


def type_in_words(value: Any) -> str:
    """What a JSON value is, for people."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")


MOST_FILES = 100  # named; of more, only the hash over all of them is kept
_SHOWN = 3

_WORDS = {
    "task": "--task", "seq_len": "--seq-len", "limit": "--limit", "too_long": "--too-long", "labels": "the classes",
    "validation": "--validation-fraction", "columns": "the columns", "tokenizer": "the tokenizer",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What samples were made of.

    Attributes:
        fingerprint: a hash of all that made the samples.
        options: how they were made, by name, in words.
        files: the hash of each file's content, by name; none where there are more than `MOST_FILES`.
        documents: good rows.
        samples: made of them.
        tokens: in the samples.
    """

    fingerprint: str = ""
    options: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    documents: int = 0
    samples: int = 0
    tokens: int = 0

    @classmethod
    def of(cls, sources: Sequence[DocumentSource], fingerprint: str, options: Mapping[str, Any], **counts: int) -> Self:
        """Of samples made of `sources` with `options`, of which those in `_WORDS` are kept."""
        files = {source.name: source.fingerprint.partition(":")[2][:16] for source in sources}
        kept = {name: "not given" if options[name] is None else str(options[name]) for name in _WORDS}
        return cls(fingerprint=fingerprint, options=kept, files=files if len(files) <= MOST_FILES else {}, **counts)

    def changes(self, now: "Provenance") -> list[str]:
        """What differs, a line each."""
        lines = [
            "the tokenizer is another one" if name == "tokenizer" else f"{word} was {self.options[name]}, is {value}"
            for name, word in _WORDS.items()
            if (value := now.options.get(name)) != self.options.get(name, value)
        ]
        if self.files and now.files:
            lines += self._changed_files(now)
        counts = [
            f"{each.documents:,} documents, {each.samples:,} samples, {each.tokens:,} tokens" for each in (self, now)
        ]
        if counts[0] != counts[1]:
            lines.append(f"it had {counts[0]}, now it has {counts[1]}")
        return lines or ["its files have other content"]

    def _changed_files(self, now: "Provenance") -> list[str]:
        gone = [name for name in self.files if name not in now.files]
        new = [name for name in now.files if name not in self.files]
        other = [name for name, digest in self.files.items() if now.files.get(name, digest) != digest]
        kinds = ((other, "other content"), (gone, "gone"), (new, "new"))
        lines = [f"{_names(names)} {_verb(names, word)}" for names, word in kinds if names]
        return lines or ["its files are in another order"] * (list(self.files) != list(now.files))


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _verb(names: Sequence[str], word: str) -> str:
    several = len(names) > 1
    return (
        f"{'have' if several else 'has'} {word}" if word == "other content" else f"{'are' if several else 'is'} {word}"
    )
