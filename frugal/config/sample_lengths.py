"""How long the samples of a data set are: a histogram, from tokenised data or from a file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from frugal import files
from frugal.errors import RequestError
from frugal.units import plural

TooLong = Literal["error", "truncate", "skip"]

MOST_BINS = 256
"""Different lengths a histogram keeps: what is said of padding is then right to about 1 %."""

SHOWN = 5

ALIKE = 0.1
"""Of the mean length: by so much may data differ from what a plan was told before it is said."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """`counts[i]` samples have `tokens[i]` tokens, shortest first. With many different lengths these are means of bins.

    `too_long`: what is to be done with samples that are longer than planned for. `source`: where the lengths are from,
    for people; it also says if they are a part of the data. `counted_mean`: tokens of a sample, on average, that a
    global batch of tokens counts, where these are not all it has: of pairs the target's.
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
        """All samples."""
        return sum(self.counts)

    @property
    def num_tokens(self) -> int:
        """All tokens, without padding."""
        return sum(tokens * count for tokens, count in zip(self.tokens, self.counts, strict=True))

    @property
    def mean(self) -> float:
        """Tokens of a sample."""
        return self.num_tokens / self.num_samples

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.tokens[-1]

    def quantile(self, share: float) -> int:
        """The tokens that this share of the samples has at most."""
        left = share * self.num_samples
        for tokens, count in zip(self.tokens, self.counts, strict=True):
            left -= count
            if left <= 0:
                return tokens
        return self.longest

    def typical(self, number: int) -> list[int]:
        """`number` samples that are spread as all of them are, longest first: the middles of so many equal parts."""
        lengths, below, bins = [], 0, iter(zip(self.tokens, self.counts, strict=True))
        tokens, count = next(bins)
        for i in range(number):
            while (2 * i + 1) * self.num_samples > 2 * number * (below + count):
                below += count
                tokens, count = next(bins)
            lengths.append(tokens)
        return lengths[::-1]

    def expected_longest(self, number: int) -> float:
        """Tokens of the longest of `number` samples drawn at random, on average: sum of l P(longest is l)."""
        expected, below = 0.0, 0
        for tokens, count in zip(self.tokens, self.counts, strict=True):
            share, share_below = (below + count) / self.num_samples, below / self.num_samples
            expected += tokens * (share**number - share_below**number)
            below += count
        return expected

    def within(self, seq_len: int) -> tuple["Lengths", list[str]]:
        """Those of samples of at most `seq_len` tokens, and what was done to the others.

        Raises:
            RequestError: some are longer, and nobody said what to do with them.
        """
        if self.longest <= seq_len:
            return self, []
        over = [(tokens, count) for tokens, count in zip(self.tokens, self.counts, strict=True) if tokens > seq_len]
        number = sum(count for _, count in over)
        shown = reversed(over[-SHOWN:])
        longest = ", ".join(
            f"{tokens} tokens ({count} of them)" if count > 1 else f"{tokens} tokens" for tokens, count in shown
        )
        because = f"the longest have {longest}"
        if self.too_long == "error":
            raise RequestError(
                f"{number} of {self.num_samples} samples are longer than --seq-len {seq_len}",
                because=because,
                hint=f"use --seq-len {self.longest}, or --too-long truncate, or --too-long skip",
            )
        kept = Counter(dict(zip(self.tokens, self.counts, strict=True)))
        for tokens, count in over:
            del kept[tokens]
            if self.too_long == "truncate":
                kept[seq_len] += count
        what = "cut to" if self.too_long == "truncate" else "left out: they are longer than"
        if not kept:
            raise RequestError(f"all {number} samples are longer than --seq-len {seq_len}", because=because)
        note = f"{number} of {self.num_samples} samples are {what} {seq_len} tokens; {because}"
        within = _of(kept, self.too_long, self.source)
        return replace(within, counted_mean=self.counted_mean), [note]


def of_counts(counts: Mapping[int, int], *, too_long: TooLong = "error", source: str = "") -> Lengths:
    """A histogram of `counts` samples for each number of tokens. Many lengths become bins of as many samples each,
    but for the longest ones, which are kept."""
    exact = {tokens: count for tokens, count in counts.items() if count}
    if len(exact) <= MOST_BINS:
        return _of(exact, too_long, source)
    binned: Counter[int] = Counter()
    tail = sorted(exact)[-2 * SHOWN :]
    for tokens in tail:
        binned[tokens] = exact.pop(tokens)
    room = sum(exact.values()) / (MOST_BINS - len(tail))
    tokens_in = samples_in = 0
    for tokens in sorted(exact):
        tokens_in += tokens * exact[tokens]
        samples_in += exact[tokens]
        if samples_in >= room:
            binned[round(tokens_in / samples_in)] += samples_in
            tokens_in = samples_in = 0
    if samples_in:
        binned[round(tokens_in / samples_in)] += samples_in
    return _of(binned, too_long, source)


def _of(counts: Mapping[int, int], too_long: TooLong, source: str) -> Lengths:
    tokens = tuple(sorted(counts))
    return Lengths(tokens=tokens, counts=tuple(counts[each] for each in tokens), too_long=too_long, source=source)


def of(value: Any, *, too_long: TooLong = "error", source: str = "") -> Lengths:
    """Lengths given as such, as `{tokens: samples}`, as one number a sample, or as a JSON file of one of these.

    Raises:
        RequestError: no such file, or something else in it.
    """
    if isinstance(value, Lengths):
        return value
    if isinstance(value, str | Path) and not source:
        return of(_read(Path(value)), too_long=too_long, source=str(value))
    place = f" in {source}" if source else ""
    form = 'it must be {"tokens": samples, ...} or a list with the tokens of each sample'
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, Sequence):
        whole = set(map(type, value)) <= {int}  # counted at once: ten times faster than one by one
        pairs = list(Counter(value).items()) if whole else [(tokens, 1) for tokens in value]
    else:
        raise RequestError(f"the lengths{place} are neither an object nor a list", because=form)
    counts: Counter[int] = Counter()
    for tokens, samples in pairs:
        length, number = _whole(tokens), _whole(samples)
        if length is None or number is None or number < 0:
            raise RequestError(f"the lengths{place} have an entry {tokens!r}: {samples!r}", because=form)
        if length < 1 and number:
            raise RequestError(
                f"the lengths{place} have {plural(number, 'sample')} of {length} tokens",
                because="there is nothing to learn from an empty sample",
            )
        counts[length] += number
    if not sum(counts.values()):
        raise RequestError(f"there is no sample among the lengths{place}", because=form)
    return of_counts(counts, too_long=too_long, source=source)


def unlike(planned: Lengths, num_samples: int, num_tokens: int) -> str | None:
    """What to say where a plan's lengths are not those of the data that it is used for."""
    mean = num_tokens / num_samples
    if abs(mean / planned.mean - 1) <= ALIKE:
        return None
    return (
        f"the plan is for samples of {planned.mean:.0f} tokens on average ({planned.source or 'as given'}), this data "
        f"has {mean:.0f}: memory holds for both, the seconds of a step do not"
    )


def _whole(value: Any) -> int | None:
    """A whole number, also one that is the name of a JSON field."""
    if isinstance(value, str) and value.removeprefix("-").isdigit():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read(path: Path) -> Any:
    try:
        return msgspec.json.decode(files.without_bom(path.read_bytes()))
    except OSError as error:
        raise RequestError(f"cannot read the lengths {path}", because=str(error.strerror)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RequestError(f"the lengths {path} are no JSON", because=str(error)) from None
