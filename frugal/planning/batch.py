"""A global batch, cut into micro-batches: one a rank and micro-step, no sample lost and none invented.

Ranks with the same cap on their micro-batch are a group. There are at most two kinds of micro-steps, and in all of one
kind a group gets the same number of samples, so a thousand ranks and a thousand micro-steps are a few numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import mul

from frugal.errors import refuse
from frugal.units import plural


@dataclass(frozen=True, kw_only=True)
class MicroSteps:
    """`count` micro-steps in a row, in each of which the group of ranks with the n-th smallest cap gets `samples[n]`.

    Inside a group the samples are dealt evenly; where they do not divide, ranks take turns to get one more.
    """

    count: int
    samples: tuple[int, ...]


@lru_cache(maxsize=16)  # a search asks ten times in a row about the same thousand ranks
def _groups(caps: tuple[int, ...]) -> Mapping[int, int]:
    return dict(sorted(Counter(caps).items()))  # not a mappingproxy: plans are pickled


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """A global batch and its micro-batches. For a token target these are micro-batches of full-length samples.

    All ranks have the same number of micro-steps, because ZeRO communicates in each one; a micro-batch may be empty.

    Where ranks share samples (`sequence_parallel`), a group of consecutive ones takes the place of a rank here.

    Attributes:
        global_batch: samples over all ranks and micro-steps.
        global_tokens: the token target that `global_batch` was derived from; None: the target is in samples.
        world_size: number of ranks.
        micro_batch: caps, one a rank: the most samples it takes at once. One for all ranks that share samples.
        accumulation_steps: micro-steps per optimizer step.
        micro_steps: the micro-batch sizes, in a few numbers however many ranks and micro-steps there are.
        shortest: tokens that a sample counts at least, of samples of different lengths: in a micro-batch a sample
            counts as its own tokens, all padded to the longest and no more than `micro_batch` samples of full length;
            None: each counts as one of full length. See `frugal.planning.length_bucketing`.
        overhead_tokens: what a micro-step takes besides its tokens, in tokens of the same time; None: the fewest
            micro-steps are wanted.
        sequence_parallel: ranks that share each sample, a part of its positions each; they are consecutive.
    """

    global_batch: int
    global_tokens: int | None
    world_size: int
    micro_batch: tuple[int, ...]
    accumulation_steps: int
    micro_steps: tuple[MicroSteps, ...]
    shortest: int | None = None
    overhead_tokens: int | None = None
    sequence_parallel: int = 1

    def __post_init__(self) -> None:
        assert self.micro_batch and self.micro_steps
        assert self.world_size == len(self.micro_batch) * self.sequence_parallel, "there is not one cap a rank"
        assert all(len(steps.samples) == len(self.groups) and steps.count > 0 for steps in self.micro_steps)
        assert all(min(steps.samples) >= 0 for steps in self.micro_steps), "fewer than no samples"
        assert self.global_batch == sum(steps.count * sum(steps.samples) for steps in self.micro_steps), (
            "the micro-batch sizes do not add up to the global batch"
        )
        assert self.accumulation_steps == sum(steps.count for steps in self.micro_steps), (
            "the micro-steps are not as many as it says"
        )
        assert all(size <= cap for cap, size in zip(self.groups, self.largest_of_groups, strict=True)), (
            "a micro-batch is over its cap"
        )

    @classmethod
    def of(
        cls,
        global_batch: int,
        micro_batch: Sequence[int],
        global_tokens: int | None = None,
        *,
        accumulation_steps: int | None = None,
        sequence_parallel: int = 1,
    ) -> "BatchPlan":
        """Return the fewest micro-steps that hold `global_batch` samples, cut as evenly as whole samples allow.

        `micro_batch` has one cap a rank. With n = ceil(batch / sum of caps) micro-steps, or `accumulation_steps` if
        given, micro-step k gets b_k samples, the b_k differing by at most one, the larger ones first. Of these a group
        of m ranks with cap c is due b_k * m * c / sum(caps); it gets that rounded down or up, so never more than m * c,
        and the roundings up go to the largest remainders. Every micro-step lasts as long as its slowest rank, so there
        is nothing to gain from rounding another way in the next. With equal caps all micro-batches differ by at most
        one sample, and so do the ranks' totals.

        Raises:
            RequestError: a batch or a cap below 1, or `accumulation_steps` that cannot hold the batch or would stay
                empty.
        """
        smallest = min(micro_batch, default=0)
        refuse(
            (
                global_batch < 1,
                f"a global batch of {global_batch} samples trains nothing",
                "",
                "ask for at least 1 sample",
            ),
            (
                smallest < 1,
                f"a micro-batch cap of {smallest} leaves a rank without samples",
                "",
                "every rank must take at least 1 sample",
            ),
        )
        caps = tuple(micro_batch)
        fewest = -(-global_batch // sum(caps))
        num_steps = fewest if accumulation_steps is None else accumulation_steps
        refuse(
            (
                not fewest <= num_steps <= global_batch,
                f"{num_steps} accumulation steps cannot hold a global batch of {global_batch}",
                f"{sum(caps)} samples fit into one, and each needs at least one",
                f"between {fewest} and {global_batch} accumulation steps can",
            )
        )
        capacities = [cap * num_ranks for cap, num_ranks in _groups(caps).items()]
        per_step, num_larger = divmod(global_batch, num_steps)
        kinds = ((num_larger, per_step + 1), (num_steps - num_larger, per_step))
        return cls(
            global_batch=global_batch,
            global_tokens=global_tokens,
            world_size=len(caps) * sequence_parallel,
            micro_batch=caps,
            accumulation_steps=num_steps,
            micro_steps=tuple(
                MicroSteps(count=count, samples=in_proportion(samples, capacities)) for count, samples in kinds if count
            ),
            sequence_parallel=sequence_parallel,
        )

    def arithmetic(self, rank_noun: str, counted: str, seq_len: int) -> str:
        """Return the whole cut in one line, of a token target in tokens of samples of `seq_len`, too.

        `rank_noun` names a rank, `counted` what a token target counts.
        """
        total, in_tokens = plural(self.global_batch, "sample"), ""
        if self.global_tokens is not None:
            held = self.global_batch * seq_len
            asked = "" if held == self.global_tokens else f" of {self.global_tokens:,}"
            total = f"{held:,}{asked} {counted}: {total} of {seq_len}"
            in_tokens = f" ({self.largest_micro_batch * seq_len:,} tokens)"
        ranks = plural(len(self.micro_batch), rank_noun)
        if self.sequence_parallel > 1:
            ranks = f"{plural(len(self.micro_batch), 'group')} of {plural(self.sequence_parallel, rank_noun)}"
        if self.is_uniform:
            steps = plural(self.accumulation_steps, "accumulation step")
            return f"{total} = {ranks} x micro-batch {self.largest_micro_batch}{in_tokens} x {steps}"
        at_most = in_tokens.replace("(", "(at most ")
        return (
            f"{total} = {ranks} x {plural(self.accumulation_steps, 'micro-step')} of {self._sizes_in_words()}{at_most}"
        )

    def _sizes_in_words(self) -> str:
        """Return a micro-batch's size: `7 or 8 samples`, or per group of ranks where their micro-batches differ."""
        texts = []
        for group, num_ranks in enumerate(self.groups.values()):
            sizes = sorted(
                {
                    size
                    for steps in self.micro_steps
                    for size in (steps.samples[group] // num_ranks, -(-steps.samples[group] // num_ranks))
                }
            )
            few = " or ".join([*map(str, sizes[:-1]), plural(sizes[-1], "sample")])
            words = few if len(sizes) <= 2 else f"{sizes[0]} to {sizes[-1]} samples"
            texts.append((words, f"on {plural(num_ranks, 'rank')}"))
        return texts[0][0] if len(texts) == 1 else ", ".join(map(" ".join, texts))

    @property
    def groups(self) -> Mapping[int, int]:
        """The number of ranks of each cap, smallest cap first."""
        return _groups(self.micro_batch)

    @cached_property
    def largest_of_groups(self) -> tuple[int, ...]:
        """The largest micro-batch of each group, samples."""
        return tuple(map(max, zip(*map(self.largest_in, self.micro_steps), strict=True)))

    def largest_in(self, steps: MicroSteps) -> tuple[int, ...]:
        """Return the largest micro-batch of each group in these micro-steps, samples."""
        return tuple(-(-size // num_ranks) for size, num_ranks in zip(steps.samples, self.groups.values(), strict=True))

    @property
    def largest_micro_batch(self) -> int:
        """The most samples that any rank gets in any micro-step."""
        return max(self.largest_of_groups)

    @property
    def capacity(self) -> int:
        """Samples that micro-batches of the largest size would hold; DeepSpeed's JSON can only say this number."""
        return self.accumulation_steps * self.largest_micro_batch * len(self.micro_batch)

    @property
    def cap_of_rank(self) -> tuple[int, ...]:
        """`micro_batch`, one a rank also where ranks share samples."""
        return tuple(cap for cap in self.micro_batch for _ in range(self.sequence_parallel))

    def group_of(self, rank: int) -> int:
        """Return the index of the rank's micro-batches in `micro_batch` and `sizes`."""
        return rank // self.sequence_parallel

    @property
    def is_uniform(self) -> bool:
        """True if all micro-batches are equal: `micro-batch x accumulation x world` is the global batch."""
        return self.global_batch == self.capacity

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """The micro-batch sizes one by one: `sizes[rank][micro_step]`, shape (world size, accumulation steps)."""
        return tuple(map(self.sizes_of, range(len(self.micro_batch))))

    def sizes_of(self, rank: int) -> tuple[int, ...]:
        """Return the rank's micro-batch sizes in samples, without computing all others."""
        ends, starts = self._before(rank + 1), self._before(rank)
        return tuple(end - start for end, start in zip(ends, starts, strict=True))

    def starts_of(self, rank: int) -> tuple[int, ...]:
        """Return where each of the rank's micro-batches begins in the global batch, samples.

        The global batch is laid out micro-step by micro-step, within it rank by rank.
        """
        starts, position = [], 0
        totals = (sum(steps.samples) for steps in self.micro_steps for _ in range(steps.count))
        for before, total in zip(self._before(rank), totals, strict=True):
            starts.append(position + before)
            position += total
        return tuple(starts)

    def _before(self, rank: int) -> list[int]:
        """Return what the ranks below `rank` get in each micro-step, all together."""
        below = self.micro_batch[:rank]
        samples = [0] * self.accumulation_steps
        for group, (cap, num_ranks) in enumerate(self.groups.items()):
            members, first, step = below.count(cap), 0, 0
            for steps in self.micro_steps:
                per_rank, remainder = divmod(steps.samples[group], num_ranks)
                for _ in range(steps.count):
                    # of the `remainder` ranks from `first` on, in a circle, those that are members
                    more = min(max(members - first, 0), remainder) + min(max(first + remainder - num_ranks, 0), members)
                    samples[step] += per_rank * members + more
                    first = (first + remainder) % num_ranks
                    step += 1
        return samples

    def tightened(self) -> "BatchPlan":
        """Return the same micro-steps under caps that they fill: each group's largest micro-batch, at least 1.

        Groups whose largest micro-batches are the same become one.
        """
        tight = [max(1, largest) for largest in self.largest_of_groups]
        if tight == list(self.groups):
            return self
        new_caps = dict(zip(self.groups, tight, strict=True))
        merged = []
        for steps in self.micro_steps:
            samples = dict.fromkeys(sorted(tight), 0)
            for cap, size in zip(tight, steps.samples, strict=True):
                samples[cap] += size
            merged.append(replace(steps, samples=tuple(samples.values())))
        return replace(self, micro_batch=tuple(map(new_caps.__getitem__, self.micro_batch)), micro_steps=tuple(merged))

    def resized(self, num_samples: int) -> "BatchPlan":
        """Return the cut of a global batch of another size under the same caps: an epoch's last, or one of tokens."""
        if num_samples == self.global_batch:
            return self
        return BatchPlan.of(num_samples, self.micro_batch, sequence_parallel=self.sequence_parallel)


def in_proportion(samples: int, capacities: Sequence[int]) -> tuple[int, ...]:
    """Split `samples` in proportion to `capacities`, rounded down or up so that none is lost."""
    total = sum(capacities)
    shares = [samples * capacity // total for capacity in capacities]
    by_remainder = sorted(range(len(capacities)), key=lambda group: -(samples * capacities[group] % total))
    for group in by_remainder[: samples - sum(shares)]:
        shares[group] += 1
    return tuple(shares)


def balanced(
    samples: int, caps: Sequence[int], speeds: Sequence[float], counts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the caps that hold one micro-step of `samples` and make its slowest rank the fastest.

    `caps` and `speeds` (of whatever unit) have one number a rank, or one a kind of rank of which there are `counts`. In
    T seconds a rank takes min(cap, T x speed) samples, rounded down; T is the smallest with which all together take
    enough. At least 1 sample each, so that the result can cut other batches too.

    Left out: what a micro-step takes however few samples it has.
    """
    kinds = tuple(zip(caps, speeds, strict=True))
    counts = counts or (1,) * len(kinds)
    assert samples <= sum(map(mul, caps, counts)), "the caps cannot hold a micro-step"

    def taken(kind: tuple[int, float], seconds: float) -> int:
        cap, speed = kind
        return min(cap, int(seconds * speed * (1 + 1e-12)))  # c samples in c / speed seconds, whatever floats say

    def suffices(seconds: float) -> bool:
        return sum(count * taken(kind, seconds) for kind, count in zip(kinds, counts, strict=True)) >= samples

    best = float("inf")
    for cap, speed in dict.fromkeys(kinds):
        low, high = 0, cap  # the fewest samples of this kind of rank after which there is time enough for all
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if suffices(middle / speed) else (middle + 1, high)
        if suffices(low / speed):
            best = min(best, low / speed)
    return tuple(max(1, taken(kind, best)) for kind in kinds)
