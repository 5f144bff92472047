"""The samples of a run: tokenised once, kept on disk, and read by all ranks.

A document is one row of jsonl, csv, parquet or a saved dataset, or one text file (long ones: stretches of whole
lines of about 64 KiB). Documents become samples of at most `seq_len` tokens, stored as Arrow files in a cache folder
whose name is a hash of the data, the tokenizer and every option (`cache`). They are memory-mapped, not loaded. Those
not used for 90 days are removed, and the least recently used beyond 200 GiB.
"""

import contextlib
import copy
import hashlib
import json
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from pathlib import Path
from typing import IO, Any

import numpy as np
import platformdirs
from numpy.typing import NDArray
from torch.utils import data as torch_data

from frugal import file_errors, files
from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.config.sample_lengths import DOCUMENT_TOKENS, Lengths, of_counts
from frugal.data import tokenizer as tokenizing
from frugal.data.batches import permutation
from frugal.data.build import SampleMaker, SampleSettings, write_samples
from frugal.data.chat.template import BUILT_IN, marked, missing_tokens, read_template
from frugal.data.mixture import Mixture, WeightedSource, epoch_indices, shares
from frugal.data.report import BuildReport, joined
from frugal.data.rows import Columns
from frugal.data.sources import DocumentSource, Provenance, find_sources, names_of, rows_of
from frugal.data.store import cache, packing
from frugal.data.store.arrow_store import ArrowSamples
from frugal.data.stream.samples import (
    SamplesInMemory,
    SampleStream,
    find_streams,
    formats_of,
)
from frugal.distributed import env, exchange, rendezvous
from frugal.errors import RequestError, failure, refuse
from frugal.models import resolve
from frugal.models.spec import ModelSpec, check_sequence_length
from frugal.planning.plan import Plan
from frugal.units import GIB

TRAINING, VALIDATION, TEST = _EVERYTHING = "training", "validation", "test"

FIRST_ROWS = 1000
"""Rows of a stream that are looked at before training."""

CACHE_BYTES = 200 * GIB
"""The most that all tokenised data may take; see `frugal.files`. A token takes 4 bytes."""

_chain: Any = torch_data.ConcatDataset  # any two sequences are data sets to it
_part: Any = torch_data.Subset  # likewise

_locks: dict[Path, IO[bytes]] = {}  # of what this process has opened, which nobody is to remove while it lives

_OTHER_FOLDER = "set XDG_CACHE_HOME to a folder on another disk"

