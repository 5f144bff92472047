"""Several sources with weights, `--data a.jsonl:0.7 --data b.jsonl:0.3`: each has its share of what is drawn.

The endless order is cut into blocks of about a thousand draws. Each block has exactly the share of each source, in an
order of its own, and each source gives its samples as it would alone: every one once, in a random order, then every one
once more in another. So what draw number d is follows from d, the seed and the sources alone, as without weights: the
state of a run stays one number, and any number of ranks draws the same.

`datasets.interleave_datasets` draws the source of each sample at random, so that shares are met on average; it has to
be run from the beginning to know where it stands.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset

from frugal.data.batches import drawn, mixed
from frugal.errors import refuse
from frugal.models.objectives import Sample

_BLOCK = 1000  # draws, at least: few enough that no stretch of training lacks a source
_MOST = 10_000  # draws: shares with a larger denominator are rounded to this
_APART = 1_000_003  # between the seeds of sources, so that two of the same size have different orders

_WEIGHTED = re.compile(r"(.+):(\d+\.?\d*|\.\d+)", re.DOTALL)


@dataclass(frozen=True)
class WeightedSource:
    """A source as `--data` names it, and its part of the samples that are drawn."""

    source: str
    part: Fraction


def shares(sources: Sequence[str]) -> tuple[WeightedSource, ...]:
    """Return the share of each source; none where they have no weights. A path that exists has no weight.

    Raises:
        RequestError: a weight is 0, or some have one and others not.
    """
    named = [
        (source, None if Path(source).expanduser().exists() else _WEIGHTED.fullmatch(source)) for source in sources
    ]
    given = [(match[1], Fraction(match[2])) for _, match in named if match]
    if not given:
        return ()
    first = next(source for source, match in named if match)
    for source, match in named:
        refuse(
            (match is None, f"--data {source} has no weight", f"--data {first} has one",
             f"give all sources one, such as --data {source}:1, or none"),
            (match and not Fraction(match[2]), f"--data {source} has the weight 0", "nothing would be drawn from it",
             None),
        )  # fmt: skip
    total = sum(weight for _, weight in given)
    return tuple(WeightedSource(source, weight / total) for source, weight in given)


class Mixture(Sequence[Sample]):
    """The samples of all `parts`, one part after another; `drawn` says in which order they are trained on.

    `lengths` and `counted_tokens` are as those of `ArrowSamples`. Without `weights` they only follow each other.
    `names` are for people.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[Fraction] = (), names: Sequence[str] = ()) -> None:
        self.parts = parts
        self.names = names
        self.lengths: NDArray[np.int32] = np.concatenate([part.lengths for part in parts])
        self.counted_tokens: NDArray[np.int32] = np.concatenate([part.counted_tokens for part in parts])
        self._joined: ConcatDataset[Sample] = ConcatDataset(parts)
        self.counts = _counts(weights) if weights else ()

    def __len__(self) -> int:
        return len(self._joined)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._joined[int(index)]

    def drawn(self, draws: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """Return the index of the sample that is drawn as number `draws[i]` of the endless order; shape `(draws,)`."""
        blocks, places = np.divmod(draws, sum(self.counts))
        known, row = np.unique(blocks, return_inverse=True)
        state = mixed(known.astype(np.uint64) + np.uint64(mixed(seed & (1 << 64) - 1)))
        # a number for each place of each block, by which its places are ordered; shape `(blocks, places)`
        keys = mixed(state[:, None] + np.arange(sum(self.counts), dtype=np.uint64)[None, :])
        slots = np.argsort(keys, axis=1, kind="stable")
        part_at = np.searchsorted(np.cumsum(self.counts), slots, side="right")  # of each place in each block
        indices = np.empty(len(draws), dtype=np.int64)
        for part, count in enumerate(self.counts):
            is_its = part_at == part
            mine = is_its[row, places]
            before = np.cumsum(is_its, axis=1)[row, places][mine] - 1  # of the same part in this block
            own = drawn(blocks[mine] * count + before, len(self.parts[part]), seed + (part + 1) * _APART)
            indices[mine] = own + sum(map(len, self.parts[:part]))
        return indices

    def in_words(self) -> str:
        """Return how much of what is drawn comes from each part, and when it begins again."""
        size = sum(self.counts)
        tokens = [count * float(part.lengths.mean()) for count, part in zip(self.counts, self.parts, strict=True)]
        said = [
            f"{100 * count / size:.1f} % of the samples, {100 * of_it / sum(tokens):.1f} % of the tokens from {name} "
            f"(its {len(part):,} are seen after {-(-len(part) * size // count):,} drawn, then again in another order)"
            for name, count, of_it, part in zip(self.names, self.counts, tokens, self.parts, strict=True)
        ]
        return f"an epoch is {len(self):,} samples drawn: {'; '.join(said)}"


def _counts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return how many draws of a block each part has: its share exactly, where the shares' denominator allows it."""
    whole = lcm(*(weight.denominator for weight in weights))
    size = whole * -(-_BLOCK // whole) if whole <= _MOST else _MOST
    counts = [max(1, int(weight * size)) for weight in weights]
    left = sorted(range(len(weights)), key=lambda part: counts[part] - weights[part] * size)
    for part in left[: max(0, size - sum(counts))]:
        counts[part] += 1
    return tuple(counts)


def epoch_indices(samples: Any) -> NDArray[np.int64] | slice:
    """Return the indices that an epoch draws, with repetitions: all, or of a mixture its shares."""
    if isinstance(samples, Mixture) and samples.counts:
        return samples.drawn(np.arange(len(samples)), 0)
    return slice(None)
