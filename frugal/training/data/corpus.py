"""The samples of a run: tokenised once, kept on disk, and read by all ranks.

A document is one row of jsonl, csv, parquet or a saved dataset, or one text file (long ones: stretches of whole
lines of about 64 KiB). Documents become samples of at most `seq_len` tokens, stored as Arrow files in a cache folder
whose name is a hash of the data, the tokenizer and every option (`cache`). They are memory-mapped, not loaded. Those
not used for 90 days are removed, and the least recently used beyond 200 GiB.
"""

import contextlib
import copy
import errno
import hashlib
import json
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import platformdirs
from numpy.typing import NDArray

from frugal import files
from frugal.config import sample_lengths
from frugal.config.request import Request
from frugal.config.run_settings import Format, RunSettings, TrainOn
from frugal.config.sample_lengths import Lengths, TooLong
from frugal.distributed import env, exchange, rendezvous
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.training.data import tokenizer as tokenizing
from frugal.training.data.batches import permutation
from frugal.training.data.build import SampleMaker, write_samples
from frugal.training.data.chat import marks, rendering
from frugal.training.data.chat.template import BUILT_IN, missing_tokens, read_template
from frugal.training.data.mixture import Mixture, epoch_indices, shares
from frugal.training.data.report import BuildReport, joined
from frugal.training.data.rows import Columns
from frugal.training.data.sources import Provenance, find_sources, names_of
from frugal.training.data.store import cache, packing
from frugal.training.data.store.arrow_store import ArrowSamples
from frugal.training.models import resolve
from frugal.training.models.spec import ModelSpec
from frugal.units import GIB

CACHE_BYTES = 200 * GIB
"""Of all tokenised data; see `frugal.files`. A token takes 4 bytes."""

_locks: dict[Path, IO[bytes]] = {}  # of what this process has opened, which nobody is to remove while it lives

_SAMPLES = 2  # how samples are made; another number is other samples, on which no run is resumed
_FORMAT = 4  # of the files in the cache; another number is another cache

