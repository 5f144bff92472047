"""Where documents come from: files, globs, folders, saved datasets, the hub, Python's own library, a user's stream.

Rows are read by our own loops rather than by `datasets`, because a message about a bad row has to name file and line.
`Provenance` records what samples were made of, so that a run that continues on other data can say what has changed.
"""

import codecs
import glob
import hashlib
import logging
import os
import stat
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any, Protocol, Self

from frugal import files
from frugal.errors import FrugalError, RequestError, first_line
from frugal.training.data.chat import formats
from frugal.training.data.rows import BadRow, Columns, Row, most_bytes, read, shown, type_in_words
from frugal.training.models import factories
from frugal.units import GIB, format_bytes, plural

logger = logging.getLogger("frugal")

STDLIB = "stdlib"

MAX_THREADS = 8  # that read files for their hashes

_KINDS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
}  # fmt: skip


class Fingerprinted(Protocol):
    """A source by its name, and by what tells its content from others', after a colon."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def fingerprint(self) -> str:
        """Its kind, a colon, and a hash."""


@dataclass(frozen=True)
class DocumentSource:
    """Something with rows. `columns` are its columns if they are known before reading."""

    name: str
    fingerprint: str
    rows: Callable[[Columns], Iterator[Row]]
    columns: tuple[str, ...] | None = None
    label_names: tuple[str, ...] = ()


def find_sources(sources: Sequence[str]) -> list[DocumentSource]:
    """Everything the user named, in order; files of a folder or glob sorted. `@FILE` has one of these a line."""
    if not sources:
        raise RequestError("no data was given", hint=f"pass --data PATH, or --data {STDLIB} for Python's own library")
    everything = [each for _, parts in find_named(sources, _hub_dataset) for each in parts]
    tell_repeated(each for each in everything if isinstance(each, Path))
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as pool:  # reading files for their hashes
        hashed = pool.map(_file, (each for each in everything if isinstance(each, Path)))
        return [next(hashed) if isinstance(each, Path) else each for each in everything]


def find_named(
    sources: Sequence[str], from_hub: Callable[[str], DocumentSource]
) -> list[tuple[str, list[Path] | list[DocumentSource]]]:
    """What each name is: files, which are not read, or something else with rows. `from_hub`: of what is no path."""
    named = []
    for source in chain.from_iterable(map(_listed, sources)):
        try:
            named.append((source, _find(source, from_hub)))
        except OSError as error:
            raise RequestError(f"cannot read {shown(source)}", because=str(error.strerror)) from None
    return named


def _listed(source: str) -> list[str]:
    """The lines of the file that `@FILE` names; of anything else, itself."""
    if not source.startswith("@"):
        return [source]
    try:
        lines = files.read_regular(Path(source[1:]).expanduser()).removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise RequestError(f"cannot read the list of data {shown(source[1:])}", because=str(error.strerror)) from None
    names = [os.fsdecode(line.strip()) for line in lines if line.strip()]
    if not names or any("\0" in name or name.startswith("@") for name in names):
        raise RequestError(
            f"{shown(source[1:])} is no list of data",
            because="it is empty" if not names else "a line is no name of a file",
            hint="write one file, glob or folder a line",
        )
    return names


def _find(source: str, from_hub: Callable[[str], DocumentSource]) -> list[Path] | list[DocumentSource]:
    path = Path(source).expanduser()
    if source == STDLIB and not path.exists():
        return _stdlib()
    if path.is_file():
        if path.is_relative_to("/dev") or path.is_relative_to("/proc"):
            raise _not_a_file(source, "this process's own")
        return [path]
    if path.is_dir():
        if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
            return [_saved(source, path)]
        within = _each_once(source, _inside(path))
        if not within:
            raise RequestError(f"the folder {source} is empty", because="it has no file that is not hidden")
        return within
    if path.exists():
        raise _not_a_file(source, next((kind for is_kind, kind in _NO_FILES.items() if is_kind(path)), "no file"))
    if glob.has_magic(source):
        matches = _each_once(source, map(Path, set(_matches(str(path)))))
        if not matches:
            raise RequestError(f"no file matches {source}", because=f"it was looked for from {Path.cwd()}")
        return matches
    if source.rpartition(":")[0].endswith(".py"):
        return [_stream(source)]
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix in {*_KINDS, ".txt"}
    if looks_like_path:
        raise RequestError(f"there is no data at {shown(source)}", because="no such file or folder")
    return [from_hub(source)]


_NO_FILES: dict[Callable[[Path], bool], str] = {
    Path.is_fifo: "a pipe",
    Path.is_char_device: "a device",
    Path.is_block_device: "a device",
    Path.is_socket: "a socket",
}


def _not_a_file(source: str, what: str) -> RequestError:
    return RequestError(
        f"the data {source} is {what}, not a file",
        because="data is read by several processes, and again at each start",
        hint="write it into a file first, such as: zcat text.jsonl.gz > text.jsonl",
    )


def _matches(pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern matches. Below `**` each folder is entered once, however many links lead to it."""
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)  # noqa: PTH207  # absolute patterns
        return
    place = parts.index("**")
    after = list(dropwhile("**".__eq__, parts[place:])) or ["*"]
    bases = sorted(glob.iglob("/".join(parts[:place]) + "/")) if place else ["./"]  # noqa: PTH207  # as above
    seen: set[tuple[int, int]] = set()
    for folder in chain.from_iterable(_folders(base, seen) for base in bases):
        yield from _matches("/".join([glob.escape(folder.rstrip("/")), *after]))