_SAMPLES = 3  # how samples are made; another number is other samples, on which no run is resumed
_STREAMS = 2  # the order of a stream; likewise
_FORMAT = 6  # of the files in the cache; another number is another cache


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Samples to train on, and samples held out for validation.

    Attributes:
        given: samples of data given for validation and for the end, besides `validation`.
        report: what reading the data met.
        provenance: what the samples were made of.
        folder: the entry of the cache with the samples; empty for several.
    """

    train: ArrowSamples | Mixture | SamplesInMemory
    validation: ArrowSamples | Mixture | None
    report: BuildReport
    provenance: Provenance
    folder: str = ""
    given: tuple[ArrowSamples | Mixture | SamplesInMemory, ...] = ()


def _open(folder: str, report: BuildReport, provenance: Provenance) -> Corpus:
    """Return the samples of an entry, which is not removed while this process lives."""
    path = Path(folder)
    if path not in _locks:
        with contextlib.suppress(OSError):  # on a disk that is read-only
            _locks[path] = files.lock(path / cache.REPORT)
        files.touch(path)
    validation = path / "validation.arrow"
    return Corpus(
        train=ArrowSamples(path / "train.arrow"),
        validation=ArrowSamples(validation) if validation.exists() else None,
        report=report,
        provenance=provenance,
        folder=folder,
    )


def load_corpus(
    sources: Sequence[str],
    tokenizer: Any,
    settings: SampleSettings,
    *,
    label_names: Sequence[str] = (),
    validation_fraction: float = 0.0,
    cache_dir: Path | None = None,
) -> Corpus:
    """Return the samples in `sources`: files, globs, folders, datasets saved to disk, hub names, or `stdlib`.

    Language models: a document longer than `settings.seq_len` tokens becomes several samples, each token being a target
    once. Chats are written as the tokenizer's template says. A `validation_fraction` of the documents, evenly spread
    and at least one, is kept back.

    Classes given as text are numbered as they come. For validation data of its own, pass `label_names` of the
    training data's report, so that both have the same numbers.

    Several processes may call at once; one does the work, and the others wait. What was made before is checked.

    Raises:
        RequestError: nothing there, a column missing, nothing left, no room for it, or (unless asked otherwise) a row
            that cannot be read or is too long.
    """
    held_out = Fraction(validation_fraction).limit_denominator(1_000_000)
    origins = find_sources(sources)
    in_words = _how_rows_are_read(tokenizer, settings)
    options = {
        "format": _SAMPLES, "task": settings.task, "seq_len": settings.seq_len, "columns": settings.columns.options(),
        "limit": settings.limit, "too_long": settings.too_long, "labels": list(label_names),
        "validation": str(held_out),
        "tokenizer": tokenizing.fingerprint(tokenizer), "sources": [source.fingerprint for source in origins],
        **({"pack": packing.MOST_OPEN} if settings.pack else {}),
        **{name: value for name, value in in_words.items() if value is not None},
    }  # fmt: skip
    key = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()

    def write(folder: Path) -> BuildReport:
        return write_samples(origins, SampleMaker(tokenizer, settings, label_names), folder, held_out)

    with failure("the tokenised data cannot be written", RuntimeError, hint=_OTHER_FOLDER):  # without a home
        folder = (cache_dir or platformdirs.user_cache_path("frugal") / "data") / f"{key[:32]}-{_FORMAT}"
    with file_errors.failure("the tokenised data cannot be written", folder.parent, f"{{}}, or {_OTHER_FOLDER}"):
        report = cache.read_or_build(folder, write)
    files.touch(folder)
    files.prune(folder.parent, CACHE_BYTES)
    report.refuse_rows(settings.skip_bad_rows, settings.too_long, settings.seq_len, settings.max_positions)
    provenance = Provenance.of(
        {source.name: source.fingerprint for source in origins}, options | in_words, key,
        documents=report.documents, samples=report.samples, tokens=report.tokens,
    )  # fmt: skip
    return _open(str(folder), report, provenance)


def _how_rows_are_read(tokenizer: Any, settings: SampleSettings) -> dict[str, Any]:
    """Return what decides which tokens of rows are trained on; None where nothing was asked for."""
    if settings.task != "causal-lm":
        because = f"what is trained is {settings.task}; --format says what the rows of a causal language model are"
        is_other = settings.format not in (None, "text")
        refuse((is_other, f"--format {settings.format} cannot be read", because, "leave it out"))
        return {}
    template = getattr(tokenizer, "chat_template", None)
    digest = None if template is None else hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()
    known = marked(template) if isinstance(template, str) else None
    return {
        "rows_as": settings.format, "train_on": None if settings.train_on == "completions" else settings.train_on,
        "template": digest, "marks": None if known is None else known[0].name,
    }  # fmt: skip


@dataclass(frozen=True)
class RunData:
    """The samples of a run, with the model's spec and the tokenizer that belong to them; `tokens` names it in words."""

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

    Of a stream, only what is for validation and the end is read.

    Raises:
        RequestError: the data, the tokenizer or the model cannot be used, or nodes have different data.
    """
    spec = resolve.resolve_request(plan.request)
    if sources := samples_in(spec, settings):
        return _of_own_rows(spec, sources, settings)
    tokenizer, tokens = tokenizer_for(spec, settings.tokenizer, settings.chat_template)
    how = sample_settings(spec, plan.request, settings)
    load = partial(_load_on_each_node, spec, tokenizer, how, settings)
    training: Any
    if settings.stream:
        training, provenance = open_stream(spec, tokenizer, how, settings)
        _refuse_different_data([provenance])
        loaded = load((VALIDATION, TEST))
        _, report = training.first(FIRST_ROWS)  # starts the process that renders its chats, which `load` would end
        held_out: Sequence[Any] = () if settings.validation_files else training.held_out()
    else:
        loaded = load(_EVERYTHING)
        corpus = _joined(loaded[TRAINING], shares(settings.data))
        training, report, provenance, held_out = corpus.train, corpus.report, corpus.provenance, corpus.validation or ()
        if report.num_labels:
            spec = resolve.resolve_request(plan.request, num_labels=report.num_labels)
    validation, test = (loaded[name][0].train if loaded[name] else () for name in (VALIDATION, TEST))
    return RunData(
        spec=spec.for_tokenizer(tokenizer),
        tokenizer=tokenizer,
        tokens=tokens,
        training=training,
        validation=Subset.drawn_from(validation or held_out, settings.validation_samples),
        test=test,
        report=report,
        provenance=provenance,
    )


def samples_in(spec: ModelSpec, settings: RunSettings) -> list[DocumentSource]:
    """Return the sources of a run's data where their rows are samples of its own objective as they are.

    Not where they have text, and its samples none. Raises as `read_samples`.
    """
    if (names := getattr(spec.own_objective, "names", None)) is None or settings.stream:
        return []
    sources, columns = find_sources(settings.data), Columns.of(settings.named_columns())
    with failure(f"{sources[0].name} failed"):
        rows = (row for _, row in sources[0].rows(columns)) if (make := sources[0].make) is None else iter(make())
        first = next(rows, None)
    return (
        sources
        if isinstance(first, Mapping | tuple | list) and (columns.text in names or columns.text not in first)
        else []
    )


def _of_own_rows(spec: ModelSpec, sources: Sequence[DocumentSource], settings: RunSettings) -> RunData:
    """Return rows as they are for an objective of the model's own. Collective. Raises as `read_samples`."""
    evaluated = (settings.validation_files, settings.test_data)
    rows, validation, test = (
        _chain(map(rows_of, each)) if each else ()
        for each in (sources, *(find_sources(names) if names else () for names in evaluated))
    )
    count, fraction = min(len(rows), settings.limit or len(rows)), settings.validation_fraction
    held = range(0, count, max(2, round(1 / fraction))) if fraction else range(0)
    fingerprints = {source.name: source.fingerprint for source in sources}
    whole = hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()
    provenance = Provenance.of(fingerprints, {"limit": settings.limit}, whole, documents=count, samples=count)
    _refuse_different_data([provenance])
    return RunData(
        spec=spec,
        tokenizer=None,
        tokens="rows are samples as they are",
        training=Subset(rows, [i for i in range(count) if i not in held]),
        validation=Subset.drawn_from(validation or Subset(rows, held), settings.validation_samples),
        test=test,
        report=BuildReport(documents=count, samples=count),
        provenance=provenance,
    )


