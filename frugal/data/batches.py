"""The global batches of a run, the same whatever the world size, and the micro-batches that a rank makes of them.

The order of training is endless: a permutation of all samples, then another, and so on. A batch is a stretch of it,
and may reach over the end of an epoch, so that every sample is drawn exactly once an epoch and none is left out. The
state is one number: how many samples were drawn before.

`permutation(n, seed, epoch)[i]` says which sample is drawn i-th in an epoch. Nothing is stored: a Feistel network
(https://doi.org/10.1137/0217022) permutes the numbers below the next power of two of n, and cycle walking
(https://doi.org/10.1007/3-540-45760-7_9, section 3: apply it again until the result is below n) makes that a
permutation of the n. Fewer than two applications are expected. The round function is splitmix64's finaliser
(https://doi.org/10.1145/2714064.2660195). Good enough for shuffling, useless as a cipher. The halves of small
numbers have too few bits to be mixed well, so up to `_TABLE` samples are sorted by a hash instead.

`share` says which samples of a global batch a rank takes in each micro-step. Where all samples are as long, or nobody
knows how long they are, these are the plan's micro-batches, in the batch's order. Otherwise samples of like length are
together (`frugal.planning.length_bucketing`): the same global batch, hence the same gradient, with less padding.

They are collated by a thread that works one item ahead. Not `torch.utils.data.DataLoader` with workers: samples
come tokenised from a memory map, so an item takes milliseconds; on CPU ranks there is no core left for a worker;
and a global batch is cut again when memory runs out, which a worker would have to be told.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from frugal.errors import refuse
from frugal.models.objectives import Sample
from frugal.planning.batch import BatchPlan
from frugal.planning.length_bucketing import TokenBudget, grouped
from frugal.planning.plan import Plan

_STRETCH = 1 << 18
"""Samples counted together: 2 MiB each for their indices, tokens and sums."""


@dataclass(frozen=True)
class StreamPlace:
    """The place of a stream in its epoch, in blocks as `frugal.data.stream` cuts it.

    Attributes:
        drawn: samples that were drawn in the whole run.
        block: number of the block in its epoch.
        row: of the block, from which on samples are counted.
        state: of `datasets.IterableDataset` where the block begins, as JSON.
    """

    drawn: int
    block: int
    row: int
    state: str


@dataclass(frozen=True)
class Position:
    """A place in the endless order: `offset` samples of epoch `epoch` were drawn, and all of earlier epochs.

    With `stream`, they are samples of its block, from its row on.
    """

    epoch: int = 0
    offset: int = 0
    stream: StreamPlace | None = None


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
    """All global batches of a run, of `global_batch` samples, or of as many whole samples as `global_tokens` holds.

    `lengths` are tokens per sample, shape `(len(dataset),)`, by default the dataset's own, if it has some: where they
    are known, micro-batches are of samples of like length. Token batches count them, too, unless the dataset has
    `counted_tokens` of the same shape, such as the target tokens of pairs. A dataset with an order of its own, as a
    mixture of sources has, is drawn in that.

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
        refuse((len(dataset) == 0, "there is no sample to train on", "", "check what --data points to"))
        self.dataset = dataset
        self.global_batch = global_batch
        self.global_tokens = global_tokens
        self.seed = seed
        self._lengths = getattr(dataset, "lengths", None) if lengths is None else lengths
        counted = getattr(dataset, "counted_tokens", None) if lengths is None else None
        self._counted = self._lengths if counted is None else counted
        self._drawn = getattr(dataset, "drawn", None) if getattr(dataset, "counts", ()) else None
        if global_tokens is not None:
            assert self._counted is not None, "token batches need the samples' lengths"
            assert len(self._counted) == len(dataset) and np.min(self._counted) > 0, "a length for each sample"
            longest = int(np.argmax(self._counted))
            most = self._counted[longest]
            refuse((
                most > global_tokens,
                f"sample {longest} does not fit into a global batch of {global_tokens} tokens",
                f"it has {most}",
                f"ask for --global-tokens {most} or more, or shorten --seq-len",
            ))  # fmt: skip

    def at(self, start: Position = Position()) -> GlobalBatch:
        """Return the batch that begins at `start`: a pure function of it, the data and the seed."""
        n = len(self.dataset)
        draw = start.epoch * n + start.offset
        indices = self._draw_tokens(draw) if self.global_batch is None else self._draw(draw, self.global_batch)
        lengths = None if self._lengths is None else np.asarray(self._lengths)[indices]
        return GlobalBatch(self.dataset, indices, start, Position(*divmod(draw + len(indices), n)), draw, lengths)

    def after(self, steps: int) -> Position:
        """Return the place in the order after some steps. Tokens have to be counted, batch by batch."""
        if self.global_batch is not None:
            return Position(*divmod(steps * self.global_batch, len(self.dataset)))
        position = Position()
        for _ in range(steps):
            position = self.at(position).end
        return position

    def steps(self, epochs: int) -> int:
        """Return the number of batches until every sample was drawn `epochs` times. Tokens are counted in order."""
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
        """Yield all batches from `start` on, without end."""
        while True:
            batch = self.at(start)
            yield batch
            start = batch.end

    def _draw(self, draw: int, count: int) -> NDArray[np.int64]:
        """Return the indices of the samples drawn as number `draw` to `draw + count - 1`."""
        draws = np.arange(draw, draw + count)
        return drawn(draws, len(self.dataset), self.seed) if self._drawn is None else self._drawn(draws, self.seed)

    def _draw_tokens(self, draw: int) -> NDArray[np.int64]:
        """Return the indices from `draw` on until the next sample would pass the target."""
        assert self._counted is not None and self.global_tokens is not None
        look_ahead = 64
        while True:
            indices = self._draw(draw, look_ahead)
            tokens = np.cumsum(np.asarray(self._counted)[indices], dtype=np.int64)
            fitting = int(np.searchsorted(tokens, self.global_tokens, side="right"))
            if fitting < look_ahead:
                return indices[:fitting]
            look_ahead *= 2


