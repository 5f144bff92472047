"""The rows of a stream in blocks, each shuffled within itself: `datasets` reads, and knows where it stands.

`datasets.IterableDataset.shuffle` keeps a buffer, of which a random row is taken and replaced by the next one. Its
`state_dict` does not have the buffer: its rows are lost to a run that goes on. Here a block of as many rows is read,
and put into a random order that follows from the seed, the epoch and the block's number. So the state where a block
begins and a number of samples say where a run stands, and going on reads one block again, and nothing before it.

The order of shards is random, too. Several sources with weights are drawn by `datasets.interleave_datasets`, each row
from a random source; where one ends it begins again, until all were read to their end once (`all_exhausted`).
"""

import json
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Any

from frugal.training.data.batches import mixed, permutation
from frugal.training.data.stream import shards as reading
from frugal.training.data.stream.shards import Shard, StreamSource

_APART = 1_000_003  # between the seeds of sources, so that two with as many shards have different orders


@dataclass(frozen=True)
class Block:
    """Rows that are shuffled among each other, as examples of the library, in the order of training.

    `state`: of the library where it begins, as JSON. `number`: of it in its epoch, from 0.
    """

    number: int
    state: str
    rows: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class RowStream:
    """The rows of `sources`, with `weights` or else one source after another, shuffled within `buffer` rows each."""

    sources: Sequence[StreamSource]
    weights: Sequence[Fraction]
    seed: int
    buffer: int

    def blocks(self, epoch: int, number: int = 0, state: str = "") -> Iterator[Block]:
        """Those of an epoch from `number` on, where the library's state is `state`; all of it without.

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
                block = list(operator.itemgetter(*order[:].tolist(), 0)(block)[:-1])
            yield Block(number, begins, block)
            number += 1

    def in_words(self) -> str:
        """In which order rows come."""
        order = f"shuffled within {self.buffer:,} rows" if self.buffer > 1 else "in the order of the files"
        if self.weights:
            parts = ", ".join(
                f"{100 * float(weight):.1f} % from {source.name}"
                for weight, source in zip(self.weights, self.sources, strict=True)
            )
            order += f"; on average {parts}; a source that ends begins again until all were read to the end"
        return order

    def _dataset(self, epoch: int) -> Any:
        """The library's own stream of examples, at its beginning."""
        import datasets

        ordered = [self._ordered(source, epoch, place) for place, source in enumerate(self.sources)]
        if not self.weights:
            ordered = [[shard for shards in ordered for shard in shards]]
        features = datasets.Features({name: datasets.Value(kind) for name, kind in reading.FEATURES.items()})
        streams = [
            datasets.IterableDataset.from_generator(reading.examples, features, gen_kwargs={"shards": shards})
            for shards in ordered
        ]
        if not self.weights:
            return streams[0]
        return datasets.interleave_datasets(
            streams, probabilities=[float(weight) for weight in self.weights], seed=self.seed + epoch,
            stopping_strategy="all_exhausted",
        )  # fmt: skip

    def _ordered(self, source: StreamSource, epoch: int, place: int) -> list[Shard]:
        if self.buffer == 1:
            return list(source.shards)
        order = permutation(len(source.shards), self.seed + (place + 1) * _APART, epoch)
        return [source.shards[number] for number in order[:].tolist()]