def sample_settings(spec: ModelSpec, request: Request, settings: RunSettings) -> SampleSettings:
    """Return how a run makes samples for a model."""
    return SampleSettings(
        task=spec.task, seq_len=request.seq_len, pack=bool(request.pack), columns=Columns.of(settings.named_columns()),
        limit=settings.limit, skip_bad_rows=settings.skip_bad_rows, too_long=settings.too_long,
        format=settings.format, train_on=settings.train_on, max_positions=spec.max_positions,
    )  # fmt: skip


def open_stream(
    spec: ModelSpec, tokenizer: Any, how: SampleSettings, settings: RunSettings
) -> tuple[SampleStream, Provenance]:
    """Return the samples of a stream, of which nothing but the first rows has been read, and their provenance.

    Raises:
        RequestError: the data cannot be streamed, or not for this task.
    """
    refuse((
        spec.task == "sequence-classification",
        f"{spec.reference} cannot be trained on a stream for {spec.task}",
        "how many classes there are is known when all of it was read",
        "leave --stream out",
    ))  # fmt: skip
    parts, fraction = shares(settings.data), settings.validation_fraction
    names = [part.source for part in parts] or settings.data
    every, most = 1, 0
    if fraction and not settings.validation_files:
        every = max(2, round(1 / fraction))
        most = ceil((settings.validation_samples or FIRST_ROWS) / max(1, len(names)))
    sources = find_streams(names, how.columns, every, most)
    new_maker = partial(SampleMaker, tokenizer, how)
    in_words = _how_rows_are_read(tokenizer, how)
    formats = formats_of(sources, new_maker)
    options = {
        "version": _STREAMS, "task": how.task, "seq_len": how.seq_len, "columns": how.columns.options(),
        "pack": how.pack, "too_long": how.too_long, "tokenizer": tokenizing.fingerprint(tokenizer), "formats": formats,
        "shuffle_buffer": settings.shuffle_buffer, "weights": ", ".join(str(part.part) for part in parts) or None,
        "validation": f"{most} rows, each {every}th" if most else "None", **in_words,
    }  # fmt: skip
    fingerprints = {source.name: source.fingerprint for source in sources}
    whole = hashlib.sha256(json.dumps([options, list(fingerprints.values())], sort_keys=True).encode()).hexdigest()
    stream = SampleStream(
        sources, [part.part for part in parts], settings.seed, settings.shuffle_buffer, new_maker, formats,
        partial(check_vocabulary, spec),
    )  # fmt: skip
    return stream, Provenance.of(fingerprints, options, whole)