def _folders(base: str, seen: set[tuple[int, int]], *, follows_links: bool = True) -> Iterator[str]:
    """Yield a folder and those below it that are not hidden and not `seen`; those that links lead to come last.

    Raises:
        OSError: without links, a folder cannot be read.
    """
    folders, links = deque([base]), deque[str]()
    while folders or links:
        folder = folders.popleft() if folders else links.popleft()
        try:
            status = os.stat(folder)  # noqa: PTH116  # strings: a tree may have millions
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            if follows_links:  # as glob does: it was not named, and may be lost+found
                continue
            raise
        if (identity := (status.st_dev, status.st_ino)) in seen:
            continue
        seen.add(identity)
        yield folder
        for entry in entries:
            is_linked = entry.is_symlink()
            if not entry.name.startswith(".") and os.path.isdir(entry.path) and (follows_links or not is_linked):  # noqa: PTH112  # as above
                (links if is_linked else folders).append(entry.path)


def _each_once(source: str, paths: Iterable[Path]) -> list[Path]:
    """Return the regular files among `paths`, sorted, each under one name: not that of a link, if it has another."""
    same = _by_file(paths)
    repeated = [sorted(names, key=lambda path: (path.is_symlink(), path)) for names in same if len(names) > 1]
    if repeated:
        logger.warning(
            "%s has %s under several names, such as %s: each is read once",
            shown(source), plural(len(repeated), "file"), " and ".join(map(shown, repeated[0][:2])),
        )  # fmt: skip
    return sorted([names[0] for names in same if len(names) == 1] + [names[0] for names in repeated])


def tell_repeated(paths: Iterable[Path]) -> None:
    """Say which files are named several times. They are read as often: whoever lists a file twice may want it so."""
    repeated = [names for names in _by_file(paths) if len(names) > 1]
    if repeated:
        logger.warning(
            "%s named several times, such as %s: each is read as often as it is named",
            "1 file is" if len(repeated) == 1 else f"{len(repeated)} files are", shown(repeated[0][0]),
        )  # fmt: skip


def _by_file(paths: Iterable[Path]) -> list[list[Path]]:
    """Return the regular files among `paths`, those together that are the same by device and inode."""
    names: dict[tuple[int, int], list[Path]] = {}
    for path in paths:
        with suppress(OSError):  # a link that leads nowhere
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                names.setdefault((status.st_dev, status.st_ino), []).append(path)
    return list(names.values())


def _inside(folder: Path) -> list[Path]:
    """Return what is in a folder and below it that is not hidden, without what links to folders lead to.

    Raises:
        OSError: a folder cannot be read.
    """
    below = _folders(str(folder), set(), follows_links=False)
    return [Path(entry) for each in below for entry in os.scandir(each) if not entry.name.startswith(".")]


def kind_of(path: Path) -> str:
    """What a file is, by its name."""
    return _KINDS.get(path.suffix.lower(), "text")


def _file(path: Path, kind: str | None = None) -> DocumentSource:
    kind = kind or kind_of(path)
    name = shown(path)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError as error:
        raise RequestError(f"cannot read {name}", because=str(error.strerror)) from None
    if kind == "parquet":
        return _parquet(path, digest)
    return DocumentSource(name, f"{kind}:{digest}", lambda columns: read(path, kind, columns))


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
            raise RequestError(f"{source} failed after {number} rows", because=first_line(error)) from None

    return DocumentSource(source, f"stream:{hashlib.blake2b(code + source.encode()).hexdigest()}", rows)


def _stdlib() -> list[DocumentSource]:
    """The sources of the running Python's library, without its tests, which not every distribution has."""
    return [_file(path, "source") for path in stdlib_files()]


def stdlib_files() -> list[Path]:
    """Where these are, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    modules = sorted(p for p in root.rglob("*.py") if not left_out.intersection(p.relative_to(root).parts))
    if not modules:
        raise RequestError(
            "Python's library has no sources here", because=f"{root} has no .py file", hint="pass --data PATH"
        )
    return modules


def _saved(source: str, path: Path) -> DocumentSource:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged dataset fails in many ways
        raise RequestError(f"the dataset {source} cannot be opened", because=first_line(error)) from None
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
        try:
            dataset.data.validate(full=True)  # lengths beyond the file would be read from other memory
        except (ValueError, OSError) as error:  # pyarrow's own are these
            raise RequestError(f"the dataset {name} is damaged", because=first_line(error)) from None
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


_MOST_EXPANDED, _LEAST_EXPANDED_BYTES = 1000, GIB
"""How many times a parquet file's size may come out of it: text is compressed by 3 to 10, the same rows by some 100."""