logger = logging.getLogger("frugal")


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Samples to train on, samples held out for validation, and where they are kept."""

    train: ArrowSamples | Mixture
    validation: ArrowSamples | Mixture | None
    entry: "Entry"

    @property
    def report(self) -> BuildReport:
        """What reading the data met."""
        return self.entry.report

    @property
    def provenance(self) -> Provenance:
        """What the samples were made of."""
        return self.entry.provenance

    @property
    def fingerprint(self) -> str:
        """A hash of all that made the samples."""
        return self.provenance.fingerprint


@dataclass(frozen=True)
class Entry:
    """A whole entry of the cache: its folder, the report of reading the data, and where the data comes from."""

    folder: str
    report: BuildReport
    provenance: Provenance

    def open(self) -> Corpus:
        """Its samples. Nobody removes them while this process lives."""
        folder = Path(self.folder)
        if folder not in _locks:
            with contextlib.suppress(OSError):  # on a disk that is read-only
                _locks[folder] = files.lock(folder / cache.RECORD)
            files.touch(folder)
        train, validation = (folder / f"{name}.arrow" for name in ("train", "validation"))
        return Corpus(
            train=ArrowSamples(train, self.provenance.fingerprint),
            validation=ArrowSamples(validation, self.provenance.fingerprint) if validation.exists() else None,
            entry=self,
        )


def load_corpus(
    sources: Sequence[str],
    *,
    tokenizer: Any,
    task: str,
    seq_len: int,
    pack: bool = False,
    columns: Columns | None = None,
    limit: int | None = None,
    skip_bad_rows: bool = False,
    too_long: TooLong = "error",
    label_names: Sequence[str] = (),
    rows_as: Format | None = None,
    train_on: TrainOn = "completions",
    validation_fraction: float = 0.0,
    cache_dir: Path | None = None,
) -> Corpus:
    """The samples in `sources`: files, globs, folders, datasets saved to disk, hub names, or `stdlib`.

    Language models: a document longer than `seq_len` tokens becomes several samples, each token being a target
    once; with `pack`, shorter ones share a sample. Chats, completions, pairs and classes cannot be cut: `too_long` says
    what to do. `rows_as`: what rows are whose columns fit several formats (`chat.formats`). Chats are written as the
    tokenizer's template says; `train_on`: whether every token of them and of completions is a target. `limit` is in
    documents. A `validation_fraction` of the documents, evenly spread and at least one, is kept back.

    Classes given as text are numbered as they come. For validation data of its own, pass `label_names` of the
    training data's report, so that both have the same numbers.

    Several processes may call at once; each may do the work, and the first to finish is kept. What was made before is
    checked.

    Raises:
        RequestError: nothing there, a column missing, nothing left, no room for it, or (unless asked otherwise) a row
            that cannot be read or is too long.
    """
    _check_amounts(validation_fraction, limit)
    columns = columns or Columns()
    held_out = Fraction(validation_fraction).limit_denominator(1_000_000)
    origins = find_sources(sources)
    in_words = how_rows_are_read(tokenizer, task, rows_as, train_on)
    options = {
        "format": _SAMPLES, "task": task, "seq_len": seq_len, "columns": asdict(columns), "limit": limit,
        "too_long": too_long, "labels": list(label_names), "validation": str(held_out),
        "tokenizer": tokenizing.fingerprint(tokenizer), "sources": [source.fingerprint for source in origins],
        **({"pack": packing.MOST_OPEN} if pack else {}),
        **{name: value for name, value in in_words.items() if value is not None},
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()

    def write(folder: Path) -> BuildReport:
        return write_samples(
            origins, SampleMaker(tokenizer, task, seq_len, columns, too_long, label_names, rows_as, train_on), folder,
            pack=pack, limit=limit, skip_bad_rows=skip_bad_rows, validation_fraction=held_out,
        )  # fmt: skip

    folder, report = _stored(cache_dir, f"{key[:32]}-{_FORMAT}", write)
    if not skip_bad_rows:
        report.refuse_bad_rows()
    counts = {"documents": report.documents, "samples": report.samples, "tokens": report.tokens}
    return Entry(str(folder), report, Provenance.of(origins, key, options | in_words, **counts)).open()


def how_rows_are_read(tokenizer: Any, task: str, rows_as: Format | None, train_on: TrainOn) -> dict[str, Any]:
    """What decides which tokens of rows are trained on; None where nothing was asked for."""
    if task != "causal-lm":
        if rows_as not in (None, "text"):
            because = f"what is trained is {task}; --format says what the rows of a causal language model are"
            raise RequestError(f"--format {rows_as} cannot be read", because=because, hint="leave it out")
        return {}
    template = getattr(tokenizer, "chat_template", None)
    digest = None if template is None else hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    known = marks.marked(template) if isinstance(template, str) else None
    return {
        "rows_as": rows_as, "train_on": None if train_on == "completions" else train_on, "template": digest,
        "marks": None if known is None else known[0].name,
    }  # fmt: skip


def _stored(cache_dir: Path | None, name: str, write: Callable[[Path], BuildReport]) -> tuple[Path, BuildReport]:
    """The entry `name` of a cache, which is made, or made anew, where it has to be.

    In `cache_dir`, or the user's cache, or if that cannot be written to, in a folder of the temporary folder.
    """
    failures = []
    write = rendering.ended_afterwards()(write)
    for find in (_user_cache, _temporary_cache) if cache_dir is None else (lambda: cache_dir,):
        place = "the cache folder"
        try:
            folder = find() / name
            place = str(folder.parent)
            report = _read_or_make(folder, write)
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            failures.append(f"{place}: {(isinstance(error, OSError) and error.strerror) or error}")
            if find is _user_cache:
                logger.warning("the tokenised data cannot be kept in %s; a temporary folder is used", failures[-1])
            continue
        files.touch(folder)
        files.prune(folder.parent, CACHE_BYTES)
        return folder, report
    raise RequestError(
        "the tokenised data cannot be written",
        because=failures,
        hint="set XDG_CACHE_HOME to a folder that can be written to",
    )


def _user_cache() -> Path:
    return platformdirs.user_cache_path("frugal") / "data"


def _temporary_cache() -> Path:
    """One of this user's own, the same for all processes.

    Raises:
        OSError: it cannot be made, or belongs to somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"frugal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, f"{folder} belongs to somebody else")
    return folder / "data"


