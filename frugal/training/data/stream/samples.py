"""The samples of a stream, made as they are needed, and the global batches of them: the same on any number of ranks.

Every rank reads and tokenises all of it, and takes its micro-batches of each global batch as it does of data on disk.
So global batches are the same whatever the ranks, packs and batches of tokens are exact, ranks tell each other nothing
while they train, and the state of one rank is that of all. What it costs is that W ranks tokenise W times. It is done
while the step before runs, on one thread; docs/decisions has what it takes.

Packs are closed at the end of each block (`blocks`), so that going on needs no pack that was open.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from frugal.distributed import env
from frugal.errors import RequestError
from frugal.training.data.batches import GlobalBatch, Position, StreamPlace
from frugal.training.data.build import Document, SampleMaker, grouped_documents
from frugal.training.data.report import BuildReport
from frugal.training.data.rows import BadRow
from frugal.training.data.store.packing import Packer
from frugal.training.data.stream import shards as reading
from frugal.training.data.stream.blocks import Block, RowStream
from frugal.training.models.tiled_loss import IGNORED
from frugal.training.objectives import Sample

_TOKENISED = 64  # rows at once

logger = logging.getLogger("frugal")


class SamplesInMemory(Sequence[Sample]):
    """Samples one after another, the first of them number `first`. `lengths` as those of `ArrowSamples`."""

    def __init__(self, samples: Sequence[Sample], first: int = 0) -> None:
        self._samples = samples
        self._first = first
        self.lengths: NDArray[np.int32] = np.array([_length(sample) for sample in samples], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[index - self._first]


def _length(sample: Sample) -> int:
    """Tokens that micro-batches are cut by: of pairs, those of the longer side."""
    return max(len(sample["input_ids"]), len(sample.get("labels", ())))


def counted_tokens(sample: Sample, task: str) -> int:
    """Those that a global batch of tokens counts: of pairs the target's, and at least one."""
    return max(1, len(sample["labels"])) if task == "seq2seq" else len(sample["input_ids"])


class Drawn(NamedTuple):
    """A sample, and what of the stream is drawn with it: `offset` samples of the rows of `block` from `row` on."""

    sample: Sample
    epoch: int
    block: Block
    row: int
    offset: int


@dataclass(frozen=True)
class SampleStream:
    """Samples of rows as they come.

    Attributes:
        rows: what they are made of.
        new_maker: a `SampleMaker` for these rows.
        formats: what the rows of each file are, by its number.
        pack: whether documents share samples.
        skip_bad_rows: whether rows that are no samples are left out; they end the run otherwise.
        check: refuses what the model cannot be trained on.
    """

    rows: RowStream
    new_maker: Callable[[], SampleMaker]
    formats: Sequence[Any]
    pack: bool
    skip_bad_rows: bool
    check: Callable[[BuildReport], None]

    def iterate(self, start: Position) -> Iterator[Drawn]:
        """Samples from `start` on, without end.

        Raises:
            RequestError: a row cannot be a sample and is not to be left out, or the stream has none.
        """
        maker, epoch, place = self.new_maker(), start.epoch, start.stream
        row, skipped = (place.row if place is not None else 0), start.offset
        while True:
            is_empty = place is None
            number, state = (place.block, place.state) if place is not None else (0, "")
            for block in self.rows.blocks(epoch, number, state):
                for begin, offset, sample in self._of_rows(block.rows, maker, row):
                    is_empty = False
                    if begin > row or offset > skipped:
                        yield Drawn(sample, epoch, block, begin, offset)
                row, skipped = 0, 0
            if is_empty:
                names = ", ".join(source.name for source in self.rows.sources)
                raise RequestError("there is no sample to train on", because=f"no row of {names} is one")
            if env.rank() == 0:
                logger.warning("the stream has ended: epoch %d begins, in another order", epoch + 2)
            epoch, place = epoch + 1, None

    def of_examples(self, rows: Sequence[dict[str, Any]]) -> list[Sample]:
        """The samples of these rows alone, such as those for validation; raises as `iterate`."""
        return [sample for *_, sample in self._of_rows(rows, self.new_maker())]

    def first(self, number: int) -> tuple[SamplesInMemory, BuildReport]:
        """The samples of the first epoch's first `number` rows alone, and what they are."""
        maker = self.new_maker()
        rows = list(islice(chain.from_iterable(block.rows for block in self.rows.blocks(0)), number))
        samples = SamplesInMemory([sample for *_, sample in self._of_rows(rows, maker)])
        return samples, replace(_report(maker), documents=len(rows), samples=len(samples), tokens=_num_tokens(samples))

    def in_words(self) -> str:
        """How it is read."""
        return (
            f"{', '.join(source.name for source in self.rows.sources)} is read while training, {self.rows.in_words()}"
        )

    def _of_rows(
        self, rows: Sequence[dict[str, Any]], maker: SampleMaker, first: int = 0
    ) -> Iterator[tuple[int, int, Sample]]:
        """The samples of rows from `first` on: each with a row, and how many samples there are from it on with this.

        Packs are of all the rows, and counted from the first. Nothing but these rows decides what they are.
        """
        if self.pack:
            for offset, sample in enumerate(self._packed(rows, maker), 1):
                yield 0, offset, sample
            return
        for begin in range(first, len(rows), _TOKENISED):
            samples = self._made(rows[begin : begin + _TOKENISED], maker)
            for offset, sample in enumerate(samples, 1):
                yield begin, offset, _as_stored(sample)

    def _packed(self, rows: Sequence[dict[str, Any]], maker: SampleMaker) -> Iterator[Sample]:
        packer = Packer(maker.seq_len)
        for begin in range(0, len(rows), _TOKENISED):
            for sample in self._made(rows[begin : begin + _TOKENISED], maker):
                yield from map(_as_stored, packer.add(sample["input_ids"], sample.get("trained")))
        yield from map(_as_stored, packer.flush())

    def _made(self, rows: Sequence[dict[str, Any]], maker: SampleMaker) -> Iterator[dict[str, Any]]:
        for documents in grouped_documents(self._documents(rows, maker)):
            yield from chain.from_iterable(maker.samples(documents))
            self._check(maker)

    def _documents(self, rows: Sequence[dict[str, Any]], maker: SampleMaker) -> Iterator[Document]:
        for example in rows:
            where, row = reading.row_of(example, maker.columns)
            maker.format = self.formats[example["part"]]
            fields = row if isinstance(row, BadRow) else maker.fields(row)
            if isinstance(fields, BadRow):
                maker.bad.add(f"{where}: {fields.reason}")
                self._check(maker)
            elif "" not in fields:
                yield where, fields

    def _check(self, maker: SampleMaker) -> None:
        report = _report(maker)
        if not self.skip_bad_rows:
            report.refuse_bad_rows()
        if report.too_long_rows and maker.too_long == "error":
            tokens, where = maker.longest
            raise RequestError(
                "a sample is longer than --seq-len",
                because=f"{where} has {tokens} tokens with special ones, --seq-len is {maker.seq_len}",
                hint=f"use --seq-len {tokens}, or --too-long truncate, or --too-long skip",
            )
        self.check(report)


