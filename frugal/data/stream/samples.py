"""The samples of a stream, made as they are needed, and the global batches of them: the same on any number of ranks.

Every rank reads and tokenises all of it, and takes its micro-batches of each global batch as it does of data on disk.
So global batches are the same whatever the ranks, packs and batches of tokens are exact, ranks exchange nothing while
they train, and the state of one rank is that of all. The price is that W ranks tokenise W times. It is done while the
step before runs, on one thread; docs/decisions has what it takes.

`datasets.IterableDataset` reads shard after shard and resumes at the shard where it stopped, which it reads again up to
its place. With files as shards, as `load_dataset(..., streaming=True)` has them, that may be all of a file of a
terabyte. So jsonl and text are cut at the ends of lines into shards of 64 MiB, and parquet into its row groups. Files
of json and csv, and a user's function, are one shard each. A row passes through the library pickled: the library would
give all rows of a batch the same fields, with None for those that a row lacks, also within arguments of a tool call.

`datasets.IterableDataset.shuffle` keeps a buffer that is not part of its `state_dict`: a run that resumes loses its
rows. Here a block of as many rows is read, and put into a random order that follows from the seed, the epoch and the
block's number. So the library's state where a block begins and a number of samples say where a run is, and a run that
resumes reads one block again, and nothing before it. Packs are closed at the end of each block.

The order of shards is random, too. Several sources with weights are drawn by `datasets.interleave_datasets`, each row
from a random source; a source that ends begins again, until all were read to their end once (`all_exhausted`).
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from frugal.config.run_settings import Format
from frugal.data.batches import GlobalBatch, Position, StreamPlace, mixed, permutation
from frugal.data.build import Document, SampleMaker, grouped
from frugal.data.report import BuildReport
from frugal.data.rows import CUT_AT_LINES, Columns, DataFile, Row, flat, parquet_schema, read, shown
from frugal.data.sources import DocumentSource, find_named
from frugal.data.store.arrow_store import as_sample
from frugal.data.store.packing import Packer
from frugal.distributed import env
from frugal.errors import RequestError, failure, logger, refuse
from frugal.models.objectives import Sample

SHARD_BYTES = 64 << 20
_LOOKED_AT = 64 << 10  # bytes of each end of a file that its fingerprint is of: reading all of it takes hours
_TOKENISED = 64  # rows at once
_APART = 1_000_003  # between the seeds of sources, so that two with as many shards have different orders


@dataclass(frozen=True)
class Shard:
    """Rows that are read in one go.

    Attributes:
        part: number of the file, or of what else is a source, among those of all sources.
        name: of the file; of something else, as `--data` names it.
        file: None for something else.
        begin, end: in bytes of the file; of parquet in row groups. What is compressed is read as a whole.
        columns: where the rows have their texts.
        every, most: of the rows each `every`-th, from the first on, at most `most`, is kept from training.
    """

    part: int
    name: str
    file: DataFile | None
    begin: int
    end: int | None
    columns: Columns
    every: int = 1
    most: int = 0

    def rows(self, *, held_out: bool = False) -> Iterator[Row]:
        """Yield the rows to train on, or those kept from it.

        Raises:
            RequestError: they cannot be read.
        """
        with failure(f"cannot read {self.name}", OSError):
            if self.file is not None:
                rows = read(self.file, self.columns, self.begin, self.end)
            else:
                ((source,),) = find_named([self.name], from_hub=False)
                assert isinstance(source, DocumentSource)
                rows = source.rows(self.columns)
            for number, row in enumerate(islice(rows, self.every * self.most if held_out else None)):
                if held_out == (number % self.every == 0 and number // self.every < self.most):
                    yield row


@dataclass(frozen=True)
class StreamSource:
    """A source of one `--data`: its shards in the order of the files. `fingerprint`: by size and ends of each file."""

    name: str
    fingerprint: str
    shards: tuple[Shard, ...]


def find_streams(names: Sequence[str], columns: Columns, every: int = 1, most: int = 0) -> list[StreamSource]:
    """Return the source of each name. Of the first shard of each, rows are kept from training as `Shard` says.

    Raises:
        RequestError: there is none, or it cannot be streamed.
    """
    streams: list[StreamSource] = []
    part = 0
    for name, its_files in zip(names, find_named(names, from_hub=False), strict=True):
        shards: list[Shard] = []
        prints: list[str] = []
        for each in its_files:
            its_shards, its_print = _shards_of(each, part, columns)
            shards += its_shards
            prints.append(its_print)
            part += bool(its_shards)  # an empty file has none
        refuse((not shards, f"there is no text in {shown(name)}", "it is empty", None))
        shards[0] = replace(shards[0], every=every, most=most)
        digest = hashlib.sha256("\n".join(prints).encode()).hexdigest()
        streams.append(StreamSource(shown(name), f"stream:{digest}", tuple(shards)))
    return streams


def _shards_of(each: DataFile | DocumentSource, part: int, columns: Columns) -> tuple[list[Shard], str]:
    """Return the shards of a file or another source, and what tells it from others."""
    if isinstance(each, DocumentSource):
        return [Shard(part, each.name, None, 0, None, columns)], each.fingerprint
    with failure(f"cannot read {shown(each.path)}", OSError), each.path.open("rb") as file:
        size = each.path.stat().st_size
        ends = file.read(_LOOKED_AT)
        file.seek(max(0, size - _LOOKED_AT))
        ends += file.read()
    borders: list[int | None]
    if not each.is_plain:
        borders = [0, None] if size else []
    elif each.kind == "parquet":
        borders = [*range(parquet_schema(each)[1] + 1)]
    else:
        borders = [*range(0, size, SHARD_BYTES if each.kind in CUT_AT_LINES else max(size, 1)), size]
    shards = [Shard(part, each.name, each, begin or 0, end, columns) for begin, end in pairwise(borders)]
    return shards, f"{Path(each.name).name}:{size}:{hashlib.blake2b(ends).hexdigest()}"


def formats_of(sources: Sequence[StreamSource], new_maker: Callable[[], SampleMaker]) -> list[Format]:
    """Return the format of the rows of each file or other source, by its number; the first good row says it.

    Raises:
        RequestError: as `SampleMaker.check_columns`.
    """
    formats: dict[int, Format] = {}
    for shard in chain.from_iterable(source.shards for source in sources):
        first = None if shard.part in formats else next((r for _, r in shard.rows() if isinstance(r, dict)), None)
        if first is not None:
            maker = new_maker()
            maker.check_columns(shard.name, list(flat(first)), flat(first))
            formats[shard.part] = maker.format
    return [formats.get(number, "text") for number in range(sources[-1].shards[-1].part + 1)]


_FEATURES = {"part": "int32", "where": "string", "row": "binary"}

Examples = Sequence[dict[str, Any]]
"""Rows as they pass through `datasets`: the number of the part that a row is from, where it is, and it pickled."""


def _examples(shards: Sequence[Shard], *, held_out: bool = False) -> Iterator[dict[str, Any]]:
    for shard in shards:
        for where, row in shard.rows(held_out=held_out):
            yield {"part": shard.part, "where": where, "row": pickle.dumps(row)}


Block = tuple[int, str, Examples]
"""The number of a block in its epoch, from 0; the library's state where it begins, as JSON; and its rows, which are
shuffled among each other, in the order of training."""


class SamplesInMemory(Sequence[Sample]):
    """Samples one after another, the first of them number `first`. `lengths` as those of `ArrowSamples`."""

    def __init__(self, samples: Sequence[Sample], first: int = 0) -> None:
        self._samples = samples
        self._first = first
        lengths = [max(len(sample["input_ids"]), len(sample.get("labels", ()))) for sample in samples]
        self.lengths: NDArray[np.int32] = np.array(lengths, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index - self._first]


Drawn = tuple[Sample, Position]
"""A sample, and the place after it."""


@dataclass(frozen=True)
class SampleStream:
    """Samples of rows as they come.

    Attributes:
        sources: of rows, drawn by `weights`, or else one source after another.
        weights: of the sources, or none.
        seed: of the order.
        buffer: rows that are shuffled among each other.
        new_maker: makes a `SampleMaker` for these rows.
        formats: of the rows of each file, by its number.
        check: refuses what the model cannot be trained on.
    """

    sources: Sequence[StreamSource]
    weights: Sequence[Fraction]
    seed: int
    buffer: int
    new_maker: Callable[[], SampleMaker]
    formats: Sequence[Format]
    check: Callable[[BuildReport], None]

    def blocks(self, epoch: int, number: int = 0, state: str = "") -> Iterator[Block]:
        """Yield the blocks of an epoch from `number` on, where the library's state is `state`.

        Raises:
            RequestError: a file cannot be read any more.
        """
        dataset = self._dataset(epoch)
        if state:
            dataset.load_state_dict(json.loads(state))
        rows = iter(dataset)
        while True:
            begins = json.dumps(dataset.state_dict())
            block = list(islice(rows, self.buffer))
            if not block:
                return
            if self.buffer > 1:
                order = permutation(len(block), mixed(self.seed + (epoch << 32)), number)
                block = [block[place] for place in order[:].tolist()]
            yield number, begins, block
            number += 1

    def in_words(self) -> str:
        """Return what is read, and in which order rows come."""
        names = ", ".join(source.name for source in self.sources)
        order = f"shuffled within {self.buffer:,} rows" if self.buffer > 1 else "in the order of the files"
        if self.weights:
            parts = ", ".join(
                f"{100 * float(weight):.1f} % from {source.name}"
                for weight, source in zip(self.weights, self.sources, strict=True)
            )
            order += f"; on average {parts}; a source that ends begins again until all were read to the end"
        return f"{names} is read while training, {order}"

    def _dataset(self, epoch: int) -> Any:
        import datasets

        ordered = [list(source.shards) for source in self.sources]
        if self.buffer > 1:
            for place, shards in enumerate(ordered):
                order = permutation(len(shards), self.seed + (place + 1) * _APART, epoch)
                ordered[place] = [shards[number] for number in order[:].tolist()]
        if not self.weights:
            ordered = [list(chain.from_iterable(ordered))]
        features = datasets.Features({name: datasets.Value(kind) for name, kind in _FEATURES.items()})
        streams = [
            datasets.IterableDataset.from_generator(_examples, features, gen_kwargs={"shards": shards})
            for shards in ordered
        ]
        if not self.weights:
            return streams[0]
        return datasets.interleave_datasets(
            streams, probabilities=[float(weight) for weight in self.weights], seed=self.seed + epoch,
            stopping_strategy="all_exhausted",
        )  # fmt: skip

    def iterate(self, start: Position) -> Iterator[Drawn]:
        """Yield samples from `start` on, without end, each with the place after it.

        Raises:
            RequestError: a row cannot be a sample and is not to be left out, or the stream has none.
        """
        maker, epoch, place = self.new_maker(), start.epoch, start.stream
        drawn, row = (place.drawn, place.row) if place is not None else (0, 0)
        skipped = start.offset
        while True:
            is_empty = place is None
            number, state = (place.block, place.state) if place is not None else (0, "")
            for block, begins, rows in self.blocks(epoch, number, state):
                for begin, offset, sample in self._of_rows(rows, maker, row):
                    is_empty = False
                    if begin > row or offset > skipped:
                        drawn += 1
                        yield sample, Position(epoch, offset, StreamPlace(drawn, block, begin, begins))
                row, skipped = 0, 0
            if is_empty:
                names = ", ".join(source.name for source in self.sources)
                raise RequestError("there is no sample to train on", because=f"no row of {names} is one")
            if env.rank() == 0:
                logger.warning("the stream has ended: epoch %d begins, in another order", epoch + 2)
            epoch, place = epoch + 1, None

    def held_out(self) -> SamplesInMemory:
        """Return the samples of rows that are kept from training. Raises as `iterate`."""
        rows = list(_examples([source.shards[0] for source in self.sources], held_out=True))
        return SamplesInMemory([sample for *_, sample in self._of_rows(rows, self.new_maker())])

    def first(self, number: int) -> tuple[SamplesInMemory, BuildReport]:
        """Return the samples of the first epoch's first `number` rows alone, and a report of them.

        Raises:
            RequestError: there are none, or as the data is read.
        """
        maker = self.new_maker()
        rows = list(islice(chain.from_iterable(block for *_, block in self.blocks(0)), number))
        samples = [sample for *_, sample in self._of_rows(rows, maker)]
        tokens = sum(len(sample["input_ids"]) for sample in samples)
        report = replace(maker.report, documents=len(rows), samples=len(samples), tokens=tokens)
        refuse((
            not samples,
            "the stream has no sample to train on",
            " and ".join(report.left_out(maker.settings.too_long)) or "all of its rows are kept for validation",
            "--validation-data 0% trains on all rows, --validation-data PATH validates on other data",
        ))  # fmt: skip
        return SamplesInMemory(samples), report

    def _of_rows(self, rows: Examples, maker: SampleMaker, first: int = 0) -> Iterator[tuple[int, int, Sample]]:
        """Yield samples of rows from `first` on: each with a row, and the number of samples from there on with it.

        Packs are of all the rows, and counted from the first. Nothing but these rows decides what they are.
        """
        packer = Packer(maker.seq_len) if maker.settings.pack else None
        num_packs = 0
        for begin in range(0 if packer else first, len(rows), _TOKENISED):
            made = self._made(rows[begin : begin + _TOKENISED], maker)
            if packer is None:
                yield from ((begin, offset, as_sample(sample)) for offset, sample in enumerate(made, 1))
                continue
            packs = [pack for sample in made for pack in packer.add(sample["input_ids"], sample.get("trained"))]
            if begin + _TOKENISED >= len(rows):
                packs += packer.flush()
            yield from ((0, offset, as_sample(pack)) for offset, pack in enumerate(packs, num_packs + 1))
            num_packs += len(packs)

    def _made(self, examples: Examples, maker: SampleMaker) -> list[dict[str, Any]]:
        documents: list[Document] = []
        for example in examples:
            maker.format = self.formats[example["part"]]
            documents += maker.documents([(example["where"], pickle.loads(example["row"]))])  # this process pickled it
        self._check(maker)
        made = [  # not all rows in one call of the tokenizer, which takes 165 times the bytes of their texts
            sample for group in grouped(documents) for samples in maker.samples(group) for sample in samples
        ]
        self._check(maker)
        return made

    def _check(self, maker: SampleMaker) -> None:
        maker.report.refuse_rows(
            maker.settings.skip_bad_rows, maker.settings.too_long, maker.seq_len, maker.settings.max_positions
        )
        self.check(maker.report)


class StreamBatches:
    """All global batches of a stream, of `global_batch` samples, or of as many whole ones as `global_tokens` holds.

    The same for any number of ranks. Stands beside `GlobalBatches`, of samples that can be drawn by number.
    """

    def __init__(
        self, samples: SampleStream, task: str, *, global_batch: int | None = None, global_tokens: int | None = None
    ) -> None:
        assert (global_batch is None) != (global_tokens is None), "either samples or tokens"
        self.samples = samples
        self._task = task
        self.global_batch = global_batch
        self.global_tokens = global_tokens

    def iterate(self, start: Position) -> Iterator[GlobalBatch]:
        """Yield batches from `start` on, without end. Raises as `SampleStream.iterate`, and for a sample too large."""
        drawn = start.stream.drawn if start.stream is not None else 0
        coming = self.samples.iterate(start)
        ahead: list[Drawn] = []  # a sample that was too much for the batch before
        while True:
            taken, end, room = [], start, self.global_batch or self.global_tokens or 0
            while room:  # nothing behind a full batch is read
                sample, place = ahead.pop() if ahead else next(coming)
                if (size := self._size(sample)) > room:
                    ahead.append((sample, place))
                    break
                taken.append(sample)
                end, room = place, room - size
            dataset = SamplesInMemory(taken, drawn)
            yield GlobalBatch(dataset, np.arange(drawn, drawn + len(taken)), start, end, drawn, dataset.lengths)
            start, drawn = end, drawn + len(taken)

    def _size(self, sample: Sample) -> int:
        """Return what a sample takes of a global batch, in its unit: one sample, or its tokens."""
        if self.global_tokens is None:
            return 1
        counted = "labels" if self._task == "seq2seq" else "input_ids"  # as `ArrowSamples.counted_tokens`
        size = max(1, len(sample[counted]))
        if size > self.global_tokens:
            raise RequestError(
                f"a sample does not fit into a global batch of {self.global_tokens} tokens",
                because=f"it has {size}",
                hint=f"ask for --global-tokens {size} or more, or shorten --seq-len",
            )
        return size
