"""Where rows come from: files, globs, folders, saved datasets, storages, the hub, Python's library, a user's function.

Data at an address of a storage, such as `s3://bucket/corpus/*.jsonl`, is copied into the user's cache, then read. So
samples are those of the same files on a disk, to the byte. `datasets` could read addresses, too, but gives all rows the
same fields (`frugal.data.rows`), and refuses every storage where HF_HUB_OFFLINE keeps a cluster off the hub. A copy is
of one version of a file, by what the storage says of it (size, time, ETag): another version is another copy, and the
same is not fetched again. Copies are removed as tokenised data is: after 90 days without use, or beyond 200 GiB.

`Provenance` records what samples were made of, so that a run that continues on other data can say what has changed.
"""

import codecs
import glob
import hashlib
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, dropwhile
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, Self, TypeVar

import platformdirs

from frugal import files, storages
from frugal.data.report import REPAIR
from frugal.data.rows import (
    SUFFIXES,
    BadRow,
    Columns,
    DataFile,
    Row,
    column_names,
    files_at,
    parquet_schema,
    read,
    shown,
    type_in_words,
)
from frugal.errors import RequestError, failure, logger, refuse
from frugal.models import factories
from frugal.units import GIB, plural

STDLIB = "stdlib"

MAX_THREADS = 8  # that read files for their hashes

_ABOUT = re.compile(r"(readme|licen[cs]e|notice|citation|changelog)(\.(md|txt|rst))?$", re.IGNORECASE)

_OF_SAVED = ("state.json", "dataset_dict.json")  # a dataset that `datasets` saved has one of these files


@dataclass(frozen=True)
class DocumentSource:
    """A source of rows.

    Attributes:
        name: for people.
        fingerprint: its kind, a colon, and a hash of its content.
        rows: reads them.
        columns: those of its rows, where they are known before reading.
        label_names: names of classes that the source itself has.
        make: of a user's function, itself: it gives an iterable of rows, or a dataset.
    """

    name: str
    fingerprint: str
    rows: Callable[[Columns], Iterator[Row]]
    columns: tuple[str, ...] | None = None
    label_names: tuple[str, ...] = ()
    make: Callable[[], Any] | None = None


def find_sources(names: Sequence[str]) -> list[DocumentSource]:
    """Return everything the user named, in order; files of a folder or glob are sorted. `@FILE` has a name a line.

    The rows of a file that cannot be read raise the reason, so that it is told with what is wrong in other files.

    Raises:
        RequestError: nothing was named, or nothing is there.
    """
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MAX_THREADS)) as pool:  # reading files for their hashes
        return list(pool.map(_hashed_or_unreadable, chain.from_iterable(find_named(names))))


def find_named(names: Sequence[str], *, from_hub: bool = True) -> list[list[DataFile | DocumentSource]]:
    """Return what each name stands for: files, which are not read, or other sources. Raises as `find_sources`."""
    refuse((not names, "no data was given", "", f"pass --data PATH, or --data {STDLIB} for Python's own library"))
    listed = [_listed(name) for name in names]
    every = list(chain.from_iterable(listed))
    by_name = dict(zip(every, all_or_problems([_or_problem(_find, each, from_hub) for each in every]), strict=True))
    named = [list(chain.from_iterable(map(by_name.__getitem__, part))) for part in listed]
    times = Counter(
        each.path.resolve() / each.member for each in chain.from_iterable(named) if isinstance(each, DataFile)
    )
    if repeated := [path for path, number in times.items() if number > 1]:
        logger.warning("named several times, and read as often: %s", names_of([*map(shown, repeated)]))
    return named


Result = TypeVar("Result")
_MOST_SAID = 10


def _or_problem(function: Callable[..., Result], source: Any, *more: Any) -> Result | RequestError:
    """Return the result of a function of a source, or why there is none."""
    try:
        return function(source, *more)
    except RequestError as error:
        return error
    except OSError as error:
        name = source.name if isinstance(source, DataFile) else shown(source)
        return RequestError(f"cannot read {name}", because=error.strerror or str(error))


def all_or_problems(results: Iterable[Result | RequestError]) -> list[Result]:
    """Return results of which none is an error.

    Raises:
        RequestError: some are; it has all of them.
    """
    done = list(results)
    if problems := [each for each in done if isinstance(each, RequestError)]:
        raise together(problems)
    return [each for each in done if not isinstance(each, RequestError)]