Loaded = dict[str, list[Corpus]]
"""The corpora loaded for `TRAINING` (one for each source with a weight), `VALIDATION` and `TEST`."""

_Entry = tuple[str, BuildReport, Provenance]
"""The arguments of `_open`."""


def _load_on_each_node(
    spec: ModelSpec, tokenizer: Any, how: SampleSettings, settings: RunSettings, wanted: Sequence[str]
) -> Loaded:
    """Load samples on one rank of each node, which the others wait for. Collective. Raises as `read_samples`."""
    host, load = socket.gethostname(), partial(_load, spec, tokenizer, how, settings, wanted)
    loaded = load() if env.local_rank() == 0 else {}
    rendezvous.wait_for_all("data")
    own = {name: [(each.folder, each.report, each.provenance) for each in part] for name, part in loaded.items()}
    everywhere = exchange.gather((host, own), tuple[str, dict[str, list[_Entry]]])
    _refuse_different_data([each.provenance for part in loaded.values() for each in part])
    for name, entries in everywhere:
        folders = [folder for part in entries.values() for folder, *_ in part]
        if not loaded and name == host and folders and all(Path(folder).is_dir() for folder in folders):
            loaded = {purpose: [_open(*entry) for entry in part] for purpose, part in entries.items()}
    return loaded or load()  # hosts may share a name, and not their disks


def _refuse_different_data(own: list[Provenance]) -> None:
    """Refuse hosts that read other data: they would train on other samples than the batch is counted by. Collective.

    Raises:
        RequestError: two hosts have different data; `own` is the provenance of what this rank read, if it did.
    """
    gathered = exchange.gather((socket.gethostname(), own), tuple[str, list[Provenance]])
    everywhere = [(host, theirs) for host, theirs in gathered if theirs]
    for host, theirs in everywhere[1:]:
        first, expected = everywhere[0]
        for one, other in zip(expected, theirs, strict=True):
            if other.fingerprint != one.fingerprint:
                raise RequestError(
                    f"{first} and {host} have different data",
                    because=[f"on {host}: {change}" for change in one.changes(other)],
                    hint="give all hosts the same files, such as on a disk that they share",
                )