def _read_or_make(folder: Path, write: Callable[[Path], BuildReport]) -> BuildReport:
    damaged, seen = None, cache.identity(folder)  # before it is read: another may put a whole one in its place
    try:
        return cache.read(folder, all_bytes=True).report
    except FileNotFoundError:
        pass
    except cache.DamagedError as error:
        damaged = seen
        logger.warning("the tokenised data in %s is damaged (%s): making it anew", folder, error)
    cache.build(folder, write, damaged=damaged)
    return cache.read(folder, all_bytes=False).report


def _check_amounts(validation_fraction: float, limit: int | None) -> None:
    if not 0 <= validation_fraction < 1:
        raise RequestError(
            f"a validation fraction of {validation_fraction} is not possible",
            because="it must be at least 0 and less than 1",
        )
    if limit is not None and limit < 1:
        raise RequestError(f"a limit of {limit} documents leaves no data", hint="ask for at least 1 document")


@dataclass(frozen=True)
class RunData:
    """The samples of a run, with the model's spec and the tokenizer that belong to them; `tokens` says which it is."""

    spec: Any
    tokenizer: Any
    tokens: str
    training: Any
    validation: Sequence[Any]
    test: Sequence[Any]
    report: Any
    provenance: Provenance


def read_samples(plan: Plan, settings: RunSettings) -> RunData:
    """Read, tokenise and split the data. One rank of each node does it, the others open what it made. Collective.

    Raises:
        RequestError: the data, the tokenizer or the model cannot be used, or nodes have different data.
    """
    spec = resolve.resolve_request(plan.request)
    tokenizer, tokens = tokenizer_for(spec, settings)
    corpora = _on_each_node(lambda: _load(spec, tokenizer, plan.request.seq_len, bool(plan.request.pack), settings))
    num_parts = len(shares(settings.data)) or 1
    corpus, others = _joined(corpora[:num_parts], settings), iter(corpora[num_parts:])
    validation, test = (next(others).train if paths else () for paths in (settings.validation_data, settings.test_data))
    if corpus.report.num_labels:
        spec = resolve.resolve_request(plan.request, num_labels=corpus.report.num_labels)
    return RunData(
        spec=spec.for_tokenizer(tokenizer),
        tokenizer=tokenizer,
        tokens=tokens,
        training=corpus.train,
        validation=Subset.drawn_from(validation or corpus.validation or (), settings.validation_samples),
        test=test,
        report=corpus.report,
        provenance=corpus.provenance,
    )


def _on_each_node(load: Callable[[], tuple[Corpus, ...]]) -> tuple[Corpus, ...]:
    """What `load` makes: by one rank of each node, which the others wait for. Collective."""
    host = socket.gethostname()
    loaded = load() if env.local_rank() == 0 else ()
    rendezvous.wait_for_all("data")
    everywhere = exchange.gather((host, [corpus.entry for corpus in loaded]), tuple[str, list[Entry]])
    _refuse_different_data(everywhere)
    return loaded or _made_on(host, everywhere) or load()


def load_others(
    spec: ModelSpec, tokenizer: Any, seq_len: int, pack: bool, settings: RunSettings
) -> dict[str, Sequence[Any]]:
    """The samples of --validation-data and --test-data, by these names. Collective; raises as `read_samples`."""
    given = {
        name: paths for name, paths in (("validation", settings.validation_data), ("test", settings.test_data)) if paths
    }
    load = partial(_load_paths, spec, tokenizer, seq_len, pack, settings)
    corpora = _on_each_node(lambda: tuple(load(paths) for paths in given.values())) if given else ()
    return {"validation": (), "test": ()} | dict(zip(given, (corpus.train for corpus in corpora), strict=True))


