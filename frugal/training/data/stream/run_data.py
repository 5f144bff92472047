"""What a run trains on whose data is streamed, and what a plan knows of it before: the first rows."""

import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from math import ceil
from typing import Any

from frugal.config.request import Request
from frugal.config.run_settings import RunSettings
from frugal.config.sample_lengths import Lengths
from frugal.distributed import exchange
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.training.data import corpus
from frugal.training.data import tokenizer as tokenizing
from frugal.training.data.build import SampleMaker
from frugal.training.data.corpus import RunData
from frugal.training.data.mixture import shares
from frugal.training.data.report import BuildReport
from frugal.training.data.rows import BadRow, Columns
from frugal.training.data.sources import Provenance, names_of
from frugal.training.data.stream import shards as reading
from frugal.training.data.stream.blocks import RowStream
from frugal.training.data.stream.samples import SamplesInMemory, SampleStream
from frugal.training.data.stream.shards import HeldOut, StreamSource, find_streams
from frugal.training.models import resolve
from frugal.training.models.spec import ModelSpec

FIRST_ROWS = 1000
"""Looked at before training: what rows are, and how long."""

_VERSION = 1  # of the order of a stream; another number is another order, in which no run is resumed


def read_samples(plan: Plan, settings: RunSettings) -> RunData:
    """Open the stream, and read what is for validation and the end. Collective.

    Raises:
        RequestError: as `frugal.training.data.corpus.read_samples`.
    """
    spec = resolve.resolve_request(plan.request)
    tokenizer, tokens = corpus.tokenizer_for(spec, settings)
    seq_len, pack = plan.request.seq_len, bool(plan.request.pack)
    stream, provenance = open_stream(spec, tokenizer, seq_len, pack, settings)
    _refuse_different_streams(provenance)
    _, report = stream.first(FIRST_ROWS)
    others = corpus.load_others(spec, tokenizer, seq_len, pack, settings)
    validation: Sequence[Any] = others["validation"]
    if not settings.validation_data:
        held = [row for source in stream.rows.sources for row in reading.held_out(source.shards[0])]
        validation = SamplesInMemory(stream.of_examples(held))
    return RunData(
        spec=spec.for_tokenizer(tokenizer),
        tokenizer=tokenizer,
        tokens=tokens,
        training=stream,
        validation=corpus.Subset.drawn_from(validation, settings.validation_samples),
        test=others["test"],
        report=report,
        provenance=provenance,
    )


def open_stream(
    spec: ModelSpec, tokenizer: Any, seq_len: int, pack: bool, settings: RunSettings
) -> tuple[SampleStream, Provenance]:
    """The samples of a stream, of which nothing but the first rows has been read, and where they are from.

    Raises:
        RequestError: the data cannot be streamed, or not for this task.
    """
    if spec.task == "sequence-classification":
        raise RequestError(
            f"{spec.reference} cannot be trained on a stream for {spec.task}",
            because="how many classes there are is known when all of it was read",
            hint="leave --stream out",
        )
    columns = Columns(
        text=settings.column("text"), label=settings.column("label"), source=settings.column("source"),
        target=settings.column("target"),
    )  # fmt: skip
    parts = shares(settings.data)
    names = [part.source for part in parts] or settings.data
    sources = find_streams(names, columns, _held_out(settings, len(names)))
    rows = RowStream(sources, [part.part for part in parts], settings.seed, settings.shuffle_buffer)
    new_maker = partial(
        SampleMaker, tokenizer, spec.task, seq_len, columns, settings.too_long, (), settings.format, settings.train_on
    )
    in_words = corpus.how_rows_are_read(tokenizer, spec.task, settings.format, settings.train_on)
    formats = [kind for source in sources for kind in _formats(source, new_maker, columns)]
    stream = SampleStream(
        rows, new_maker, formats, pack, settings.skip_bad_rows, partial(corpus.check_vocabulary, spec)
    )
    options = {
        "version": _VERSION, "task": spec.task, "seq_len": seq_len, "columns": asdict(columns), "pack": pack,
        "too_long": settings.too_long, "tokenizer": tokenizing.fingerprint(tokenizer), "formats": formats,
        "shuffle_buffer": settings.shuffle_buffer, "weights": ", ".join(str(part.part) for part in parts) or None,
        "validation": str(_held_out(settings, len(names))), **in_words,
    }  # fmt: skip
    whole = json.dumps([options, [source.fingerprint for source in sources]], sort_keys=True)
    return stream, Provenance.of(sources, hashlib.sha256(whole.encode()).hexdigest(), options)


def _held_out(settings: RunSettings, num_sources: int) -> HeldOut | None:
    """What of each source is kept for validation: of its first shard the part that is asked for, until it is enough."""
    fraction, most = settings.validation_fraction, settings.validation_samples
    if settings.validation_data or not fraction:
        return None
    return HeldOut(every=max(2, round(1 / fraction)), most=ceil((most or FIRST_ROWS) / num_sources))


def _formats(source: StreamSource, new_maker: Callable[[], SampleMaker], columns: Columns) -> Iterator[Any]:
    """What the rows of each file of a source are, by its first good one."""
    for (_, name), its_shards in groupby(source.shards, key=lambda shard: (shard.part, shard.name)):
        maker = new_maker()
        for example in reading.examples(list(its_shards)):
            _, row = reading.row_of(example, columns)
            if not isinstance(row, BadRow):
                maker.check_columns(replace(source, name=name), list(row))
                break
        yield maker.format


def _refuse_different_streams(provenance: Provenance) -> None:
    """Ranks that read other data would train on other samples than the batch is counted by. Collective."""
    (first, expected), *others = exchange.gather((socket.gethostname(), provenance), tuple[str, Provenance])
    for host, other in others:
        if other.fingerprint != expected.fingerprint:
            raise RequestError(
                f"{first} and {host} have different data",
                because=[f"on {host}: {change}" for change in expected.changes(other)],
                hint="give all hosts the same files, such as on a disk that they share",
            )


def lengths_of(request: Request, settings: RunSettings) -> Lengths:
    """How long the first samples are that a plan for `request` would train on. Raises as `read_samples`."""
    (_, _), samples, _ = first_samples(request, settings)
    return corpus.histogram(samples.lengths, names_of(settings.data), [f"the first {FIRST_ROWS:,} rows of the stream"])


def first_samples(request: Request, settings: RunSettings) -> tuple[tuple[Any, str], SamplesInMemory, BuildReport]:
    """The tokenizer, what it is in words, and the first samples of a stream. Raises as `read_samples`."""
    spec = resolve.resolve_request(request)
    seq_len = min(request.seq_len, spec.max_positions or request.seq_len)
    tokenizer, words = corpus.tokenizer_for(spec, settings)
    stream, _ = open_stream(spec, tokenizer, seq_len, bool(request.pack), settings)
    return (tokenizer, words), *stream.first(FIRST_ROWS)