def parquet_batches(file: Any, path: Path, columns: Sequence[str] | None, groups: Sequence[int]) -> Iterator[Any]:
    """Yield the rows of some row groups in batches that fit into memory, by what its metadata say of their sizes.

    Raises:
        RequestError: far more comes out of it than a file of texts has.
    """
    size, num_bytes, num_rows = path.stat().st_size, 0, 0
    largest = max((file.metadata.row_group(group).total_byte_size for group in groups), default=0)
    rows = min(256, max(1, most_bytes() // max(largest, 1)))  # one may have nearly all of a group
    for batch in file.iter_batches(batch_size=rows, row_groups=list(groups), columns=columns):
        num_bytes, num_rows = num_bytes + sum(map(_expanded_bytes, batch.columns)), num_rows + batch.num_rows
        if num_bytes > max(_LEAST_EXPANDED_BYTES, _MOST_EXPANDED * size):
            raise RequestError(
                f"{shown(path)} expands to more than {_MOST_EXPANDED:,} times its size",
                because=f"of its {format_bytes(size)} {num_rows:,} rows have become {format_bytes(num_bytes)}",
                hint="if that is meant, write it plainly: pyarrow.parquet.write_table(table, FILE, compression='none', "
                "use_dictionary=False)",
            )
        yield batch


def _expanded_bytes(column: Any) -> int:
    """Return the bytes of a column's values, those of a dictionary as often as they are used."""
    import pyarrow as pa  # type: ignore[import-untyped]  # it has no type hints
    import pyarrow.compute as pc  # type: ignore[import-untyped]  # as above

    if pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type):
        return pc.sum(pc.take(pc.binary_length(column.dictionary), column.indices)).as_py() or 0
    return int(column.nbytes)


def _parquet(path: Path, digest: str) -> DocumentSource:
    import pyarrow as pa
    import pyarrow.parquet as pq  # type: ignore[import-untyped]  # as above

    shown_name = shown(path)
    try:
        names = tuple(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise RequestError(f"{shown_name} is not a parquet file", because=first_line(error)) from None

    def rows(columns: Columns) -> Iterator[Row]:
        number = 0
        wanted = [name for name in names if name in formats.COLUMNS or name in asdict(columns).values()]
        try:
            with pq.ParquetFile(path) as file:
                for batch in parquet_batches(file, path, wanted, range(file.metadata.num_row_groups)):
                    for row in batch.to_pylist():
                        number += 1
                        yield f"{shown_name}:row {number}", row
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            because = first_line(error)
            raise RequestError(f"{shown_name} cannot be read after row {number}", because=because) from None

    return DocumentSource(shown_name, f"parquet:{digest}", rows, names)


MOST_FILES = 100  # named; of more, only the hash over all of them is kept
_SHOWN = 3

_WORDS = {
    "task": "--task", "seq_len": "--seq-len", "limit": "train.limit", "too_long": "--too-long", "labels": "the classes",
    "validation": "--validation-fraction", "columns": "the columns", "tokenizer": "the tokenizer",
    "weights": "--data's weights", "rows_as": "--format", "train_on": "--train-on", "template": "the chat template",
    "marks": "the family whose marks find the assistant's words",
    "shuffle_buffer": "train.shuffle-buffer",
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
    def of(cls, sources: Sequence[Fingerprinted], fingerprint: str, options: Mapping[str, Any], **counts: int) -> Self:
        """Of samples made of `sources` with `options`, of which those in `_WORDS` are kept."""
        files = {source.name: source.fingerprint.partition(":")[2][:16] for source in sources}
        kept = {name: "not given" if value is None else str(value) for name, value in options.items() if name in _WORDS}
        return cls(fingerprint=fingerprint, options=kept, files=files if len(files) <= MOST_FILES else {}, **counts)

    @classmethod
    def joined(cls, parts: Sequence[Self], weights: Sequence[Any]) -> Self:
        """Of samples of several sources, of which each has a weight."""
        words = ", ".join(map(str, weights))
        counts = {name: sum(getattr(part, name) for part in parts) for name in ("documents", "samples", "tokens")}
        return cls(
            fingerprint=hashlib.sha256("\n".join([*(part.fingerprint for part in parts), words]).encode()).hexdigest(),
            options=parts[0].options | {"weights": words},
            files={name: digest for part in parts for name, digest in part.files.items()},
            **counts,
        )

    def changes(self, now: "Provenance") -> list[str]:
        """What differs, a line each."""
        lines = [
            f"{word} is another one"
            if name in ("tokenizer", "template")
            else f"{word} was {self.options[name]}, is {value}"
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
        lines = [f"{names_of(names)} {_verb(names, word)}" for names, word in kinds if names]
        return lines or ["its files are in another order"] * (list(self.files) != list(now.files))


def names_of(names: Sequence[str]) -> str:
    """Of many the first ones, for people."""
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _verb(names: Sequence[str], word: str) -> str:
    several = len(names) > 1
    return (
        f"{'have' if several else 'has'} {word}" if word == "other content" else f"{'are' if several else 'is'} {word}"
    )