def _made_on(host: str, everywhere: Sequence[tuple[str, Sequence[Entry]]]) -> tuple[Corpus, ...]:
    """What a rank of this host has opened; nothing where hosts share a name and none of them has it here."""
    for name, entries in everywhere:
        if name == host and entries and all(Path(entry.folder).is_dir() for entry in entries):
            return tuple(entry.open() for entry in entries)
    return ()


def _refuse_different_data(everywhere: Sequence[tuple[str, Sequence[Entry]]]) -> None:
    """Nodes that read other data would train on other samples than the batch is counted by."""
    (first, entries), *others = [(host, entries) for host, entries in everywhere if entries]
    for host, theirs in others:
        for entry, other in zip(entries, theirs, strict=True):
            if other.provenance.fingerprint != entry.provenance.fingerprint:
                raise RequestError(
                    f"{first} and {host} have different data",
                    because=[f"on {host}: {change}" for change in entry.provenance.changes(other.provenance)],
                    hint="give all hosts the same files, such as on a disk that they share",
                )


def _load(spec: ModelSpec, tokenizer: Any, seq_len: int, pack: bool, settings: RunSettings) -> tuple[Corpus, ...]:
    """What to train on; and where other data is given for them, what to evaluate on meanwhile, and at the end.

    Raises:
        RequestError: as `load_corpus`, or the model has no embedding for a token.
    """
    load = partial(_load_paths, spec, tokenizer, seq_len, pack, settings)
    kept_back = 0.0 if settings.validation_data else settings.validation_fraction
    corpora: list[Corpus] = []
    by_source: list[tuple[str, ...]] = [(share.source,) for share in shares(settings.data)]
    for paths in by_source or [settings.data]:
        corpora.append(load(paths, kept_back, corpora[-1].report.label_names if corpora else ()))
    others = (paths for paths in (settings.validation_data, settings.test_data) if paths)
    return *corpora, *(load(paths, label_names=corpora[-1].report.label_names) for paths in others)


def _load_paths(
    spec: ModelSpec,
    tokenizer: Any,
    seq_len: int,
    pack: bool,
    settings: RunSettings,
    paths: tuple[str, ...],
    validation_fraction: float = 0.0,
    label_names: Sequence[str] = (),
) -> Corpus:
    columns = Columns(
        text=settings.column("text"),
        label=settings.column("label"),
        source=settings.column("source"),
        target=settings.column("target"),
    )
    corpus = load_corpus(
        paths, tokenizer=tokenizer, task=spec.task, seq_len=seq_len, pack=pack, columns=columns,
        limit=settings.limit, skip_bad_rows=settings.skip_bad_rows, too_long=settings.too_long,
        rows_as=settings.format, train_on=settings.train_on, validation_fraction=validation_fraction,
        label_names=label_names,
    )  # fmt: skip
    check_vocabulary(spec, corpus.report)
    return corpus


def _joined(parts: Sequence[Corpus], settings: RunSettings) -> Corpus:
    """What to train on, of sources with weights all of them."""
    if len(parts) == 1:
        return parts[0]
    asked = shares(settings.data)
    weights = [share.part for share in asked]
    validation = [part.validation for part in parts if part.validation is not None]
    provenance = Provenance.joined([part.provenance for part in parts], weights)
    return Corpus(
        train=Mixture([part.train for part in parts], weights, [share.source for share in asked]),
        validation=Mixture(validation) if validation else None,
        entry=Entry("", joined([part.report for part in parts]), provenance),
    )


def check_vocabulary(spec: ModelSpec, report: BuildReport) -> None:
    """Refuse tokens that a model would look up beyond its embeddings, on a GPU without a word of where they are."""
    token, where = report.largest_token
    if spec.vocab_size is not None and token >= spec.vocab_size:
        raise RequestError(
            f"{spec.reference} has no embedding for token {token}, which the tokenizer makes of {where}",
            because=f"it has {spec.vocab_size}, for the tokens 0 to {spec.vocab_size - 1}",
            hint="take the tokenizer that belongs to the model, or a config.json with a larger vocab_size",
        )