def together(problems: Sequence[RequestError], more: Sequence[str] = ()) -> RequestError:
    """Return one error of several, and of rows that cannot be read: a line each, and each way out once."""
    if len(problems) == 1 and not more:
        return problems[0]
    lines = [
        *(f"{each.what} ({'; '.join(each.because)})" if each.because else each.what for each in problems),
        *more,
    ]
    hints = [each.hint for each in problems if each.hint]
    if more:
        hints.append(f"of rows: {REPAIR}")
    shown = lines[:_MOST_SAID]
    if len(lines) > _MOST_SAID:
        shown.append(f"of {len(lines) - _MOST_SAID:,} more")
    return RequestError(
        f"the data has {plural(len(lines), 'problem')}",
        because=shown,
        hint="\nhint: ".join(list(dict.fromkeys(hints))[:_MOST_SAID]) or None,
    )


def _listed(source: str) -> list[str]:
    """Return the names in the file that `@FILE` stands for, or the name itself."""
    if not source.startswith("@"):
        return [source]
    with failure(f"cannot read the list of data {shown(source[1:])}", OSError):
        lines = files.read_regular(Path(source[1:]).expanduser()).removeprefix(codecs.BOM_UTF8).splitlines()
    names = [os.fsdecode(line.strip()) for line in lines if line.strip()]
    refuse((
        not names or any("\0" in name or name.startswith("@") for name in names),
        f"{shown(source[1:])} is no list of data",
        "a line is no name of a file" if names else "it is empty",
        "write one file, glob or folder a line",
    ))  # fmt: skip
    return names


def _find(source: str, from_hub: bool) -> list[DataFile | DocumentSource]:
    path = Path(source).expanduser()
    if storages.is_address(source):
        copies = fetch(source)
        if copies is None:
            return [_saved(source)]
        return _with_rows(replace(each, address=name) for name, copy in copies.items() for each in files_at(copy))
    if source == STDLIB and not path.exists():
        root = Path(sysconfig.get_path("stdlib"))
        left_out = {
            "site-packages",
            "dist-packages",
            "test",
            "tests",
            "idle_test",
            "__pycache__",
        }  # not on all machines
        modules = (each for each in root.rglob("*.py") if not left_out.intersection(each.relative_to(root).parts))
        return [DataFile(module, "source") for module in sorted(modules)]
    if path.is_file():
        if path.is_relative_to("/dev") or path.is_relative_to("/proc"):
            raise _not_a_file(source, "this process's own")
        return _each_file([path])
    if path.is_dir():
        if any((path / name).exists() for name in _OF_SAVED):
            return [_saved(str(path))]
        below = _folders(str(path), set(), follows_links=False)
        inside = (Path(entry) for folder in below for entry in os.scandir(folder) if not entry.name.startswith("."))
        within = _each_once(source, inside)
        refuse((not within, f"the folder {source} is empty", "it has no file that is not hidden",
                "put the data into it, or name another with --data"))  # fmt: skip
        return _each_file(within)
    if path.exists():
        raise _not_a_file(source, "a device" if path.is_char_device() or path.is_block_device() else "a pipe or socket")
    if glob.has_magic(source):
        matches = _each_once(source, map(Path, set(_matches(str(path)))))
        refuse((not matches, f"no file matches {source}", f"it was looked for from {Path.cwd()}", None))
        return _each_file(matches)
    if source.rpartition(":")[0].endswith(".py"):
        return [_user_function(source)]
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1 or path.suffix in SUFFIXES
    refuse(
        (is_path, f"there is no data at {shown(source)}", "no such file or folder",
         "give a file, a folder, a pattern such as 'corpus/*.jsonl', or a data set of the hub as OWNER/NAME"),
        (not from_hub, f"there is no data to stream at {source}",
         "no such file or folder, and --stream reads no data set of the hub itself",
         "name a function that returns load_dataset(..., streaming=True): --data file.py:function"),
    )  # fmt: skip
    return [_hub_dataset(source)]


def _each_file(paths: Iterable[Path]) -> list[DataFile | DocumentSource]:
    return _with_rows(chain.from_iterable(all_or_problems([_or_problem(files_at, path) for path in paths])))