_NUM_ROUNDS = 8  # measured: with 8, n = 5 to 10 are visibly not uniform, n >= 16 are; the table leaves a wide margin
_TABLE = 1 << 12  # samples, 32 KiB
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


class Permutation:
    """The order of `n` samples in one epoch, a bijection of the numbers 0 to n - 1. Another seed is another order.

    It is indexed by a slice or an array of ints, and gives an array.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        assert n >= 1
        self._n = n
        num_bits = (n - 1).bit_length()
        self._low_bits = (num_bits + 1) // 2
        self._low_mask = (1 << self._low_bits) - 1
        self._high_mask = (1 << (num_bits // 2)) - 1
        state = mixed((mixed(seed & _MASK) + epoch) & _MASK)
        self._table = (
            np.argsort(mixed(np.arange(n, dtype=np.uint64) * _GOLDEN + state), kind="stable") if n <= _TABLE else None
        )
        self._keys = tuple(mixed((state + (i + 1) * _GOLDEN) & _MASK) for i in range(_NUM_ROUNDS))

    def __getitem__(self, index: slice | NDArray[Any]) -> NDArray[np.int64]:
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
        """Pass each element of a uint64 array through the network once."""
        high, low = value >> self._low_bits, value & self._low_mask
        for i, key in enumerate(self._keys):
            if i % 2 == 0:
                high = high ^ (mixed((low + key) & _MASK) & self._high_mask)
            else:
                low = low ^ (mixed((high + key) & _MASK) & self._low_mask)
        return (high << self._low_bits) | low


permutation = lru_cache(maxsize=256)(Permutation)


def drawn(draws: NDArray[np.int64], n: int, seed: int) -> NDArray[np.int64]:
    """Return which of `n` samples are drawn as numbers `draws` of their endless order; shape `(draws,)`."""
    epochs, offsets = np.divmod(draws, n)
    indices = np.empty(len(draws), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        mask = epochs == epoch
        indices[mask] = permutation(n, seed, epoch)[offsets[mask]]
    return indices


def mixed(value: Any) -> Any:
    """Apply splitmix64's finaliser on 64 bits to an int, or to each element of a uint64 array."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, kw_only=True)