def tokenizer_for(spec: ModelSpec, settings: RunSettings) -> tuple[Any, str]:
    """The tokenizer with the chat template that is asked for, and what it is, in words."""
    tokenizer, words = tokenizing.load_for(spec, settings.tokenizer)
    if settings.chat_template is not None:
        tokenizer = copy.deepcopy(tokenizer)  # the byte tokenizer is one for all
        tokenizer.chat_template = read_template(settings.chat_template)
        words += f", chat template {settings.chat_template}"
        if settings.chat_template in BUILT_IN and (pieces := missing_tokens(tokenizer)):
            words += f", of which {' and '.join(pieces)} are no tokens here, but cut into pieces"
    return tokenizer, words


def lengths_of(request: Request, settings: RunSettings) -> Lengths:
    """How long the samples are that a plan for `request` would train on; its source says what is left out.

    The data is tokenised as training will do it, and kept for it. Of more than `MOST_LENGTHS` lengths some are read,
    evenly spread.

    Raises: as `read_samples`.
    """
    _, corpus = read_training_data(request, settings)
    return lengths_of_corpus(corpus, names_of(settings.data), corpus.report.left_out(settings.too_long))


def read_training_data(request: Request, settings: RunSettings) -> tuple[tuple[Any, str], Corpus]:
    """The tokenizer, what it is in words, and what a plan for `request` would train on. Raises as `read_samples`."""
    spec = resolve.resolve_request(request)
    seq_len = min(request.seq_len, spec.max_positions or request.seq_len)
    tokenizer, words = tokenizer_for(spec, settings)
    corpora = _load(spec, tokenizer, seq_len, bool(request.pack), settings)
    return (tokenizer, words), _joined(corpora[: len(shares(settings.data)) or 1], settings)


MOST_LENGTHS = 100_000_000
"""That a plan counts: it takes a second."""


def lengths_of_corpus(corpus: Corpus, name: str, notes: Sequence[str]) -> Lengths:
    """The lengths of its training samples; `name` and `notes` say where they are from."""
    drawn = epoch_indices(corpus.train)
    lengths, counted_tokens = corpus.train.lengths[drawn], corpus.train.counted_tokens[drawn]
    counted = histogram(lengths, name, notes)
    return (
        counted
        if np.array_equal(counted_tokens, lengths)
        else replace(counted, counted_mean=float(counted_tokens.mean()))
    )


def histogram(lengths: NDArray[Any], name: str, notes: Sequence[str]) -> Lengths:
    """How many samples have how many tokens, of the `lengths` of each; `name` and `notes` say where they are from."""
    stride = -(-len(lengths) // MOST_LENGTHS)
    numbers = np.bincount(lengths[::stride])
    counts = {int(tokens): int(numbers[tokens]) for tokens in np.flatnonzero(numbers)}
    sampled = [f"lengths of one sample in {stride}"] * (stride > 1)
    return sample_lengths.of_counts(counts, source="; ".join([name, *sampled, *notes]))


@dataclass(frozen=True)
class Subset(Sequence[Any]):
    """Some of `samples`, the same in every run on this data."""

    samples: Sequence[Any]
    indices: Sequence[int]

    @classmethod
    def drawn_from(cls, samples: Sequence[Any], number: int | None) -> "Subset":
        """`number` of them, drawn evenly from all documents; None: all."""
        if number is None or number >= len(samples):
            return cls(samples, range(len(samples)))
        return cls(samples, sorted(map(int, permutation(len(samples), seed=0, epoch=0)[:number])))

    @property
    def lengths(self) -> Any:
        """Tokens of each, shape `(samples,)`; None where they are not known."""
        lengths = getattr(self.samples, "lengths", None)
        return None if lengths is None else lengths[np.asarray(self.indices, dtype=np.int64)]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.samples[self.indices[index]]