def _with_rows(every: Iterable[DataFile]) -> list[DataFile | DocumentSource]:
    """Return files without those that tell of the rows beside them, as a data set's README.md and its licence."""
    listed = [*every]
    about = [each for each in listed if each.kind == "text" and _ABOUT.match(Path(each.name).name)]
    if not about or {each.kind for each in listed} <= {"text", "source"}:
        return [*listed]
    logger.warning("left out, beside files of rows: %s", names_of([each.name for each in about]))
    return [each for each in listed if each not in about]


def _not_a_file(source: str, kind: str) -> RequestError:
    return RequestError(
        f"the data {source} is {kind}, not a file",
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
    """Yield a folder and those below it that are not hidden and not `seen`; of a folder, those that links lead to last.

    Raises:
        OSError: without links, a folder cannot be read.
    """
    # With links one that cannot be read is left out, as glob does: it was not named, and may be lost+found.
    for folder, below, _ in os.walk(base, followlinks=follows_links, onerror=None if follows_links else _fail):
        status = Path(folder).stat()
        if (identity := (status.st_dev, status.st_ino)) in seen:
            below.clear()
            continue
        seen.add(identity)
        visible = sorted(name for name in below if not name.startswith("."))
        below[:] = sorted(visible, key=lambda name: Path(folder, name).is_symlink())
        yield folder


def _fail(error: Exception, *_: Any) -> NoReturn:
    raise error


def _each_once(source: str, paths: Iterable[Path]) -> list[Path]:
    """Return the regular files among `paths`, sorted, each under one name: not that of a link, if it has another."""
    by_file: dict[tuple[int, int], list[Path]] = {}
    for path in paths:
        with suppress(OSError):  # a link that leads nowhere, or where this user may not look
            if stat.S_ISREG((status := path.stat()).st_mode):
                by_file.setdefault((status.st_dev, status.st_ino), []).append(path)
    same = [sorted(names, key=lambda path: (path.is_symlink(), path)) for names in by_file.values()]
    repeated = [names for names in same if len(names) > 1]
    if repeated:
        logger.warning(
            "%s has %s under several names, such as %s: each is read once",
            shown(source), plural(len(repeated), "file"), " and ".join(map(shown, repeated[0][:2])),
        )  # fmt: skip
    return sorted(names[0] for names in same)


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
        if any(name.endswith(_OF_SAVED) for name in names):
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


def _hashed(each: DataFile | DocumentSource) -> DocumentSource:
    if isinstance(each, DocumentSource):
        return each
    with each.open() as file:  # of what it holds: compressed or not, the samples are the same
        digest = hashlib.file_digest(file, "blake2b").hexdigest()
    return DocumentSource(
        each.name,
        f"{each.kind}:{digest}",
        partial(read, each),
        columns=parquet_schema(each)[0] if each.kind == "parquet" else None,
    )


def _hashed_or_unreadable(each: DataFile | DocumentSource) -> DocumentSource:
    made = _or_problem(_hashed, each)
    return DocumentSource(each.name, "unreadable:", partial(_fail, made)) if isinstance(made, RequestError) else made


def _user_function(source: str) -> DocumentSource:
    """Return rows from `path/to/file.py:name`, a callable that gives an iterable of them, such as a streaming dataset.

    Its code stands for its content: rows that change while the file stays are not noticed.
    """
    make = factories.import_callable(source)
    code = Path(source.rpartition(":")[0]).expanduser().read_bytes()

    def rows(columns: Columns) -> Iterator[Row]:
        with failure(f"{source} failed"):
            for number, row in enumerate(make(), 1):
                is_row = isinstance(row, dict)
                yield f"{source}:row {number}", row if is_row else BadRow(f"{type_in_words(row)}, not an object")

    return DocumentSource(source, f"stream:{hashlib.blake2b(code + source.encode()).hexdigest()}", rows, make=make)


def rows_of(source: DocumentSource) -> Any:
    """Return the rows of a source as they are. Those of a function's dataset with a length are read when asked for.

    Raises:
        RequestError: a function fails, or a row cannot be read.
    """
    if source.make is not None:
        with failure(f"{source.name} failed"):
            made = source.make()
            return made if hasattr(made, "__len__") and hasattr(made, "__getitem__") else list(made)
    rows = list(source.rows(Columns()))
    bad = [f"{where}: {row.reason}" for where, row in rows if isinstance(row, BadRow)]
    refuse((bad, f"{source.name} has rows that cannot be read", "; ".join(bad[:_SHOWN]), "repair them"))
    return [row for _, row in rows]


def _saved(source: str) -> DocumentSource:
    import datasets

    with failure(f"the dataset {source} cannot be opened"):  # a damaged dataset fails in many ways
        loaded = datasets.load_from_disk(source)
    if isinstance(loaded, datasets.DatasetDict):
        refuse(
            (
                "train" not in loaded,
                f"the dataset {source} has no split `train`",
                f"its splits are {', '.join(loaded)}",
                f"give one of them: --data {source.rstrip('/')}/{next(iter(loaded))}",
            )
        )
        loaded = loaded["train"]
    return _dataset(source, loaded)


def _hub_dataset(source: str) -> DocumentSource:
    import datasets

    if factories.hub_unreachable_because() is not None:
        from huggingface_hub import constants

        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True  # no call has an option for its cache alone
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
        with failure(f"the dataset {name} is damaged"):
            dataset.data.validate(full=True)  # lengths beyond the file would be read from other memory
        for number, row in enumerate(dataset, 1):
            yield f"{name}:row {number}", row

    label_names = [tuple(feature.names) for feature in dataset.features.values() if hasattr(feature, "names")]
    columns = column_names(dataset.features.arrow_schema)
    return DocumentSource(name, f"dataset:{dataset._fingerprint}", rows, columns, next(iter(label_names), ()))


MOST_FILES = 100  # named; of more, only the hash over all of them is kept
_SHOWN = 3

_WORDS = {
    "task": "--task", "seq_len": "--seq-len", "limit": "train.limit", "too_long": "--too-long", "labels": "the classes",
    "validation": "--validation-data", "columns": "the columns", "tokenizer": "the tokenizer",
    "weights": "--data's weights", "rows_as": "--format", "train_on": "--train-on", "template": "the chat template",
    "marks": "the family whose marks find the assistant's words",
    "shuffle_buffer": "train.shuffle-buffer",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """A record of what samples were made of.

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
    def of(cls, fingerprints: Mapping[str, str], options: Mapping[str, Any], whole: str, **counts: int) -> Self:
        """Return the record of samples made of sources with these `fingerprints`, by name, with `options`."""
        files = {name: fingerprint.partition(":")[2][:16] for name, fingerprint in fingerprints.items()}
        kept = {name: "not given" if value is None else str(value) for name, value in options.items() if name in _WORDS}
        return cls(fingerprint=whole, options=kept, files=files if len(files) <= MOST_FILES else {}, **counts)

    @classmethod
    def joined(cls, parts: Sequence[Self], weights: Sequence[Any]) -> Self:
        """Return the record of samples of several sources, each of which has a weight."""
        words = ", ".join(map(str, weights))
        counts = {name: sum(getattr(part, name) for part in parts) for name in ("documents", "samples", "tokens")}
        return cls(
            fingerprint=hashlib.sha256("\n".join([*(part.fingerprint for part in parts), words]).encode()).hexdigest(),
            options=parts[0].options | {"weights": words},
            files={name: digest for part in parts for name, digest in part.files.items()},
            **counts,
        )

    def changes(self, now: "Provenance") -> list[str]:
        """Return what differs, a line each."""
        lines = []
        for name, word in _WORDS.items():
            before, after = self.options.get(name), now.options.get(name)
            if name in self.options and after != before:
                is_hash = name in ("tokenizer", "template")
                lines.append(f"{word} is another one" if is_hash else f"{word} was {before}, is {after}")
        if self.files and now.files:  # else there are more than MOST_FILES
            other = [name for name, digest in self.files.items() if now.files.get(name, digest) != digest]
            gone, new = self.files.keys() - now.files, now.files.keys() - self.files
            kinds = {"other content": other, "gone": gone, "new": new}
            lines += [f"{kind}: {names_of(sorted(names))}" for kind, names in kinds.items() if names]
            if self.files == now.files and [*self.files] != [*now.files]:
                lines.append("its files are in another order")
        counts = [f"{one.documents:,} documents, {one.samples:,} samples, {one.tokens:,} tokens" for one in (self, now)]
        if counts[0] != counts[1]:
            lines.append(f"it had {counts[0]}, now it has {counts[1]}")
        return lines or ["its files have other content"]


def names_of(names: Sequence[str]) -> str:
    """Return the first of some names, and the number of the others."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else "")