class MicroBatchLimits:
    """The most that a micro-batch may take: as the plan says, until memory has run out under it.

    `max_samples` are samples of `seq_len` tokens, one cap a rank. A shorter sample counts as its own tokens, and at
    least as `shortest`. `overhead`: see `frugal.planning.length_bucketing`.
    """

    max_samples: tuple[int, ...]
    seq_len: int
    shortest: int
    overhead: int | None

    @classmethod
    def of(cls, plan: Plan) -> "MicroBatchLimits":
        """Return those of a plan.

        A plan without lengths may have no memory for gradients of more than one micro-step, so it gets the fewest.
        """
        batch, seq_len = plan.batch, plan.request.seq_len
        return cls(
            max_samples=batch.micro_batch,
            seq_len=seq_len,
            shortest=batch.shortest or seq_len,
            overhead=batch.overhead_tokens,
        )

    def halved(self, largest: int) -> "MicroBatchLimits | None":
        """Return limits that cut a micro-batch of `largest` samples of full length in two; None where none does.

        Where one sample of full length is the limit, several short ones may have taken its place: they do no more.
        """
        if largest > 1:
            return replace(self, max_samples=tuple(max(1, min(cap, largest) // 2) for cap in self.max_samples))
        return replace(self, shortest=self.seq_len) if self.shortest < self.seq_len else None


@dataclass(frozen=True)
class Share:
    """The samples that one rank takes: `places[micro_step]` in the global batch, none for an empty micro-batch.

    `largest`: what the largest micro-batch of all ranks takes, in samples of full length.
    """

    places: tuple[Sequence[int], ...]
    largest: int


def share(samples: Sequence[Any], limits: MicroBatchLimits, rank: int, planned: BatchPlan | None = None) -> Share:
    """Return the micro-batches of `rank`, for `samples` given whole: those `planned`, where limits and number allow."""
    lengths = getattr(samples, "lengths", None)
    if lengths is None or _are_alike(lengths, limits):
        if planned is not None and planned.micro_batch == limits.max_samples:
            batch = planned.resized(len(samples))
        else:
            batch = BatchPlan.of(len(samples), limits.max_samples)
        stretches = zip(batch.starts_of(rank), batch.sizes_of(rank), strict=True)
        return Share(tuple(range(start, start + size) for start, size in stretches), batch.largest_micro_batch)
    order = np.argsort(-np.asarray(lengths), kind="stable")
    longest_first = np.asarray(lengths)[order].tolist()
    budget = TokenBudget(tokens=tuple(cap * limits.seq_len for cap in limits.max_samples), shortest=limits.shortest)
    steps = grouped(longest_first, budget, limits.overhead)
    most_tokens = max(
        len(places) * max(longest_first[places.start], limits.shortest) for step in steps for places in step if places
    )
    own = tuple(order[step[rank].start : step[rank].stop].tolist() for step in steps)
    return Share(own, -(-most_tokens // limits.seq_len))


def _are_alike(lengths: Any, limits: MicroBatchLimits) -> bool:
    """Return whether grouping could change nothing."""
    shortest, longest = int(np.min(lengths)), int(np.max(lengths))
    return shortest == longest and (longest >= limits.seq_len or limits.shortest >= limits.seq_len)


Item = TypeVar("Item")


def prefetch(items: Iterable[Item], device: torch.device | None = None) -> Generator[Item, None, None]:
    """Yield the same items in the same order, each prepared on a thread while the caller works on the one before it.

    Never more than one waits. What making an item raises is raised where that item would have come. When the iterator
    is closed, an item in the making is finished first and thrown away. With a CUDA `device` the thread works there,
    and not on GPU 0, where it would open a context of its own.

    Making an item must not draw from the global random generators: the caller may do so at the same time.
    """
    source, end = iter(items), object()
    begin = partial(torch.cuda.set_device, device) if device is not None and device.type == "cuda" else None
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch", initializer=begin) as thread:
        coming = thread.submit(next, source, end)
        while (item := coming.result()) is not end:
            coming = thread.submit(next, source, end)
            yield item  # type: ignore[misc]  # mypy does not see that it is not `end`


def pin(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a batch in pinned memory, whose copy to a GPU is not waited for; unchanged where the device is no GPU."""
    if device.type != "cuda":
        return dict(batch)
    return {name: tensor.pin_memory() for name, tensor in batch.items()}