def _load(spec: ModelSpec, tokenizer: Any, how: SampleSettings, settings: RunSettings, wanted: Sequence[str]) -> Loaded:
    """Load what to train on, and where other data is given for them, what to evaluate on meanwhile, and at the end.

    Raises:
        RequestError: as `load_corpus`, or the model has no embedding for a token.
    """
    parts: list[tuple[str, ...]] = [(share.source,) for share in shares(settings.data)]
    given = {
        TRAINING: parts or [settings.data],
        VALIDATION: [settings.validation_files] if settings.validation_files else [],
        TEST: [settings.test_data] if settings.test_data else [],
    }
    loaded: Loaded = {name: [] for name in given}
    labels: Sequence[str] = ()
    for name in wanted:
        fraction = settings.validation_fraction if name == TRAINING and not settings.validation_files else 0.0
        for paths in given[name]:
            corpus = load_corpus(paths, tokenizer, how, label_names=labels, validation_fraction=fraction)
            check_vocabulary(spec, corpus.report)
            labels = corpus.report.label_names
            loaded[name].append(corpus)
    return loaded


def _joined(parts: Sequence[Corpus], asked: Sequence[WeightedSource]) -> Corpus:
    """Return what to train on, of one source or several with weights."""
    if len(parts) == 1:
        return parts[0]
    weights = [share.part for share in asked]
    validation = [part.validation for part in parts if part.validation is not None]
    return Corpus(
        train=Mixture([part.train for part in parts], weights, [share.source for share in asked]),
        validation=Mixture(validation) if validation else None,
        report=joined([part.report for part in parts]),
        provenance=Provenance.joined([part.provenance for part in parts], weights),
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


def tokenizer_for(spec: ModelSpec, name: str | None, chat_template: str | None) -> tuple[Any, str]:
    """Return the tokenizer to train `spec` with, and what it is in words: the one asked for, or the model's own.

    Only random weights are trained on bytes unasked: a pretrained model knows its own tokens alone.

    Raises:
        RequestError: there is none, or no such template.
    """
    refuse((
        name is None and spec.own_tokenizer is None and spec.weights is not None,
        f"{spec.reference} has pretrained weights, and no tokenizer",
        "its weights know the tokens that they were trained on, and no others",
        "put its tokenizer's files into the folder, or name one: --tokenizer NAME, or --tokenizer byte",
    ))  # fmt: skip
    reference = name or spec.own_tokenizer or tokenizing.BYTE
    tokenizer = tokenizing.load_tokenizer(reference)
    words = "tokens are bytes" if reference == tokenizing.BYTE else f"{len(tokenizer)} tokens of {reference}"
    if spec.own_tokenizer not in (None, reference):
        own = tokenizing.load_tokenizer(spec.own_tokenizer)
        if tokenizing.fingerprint(own) != tokenizing.fingerprint(tokenizer):
            words = f"tokens of {reference}, not the model's own"
    if chat_template is not None:
        tokenizer = copy.deepcopy(tokenizer)  # the byte tokenizer is one for all
        tokenizer.chat_template = read_template(chat_template)
        words += f", chat template {chat_template}"
        if chat_template in BUILT_IN and (pieces := missing_tokens(tokenizer)):
            words += f", of which {' and '.join(pieces)} are no tokens here, but cut into pieces"
    return tokenizer, words


def lengths_of(
    request: Request, settings: RunSettings, defaults: Collection[str] = ()
) -> tuple[Lengths | None, int, int]:
    """Return the lengths of the samples that a plan for `request` would train on; their source says what is left out.
    None where they are no tokens.

    Also return the maximum tokens of a sample to plan for: those of the request, unless `defaults` names them and the
    longest sample has at most half as many; then its own, rounded up to a multiple of 8, which matrix products like.
    And the request's `document_tokens`, or those of the data's packs where `defaults` names them.

    The data is tokenised as training will do it, and kept for it. Of more than `MOST_LENGTHS` lengths some are read,
    evenly spread.

    Raises: as `read_samples`.
    """
    spec = resolve.resolve_request(request)
    if samples_in(spec, settings):
        return None, request.seq_len, request.document_tokens
    check_sequence_length(spec, 0 if "seq_len" in defaults else request.seq_len)
    _, corpus = read_training_data(request, settings)
    of_stream = [f"the first {FIRST_ROWS:,} rows of the stream"] * settings.stream
    lengths = lengths_of_corpus(corpus, names_of(settings.data), of_stream or corpus.report.left_out(settings.too_long))
    longest = max(int(each.lengths.max()) for each in (corpus.train, corpus.validation, *corpus.given) if each)
    is_kept = "seq_len" not in defaults or settings.stream or 2 * longest > request.seq_len
    seq_len = request.seq_len if is_kept else -(-longest // 8) * 8
    packs: list[Any] = [
        getattr(part, "most_documents", None) for part in getattr(corpus.train, "parts", [corpus.train])
    ]
    is_given = "document_tokens" not in defaults or None in packs  # None: samples are not packed, or it is not known
    return lengths, seq_len, request.document_tokens if is_given else _document_tokens(seq_len // max(packs))


def _document_tokens(mean: int) -> int:
    """Return a power of two up to the mean tokens of documents; 0 where they are so short that masks take less."""
    return 1 << (mean.bit_length() - 1) if mean >= DOCUMENT_TOKENS // 2 else 0


def read_training_data(request: Request, settings: RunSettings) -> tuple[tuple[Any, str], Corpus]:
    """Return the tokenizer, its name in words, and what a plan for `request` trains on; of a stream the first samples.

    Raises: as `read_samples`.
    """
    spec = resolve.resolve_request(request)
    how = sample_settings(spec, request, settings)
    how = replace(how, seq_len=min(request.seq_len, spec.max_positions or request.seq_len))
    tokenizer, words = tokenizer_for(spec, settings.tokenizer, settings.chat_template)
    if settings.stream:
        stream, provenance = open_stream(spec, tokenizer, how, settings)
        samples, report = stream.first(FIRST_ROWS)
        return (tokenizer, words), Corpus(train=samples, validation=None, report=report, provenance=provenance)
    loaded = _load(spec, tokenizer, how, settings, _EVERYTHING)
    given = tuple(each.train for name in (VALIDATION, TEST) for each in loaded[name])
    return (tokenizer, words), replace(_joined(loaded[TRAINING], shares(settings.data)), given=given)


MOST_LENGTHS = 100_000_000
"""Lengths that a plan counts: it takes a second."""


def lengths_of_corpus(corpus: Corpus, name: str, notes: Sequence[str]) -> Lengths:
    """Return the lengths of the training samples; `name` and `notes` say where they are from."""
    drawn = epoch_indices(corpus.train)
    lengths = corpus.train.lengths[drawn]
    counted_tokens = getattr(corpus.train, "counted_tokens", corpus.train.lengths)[drawn]
    mean = None if np.array_equal(counted_tokens, lengths) else float(counted_tokens.mean())
    return replace(histogram(lengths, name, notes), counted_mean=mean)


def histogram(lengths: NDArray[Any], name: str, notes: Sequence[str]) -> Lengths:
    """Count samples by their `lengths`; `name` and `notes` say where they are from."""
    stride = -(-len(lengths) // MOST_LENGTHS)
    numbers = np.bincount(lengths[::stride])
    counts = {int(tokens): int(numbers[tokens]) for tokens in np.flatnonzero(numbers)}
    if stride > 1:
        name = f"{name}; lengths of one sample in {stride}"
    return of_counts(counts, source="; ".join([name, *notes]))


class Subset(_part, Sequence[Any]):
    """A part of samples, the same in every run on this data."""

    @classmethod
    def drawn_from(cls, samples: Sequence[Any], number: int | None) -> "Subset":
        """Return `number` of them, drawn evenly from all documents; all for None."""
        if number is None or number >= len(samples):
            return cls(samples, range(len(samples)))
        return cls(samples, sorted(map(int, permutation(len(samples), seed=0, epoch=0)[:number])))

    @property
    def lengths(self) -> Any:
        """Return the tokens of each, shape `(samples,)`; None where they are not known."""
        lengths = getattr(self.dataset, "lengths", None)
        return None if lengths is None else lengths[np.asarray(self.indices, dtype=np.int64)]
