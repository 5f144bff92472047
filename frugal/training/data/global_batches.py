"""The global batches of a run: the same samples in the same batch whatever the world size.

The order of training is endless: a permutation of all samples, then another, and so on. A batch is a stretch of it,
and may reach over the end of an epoch, so that every sample is drawn exactly once an epoch and none is left out. The
state is one number: how many samples were drawn before.

`permutation(n, seed, epoch)[i]` says which sample is drawn i-th in an epoch. Nothing is stored: a Feistel network
(https://doi.org/10.1137/0217022) permutes the numbers below the next power of two of n, and cycle walking
(https://doi.org/10.1007/3-540-45760-7_9, section 3: apply it again until the result is below n) makes that a
permutation of the n. Fewer than two applications are expected. The round function is splitmix64's finaliser
(https://doi.org/10.1145/2714064.2660195). Good enough for shuffling, useless as a cipher. The halves of small
numbers have too few bits to be mixed well, so up to `_TABLE` samples are sorted by a hash instead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from frugal.errors import RequestError
from frugal.training.objectives import Sample

_STRETCH = 1 << 18
"""Samples counted together: 2 MiB each for their indices, tokens and sums."""


@dataclass(frozen=True)
class Position:
    """Where the endless order stands: `offset` samples of epoch `epoch` were drawn, and all of earlier epochs."""

    epoch: int = 0
    offset: int = 0


@dataclass(frozen=True)
class GlobalBatch(Sequence[Sample]):
    """The samples of one optimizer step. A sample is read from the data when it is asked for.

    Attributes:
        dataset: what is read from.
        indices: of the samples in it, shape `(samples,)`.
        start: its position in the order.
        end: the position of the batch after it; what a checkpoint has to remember.
        draw: number in the endless order of its first sample. Samples that are mappings carry theirs as `draw`.
        lengths: tokens of each of them, shape `(samples,)`; None where they are not known.
    """

    dataset: Sequence[Any]
    indices: NDArray[np.int64]
    start: Position
    end: Position
    draw: int
    lengths: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        sample = self.dataset[int(self.indices[index])]
        if not isinstance(sample, Mapping):
            return sample
        return {**sample, "draw": self.draw + (index if index >= 0 else index + len(self))}


class GlobalBatches:
    """Every global batch of a run, of `global_batch` samples, or of as many whole samples as `global_tokens` holds.

    `lengths` are tokens per sample, shape `(len(dataset),)`, by default the dataset's own, if it has some: where they
    are known, micro-batches are of samples of like length. Token batches count them, too, unless the dataset has
    `counted_tokens` of the same shape, such as the target tokens of pairs.

    Raises:
        RequestError: no data, or a sample with more tokens than a whole batch may have.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        *,
        global_batch: int | None = None,
        global_tokens: int | None = None,
        lengths: NDArray[Any] | None = None,
        seed: int = 0,
    ) -> None:
        assert (global_batch is None) != (global_tokens is None), "either samples or tokens"
        if len(dataset) == 0:
            raise RequestError("there is no sample to train on", hint="check what --data points to")
        self.dataset = dataset
        self.global_batch = global_batch
        self.global_tokens = global_tokens
        self.seed = seed
        self._lengths = getattr(dataset, "lengths", None) if lengths is None else lengths
        counted = getattr(dataset, "counted_tokens", None) if lengths is None else None
        self._counted = self._lengths if counted is None else counted
        self._order: tuple[int, Permutation] | None = None
        if global_tokens is not None:
            assert self._counted is not None, "token batches need the samples' lengths"
            assert len(self._counted) == len(dataset) and np.min(self._counted) > 0, "a length for each sample"
            longest = int(np.argmax(self._counted))
            if self._counted[longest] > global_tokens:
                raise RequestError(
                    f"sample {longest} does not fit into a global batch of {global_tokens} tokens",
                    because=f"it has {self._counted[longest]}",
                    hint=f"ask for --global-tokens {self._counted[longest]} or more, or shorten --seq-len",
                )

    def at(self, start: Position = Position()) -> GlobalBatch:
        """The batch that begins at `start`: a pure function of it, the data and the seed."""
        n = len(self.dataset)
        draw = start.epoch * n + start.offset
        indices = self._draw_tokens(draw) if self.global_batch is None else self._draw(draw, self.global_batch)
        lengths = None if self._lengths is None else np.asarray(self._lengths)[indices]
        return GlobalBatch(self.dataset, indices, start, Position(*divmod(draw + len(indices), n)), draw, lengths)

    def after(self, steps: int) -> Position:
        """Where the order stands after so many steps of equal batches; tokens have to be counted, batch by batch."""
        if self.global_batch is not None:
            return Position(*divmod(steps * self.global_batch, len(self.dataset)))
        position = Position()
        for _ in range(steps):
            position = self.at(position).end
        return position

    def steps(self, epochs: int) -> int:
        """Batches until every sample was drawn `epochs` times. Tokens have to be counted, in the order of drawing."""
        draws = epochs * len(self.dataset)
        if self.global_batch is not None:
            return -(-draws // self.global_batch)
        assert self._counted is not None and self.global_tokens is not None
        full, held = 0, 0  # batches that are full, and tokens in the one that is being filled
        for begin in range(0, draws, _STRETCH):
            indices = self._draw(begin, min(_STRETCH, draws - begin))
            tokens = np.cumsum(np.asarray(self._counted)[indices], dtype=np.int64)
            before = -held  # tokens of this stretch before the batch began
            while (fitting := int(np.searchsorted(tokens, before + self.global_tokens, side="right"))) < len(tokens):
                full += 1
                before = int(tokens[fitting - 1]) if fitting else 0
            held = int(tokens[-1]) - before
        return full + 1

    def iterate(self, start: Position = Position()) -> Iterator[GlobalBatch]:
        """All batches from `start` on, without end."""
        while True:
            batch = self.at(start)
            yield batch
            start = batch.end

    def _draw(self, draw: int, count: int) -> NDArray[np.int64]:
        """Indices of the samples drawn as number `draw` to `draw + count - 1`."""
        n = len(self.dataset)
        parts = []
        while count > 0:
            epoch, offset = divmod(draw, n)
            stretch = min(count, n - offset)
            parts.append(self._epoch(epoch)[np.arange(offset, offset + stretch)])
            draw, count = draw + stretch, count - stretch
        return np.concatenate(parts)

    def _draw_tokens(self, draw: int) -> NDArray[np.int64]:
        """Samples from `draw` on until the next one would pass the target."""
        assert self._counted is not None and self.global_tokens is not None
        look_ahead = 64
        while True:
            indices = self._draw(draw, look_ahead)
            tokens = np.cumsum(np.asarray(self._counted)[indices], dtype=np.int64)
            fitting = int(np.searchsorted(tokens, self.global_tokens, side="right"))
            if fitting < look_ahead:
                return indices[:fitting]
            look_ahead *= 2

    def _epoch(self, epoch: int) -> "Permutation":
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, permutation(len(self.dataset), self.seed, epoch)
        return self._order[1]


_NUM_ROUNDS = 8  # measured: with 8, n = 5 to 10 are visibly not uniform, n >= 16 are; the table leaves a wide margin
_TABLE = 1 << 12  # samples, 32 KiB
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permutation(n: int, seed: int, epoch: int) -> "Permutation":
    """The order of `n` samples in one epoch. Another seed or epoch is another order."""
    return Permutation(n, seed, epoch)


class Permutation:
    """A bijection of the numbers 0 to n - 1; an int gives an int, a slice or an array of ints gives an array."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        assert n >= 1
        self._n = n
        num_bits = (n - 1).bit_length()
        self._low_bits = (num_bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (num_bits // 2)) - 1
        state = _mix((_mix(seed & _MASK) + epoch) & _MASK)
        self._table: NDArray[np.int64] | None = None
        if n <= _TABLE:
            self._table = np.argsort(_mix(np.arange(n, dtype=np.uint64) * _GOLDEN + state), kind="stable")
        self._keys = tuple(_mix((state + (i + 1) * _GOLDEN) & _MASK) for i in range(_NUM_ROUNDS))

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice | NDArray[Any]) -> NDArray[np.int64]: ...
    def __getitem__(self, index: int | slice | NDArray[Any]) -> int | NDArray[np.int64]:
        if isinstance(index, int):
            if not -self._n <= index < self._n:
                raise IndexError(index)
            if self._table is not None:
                return int(self._table[index])
            value = self._step(index % self._n)
            while value >= self._n:
                value = self._step(value)
            return value
        indices = np.arange(*index.indices(self._n)) if isinstance(index, slice) else np.asarray(index)
        if self._table is not None:
            return self._table[indices]
        values = self._step(indices.astype(np.uint64))
        outside = np.flatnonzero(values >= self._n)
        while len(outside):
            values[outside] = self._step(values[outside])
            outside = outside[values[outside] >= self._n]
        return values.astype(np.int64)

    def _step(self, value: Any) -> Any:
        """One pass through the network: an int, or each element of a uint64 array."""
        high, low = value >> self._low_bits, value & self._low_mask
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                high = high ^ (_mix((low + key) & _MASK) & self._high_mask)
            else:
                low = low ^ (_mix((high + key) & _MASK) & self._low_mask)
        return (high << self._low_bits) | low


def _mix(value: Any) -> Any:
    """splitmix64's finaliser on 64 bits: an int, or each element of a uint64 array."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