def _report(maker: SampleMaker) -> BuildReport:
    return BuildReport(
        bad_rows=maker.bad.number, first_bad=tuple(maker.bad.first), too_long_rows=maker.num_too_long,
        largest_token=maker.largest_token, formats=dict(Counter(maker.formats)), targets=maker.num_targets,
        masked_rows=maker.masked.number, first_masked=tuple(maker.masked.first),
        merged_rows=maker.whole_rows.num_merged,
        template=maker.whole_rows.template.in_words if maker.whole_rows.template else "",
    )  # fmt: skip


def _num_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(samples[number]["input_ids"]) for number in range(len(samples)))


def _as_stored(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample as `ArrowSamples` gives it."""
    made = {name: value for name, value in sample.items() if name not in ("trained", "length")}
    trained = sample.get("trained")
    if trained is not None and not trained.all():
        made["labels"] = np.where(trained, sample["input_ids"], np.int32(IGNORED))
    return made


class StreamBatches:
    """Every global batch of a stream, of `global_batch` samples, or of as many whole ones as `global_tokens` holds.

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
        """All batches from `start` on, without end. Raises as `SampleStream.iterate`, and for a sample too large."""
        drawn = start.stream.drawn if start.stream is not None else 0
        coming = self.samples.iterate(start)
        waiting: list[Drawn] = []  # drawn, and too much for the batch before
        while True:
            taken = self._next(coming, waiting)
            samples = [sample for sample, *_ in taken]
            _, epoch, block, row, offset = taken[-1]
            end = Position(epoch, offset, StreamPlace(drawn + len(taken), block.number, row, block.state))
            dataset = SamplesInMemory(samples, drawn)
            indices = np.arange(drawn, drawn + len(taken))
            yield GlobalBatch(dataset, indices, start, end, drawn, dataset.lengths)
            start, drawn = end, drawn + len(taken)

    def _next(self, coming: Iterator[Drawn], waiting: list[Drawn]) -> list[Drawn]:
        """What the next batch takes; what it does not is left in `waiting`."""
        if self.global_tokens is None:
            return list(islice(coming, self.global_batch))
        taken: list[Drawn] = []
        tokens = 0
        while True:
            drawn = waiting.pop() if waiting else next(coming)
            number = counted_tokens(drawn.sample, self._task)
            if number > self.global_tokens:
                raise RequestError(
                    f"a sample does not fit into a global batch of {self.global_tokens} tokens",
                    because=f"it has {number}",
                    hint=f"ask for --global-tokens {number} or more, or shorten --seq-len",
                )
            if tokens + number > self.global_tokens:
                waiting.append(drawn)
                return taken
            taken.append(drawn)
            tokens += number
