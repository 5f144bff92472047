"""The lengths of the samples of a data set: a histogram, from tokenised data or from a file."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from frugal import files
from frugal.errors import RequestError, failure, refuse
from frugal.units import plural

TooLong = Literal["error", "truncate", "skip"]

MOST_BINS = 256
"""Different lengths in a histogram: padding is then right to about 1 %."""

DOCUMENT_TOKENS = 64
"""Mean tokens of a pack's documents that a plan assumes where it does not know the data."""

SHOWN = 5

ALIKE = 0.1
"""Part of the mean length by which data may differ from the plan's without a note."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """`counts[i]` samples have `tokens[i]` tokens, shortest first. With many different lengths these are means of bins.

    `too_long` is the action for samples that are longer than planned. `source` names the origin of the lengths, and
    whether they are a part of the data. `counted_mean` are the mean tokens of a sample that a global batch of tokens
    counts, if these are not all it has: the target's of pairs.
    """

    tokens: tuple[int, ...]
    counts: tuple[int, ...]
    too_long: TooLong = "error"
    source: str = ""
    counted_mean: float | None = None

    def __post_init__(self) -> None:
        assert self.tokens and len(self.tokens) == len(self.counts)
        assert self.tokens[0] >= 1 and all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        assert min(self.counts) >= 1

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return sum(self.counts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, without padding."""
        return sum(tokens * count for tokens, count in zip(self.tokens, self.counts, strict=True))

    @property
    def mean(self) -> float:
        """Mean tokens of a sample."""
        return self.num_tokens / self.num_samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.tokens[-1]

    def quantile(self, share: float) -> int:
        """Return the tokens that this share of the samples has at most."""
        below = list(accumulate(self.counts))
        return self.tokens[min(bisect_left(below, share * self.num_samples), len(below) - 1)]

    def typical(self, number: int) -> list[int]:
        """Return `number` lengths distributed like all of them, longest first: the middles of that many equal parts."""
        below = [2 * number * each for each in accumulate(self.counts)]
        middles = [(2 * i + 1) * self.num_samples for i in range(number)]
        return [self.tokens[bisect_left(below, middle)] for middle in reversed(middles)]

    def drawn(self, number: int, seed: int) -> list[int]:
        """Return `number` lengths drawn at random, so that stretches of them differ as global batches do."""
        return Random(seed).choices(self.tokens, weights=self.counts, k=number)

    def expected_longest(self, number: int) -> float:
        """Return the expected tokens of the longest of `number` random samples: sum of l P(longest is l)."""
        shares = [below / self.num_samples for below in accumulate(self.counts, initial=0)]
        expected = 0.0
        for tokens, (share_below, share) in zip(self.tokens, pairwise(shares), strict=True):
            expected += tokens * (share**number - share_below**number)
        return expected

    def within(self, seq_len: int) -> tuple["Lengths", list[str]]:
        """Return the lengths of samples of at most `seq_len` tokens, and notes on what was done to the others.

        Raises:
            RequestError: some are longer, and `too_long` is `error`.
        """
        if self.longest <= seq_len:
            return self, []
        every = dict(zip(self.tokens, self.counts, strict=True))
        kept = Counter({tokens: count for tokens, count in every.items() if tokens <= seq_len})
        number = self.num_samples - kept.total()
        shown = [tokens for tokens in reversed(self.tokens) if tokens > seq_len][:SHOWN]
        because = "the longest have " + ", ".join(
            f"{tokens} tokens ({every[tokens]} of them)" if every[tokens] > 1 else f"{tokens} tokens"
            for tokens in shown
        )
        what = "left out: they are longer than"
        if self.too_long == "truncate":
            what = "cut to"
            kept[seq_len] += number
        refuse(
            (
                self.too_long == "error",
                f"{number} of {self.num_samples} samples are longer than --seq-len {seq_len}",
                because,
                f"use --seq-len {self.longest}, or --too-long truncate, or --too-long skip",
            ),
            (not kept, f"all {number} samples are longer than --seq-len {seq_len}", because, None),
        )
        note = f"{number} of {self.num_samples} samples are {what} {seq_len} tokens; {because}"
        return replace(_of(kept, self.too_long, self.source), counted_mean=self.counted_mean), [note]


def of_counts(counts: Mapping[int, int], *, too_long: TooLong = "error", source: str = "") -> Lengths:
    """Return a histogram of `counts` samples per number of tokens. Many lengths become bins of equally many samples,
    except the longest, which are kept."""
    exact = {tokens: count for tokens, count in counts.items() if count}
    if len(exact) <= MOST_BINS:
        return _of(exact, too_long, source)
    binned: Counter[int] = Counter()
    tail = sorted(exact)[-2 * SHOWN :]
    for tokens in tail:
        binned[tokens] = exact.pop(tokens)
    room, longest = sum(exact.values()) / (MOST_BINS - len(tail)), max(exact)
    tokens_in = samples_in = 0
    for tokens in sorted(exact):
        tokens_in += tokens * exact[tokens]
        samples_in += exact[tokens]
        if samples_in >= room or tokens == longest:
            binned[round(tokens_in / samples_in)] += samples_in
            tokens_in = samples_in = 0
    return _of(binned, too_long, source)


def _of(counts: Mapping[int, int], too_long: TooLong, source: str) -> Lengths:
    tokens = tuple(sorted(counts))
    return Lengths(tokens=tokens, counts=tuple(counts[each] for each in tokens), too_long=too_long, source=source)


def of(value: Any, *, too_long: TooLong = "error", source: str = "") -> Lengths:
    """Return lengths from lengths, `{tokens: samples}`, one number per sample, or a JSON file of one of these.

    Raises:
        RequestError: no such file, or something else in it.
    """
    if isinstance(value, Lengths):
        return value
    if isinstance(value, str | Path) and not source:
        not_json = failure(f"the lengths {value} are no JSON", msgspec.DecodeError, ValueError, RecursionError)
        with failure(f"cannot read the lengths {value}", OSError), not_json:
            content = msgspec.json.decode(files.without_bom(Path(value).read_bytes()))
        return of(content, too_long=too_long, source=str(value))
    place = f" in {source}" if source else ""
    form = 'it must be {"tokens": samples, ...} or a list with the tokens of each sample'
    kind = dict[int, int] if isinstance(value, Mapping) else list[int]
    try:
        counts = Counter(msgspec.convert(value, kind, strict=not isinstance(value, Mapping), str_keys=True))
    except msgspec.ValidationError as error:
        raise RequestError(f"the lengths{place} cannot be used", because=(form, str(error))) from None
    empty = next((tokens for tokens, number in counts.items() if tokens < 1 and number), None)
    refuse(
        (
            empty is not None,
            f"the lengths{place} have {plural(counts[empty or 0], 'sample')} of {empty} tokens",
            "there is nothing to learn from an empty sample",
            None,
        ),
        (
            min(counts.values(), default=0) < 0 or not counts.total(),
            f"there is no sample among the lengths{place}, or fewer than none",
            form,
            None,
        ),
    )
    return of_counts(counts, too_long=too_long, source=source)


def unlike(planned: Lengths, num_samples: int, num_tokens: int) -> str | None:
    """Return a note if a plan's lengths differ from those of its data."""
    mean = num_tokens / num_samples
    if abs(mean / planned.mean - 1) <= ALIKE:
        return None
    return (
        f"the plan is for samples of {planned.mean:.0f} tokens on average ({planned.source or 'as given'}), this data "
        f"has {mean:.0f}: memory holds for both, the seconds of a step do not"
    )
