"""A global batch, cut into cells: one a rank and micro-step, none lost and none invented.

Ranks with the same cap on their micro-batch are a group. There are at most two kinds of micro-steps, and in all of one
kind a group gets the same number of samples, so a thousand ranks and a thousand micro-steps are a few numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import mul
from types import MappingProxyType

from frugal.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class MicroSteps:
    """`count` micro-steps in a row, in each of which the group of ranks with the n-th smallest cap gets `samples[n]`.

    Inside a group the samples are dealt evenly; where they do not divide, ranks take turns to get one more.
    """

    count: int
    samples: tuple[int, ...]


@lru_cache(maxsize=16)  # a search asks ten times in a row about the same thousand ranks
def _groups(caps: tuple[int, ...]) -> Mapping[int, int]:
    return MappingProxyType(dict(sorted(Counter(caps).items())))


@dataclass(frozen=True)
class Cells:
    """Samples of every rank in every micro-step; `caps` has the most a rank takes at once, one number a rank.

    All ranks have the same number of micro-steps, because ZeRO communicates in each one; a cell may be empty.
    """

    caps: tuple[int, ...]
    micro_steps: tuple[MicroSteps, ...]

    def __post_init__(self) -> None:
        assert self.caps and self.micro_steps
        assert all(len(steps.samples) == len(self.groups) and steps.count > 0 for steps in self.micro_steps)
        assert all(min(steps.samples) >= 0 for steps in self.micro_steps), "fewer than no samples"
        assert all(size <= cap for cap, size in zip(self.groups, self.largest, strict=True)), "a cell is over its cap"

    @property
    def groups(self) -> Mapping[int, int]:
        """The number of ranks of each cap, smallest cap first."""
        return _groups(self.caps)

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest cell of each group."""
        return tuple(map(max, zip(*map(self.largest_in, self.micro_steps), strict=True)))

    def largest_in(self, steps: MicroSteps) -> tuple[int, ...]:
        """The largest cell of each group in these micro-steps."""
        return tuple(-(-size // num_ranks) for size, num_ranks in zip(steps.samples, self.groups.values(), strict=True))

    @cached_property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """`sizes[rank][micro_step]`, shape (world size, accumulation steps)."""
        rows: list[list[int]] = [[] for _ in self.caps]
        for group, cap in enumerate(self.groups):
            members = [row for row, own in zip(rows, self.caps, strict=True) if own == cap]
            first = 0  # whose turn it is to get one more
            for steps in self.micro_steps:
                each, more = divmod(steps.samples[group], len(members))
                for _ in range(steps.count):
                    for row in members:
                        row.append(each)
                    for turn in range(first, first + more):
                        members[turn % len(members)][-1] += 1
                    first += more
        return tuple(map(tuple, rows))

    @property
    def global_batch(self) -> int:
        """Samples over all ranks and micro-steps."""
        return sum(steps.count * sum(steps.samples) for steps in self.micro_steps)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.caps)

    @property
    def accumulation_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return sum(steps.count for steps in self.micro_steps)

    @property
    def is_uniform(self) -> bool:
        """Whether all cells are equal, so that `micro-batch x accumulation x world` is the global batch."""
        return self.global_batch == max(self.largest) * self.world_size * self.accumulation_steps

    def of(self, rank: int) -> tuple[int, ...]:
        """The rank's cells, samples."""
        ends, starts = self._before(rank + 1), self._before(rank)
        return tuple(end - start for end, start in zip(ends, starts, strict=True))

    def starts(self, rank: int) -> tuple[int, ...]:
        """Where each of the rank's cells begins in the global batch, samples.

        Cells lie in the batch micro-step by micro-step, within it rank by rank.
        """
        starts, position = [], 0
        totals = (sum(steps.samples) for steps in self.micro_steps for _ in range(steps.count))
        for before, total in zip(self._before(rank), totals, strict=True):
            starts.append(position + before)
            position += total
        return tuple(starts)

    def _before(self, rank: int) -> list[int]:
        """What the ranks below `rank` get in each micro-step, all together."""
        below = self.caps[:rank]
        found = [0] * self.accumulation_steps
        for group, (cap, num_ranks) in enumerate(self.groups.items()):
            members, first, step = below.count(cap), 0, 0
            for steps in self.micro_steps:
                each, more = divmod(steps.samples[group], num_ranks)
                for _ in range(steps.count):
                    found[step] += each * members + _on_a_circle(first, more, members, num_ranks)
                    first = (first + more) % num_ranks
                    step += 1
        return found


def _on_a_circle(start: int, length: int, end: int, size: int) -> int:
    """How many of the places 0 to `end - 1` of `size` in a circle the `length` places from `start` on cover."""
    return min(max(end - start, 0), length) + min(max(start + length - size, 0), end)


def cells(global_batch: int, max_samples: Sequence[int], *, num_steps: int | None = None) -> Cells:
    """The fewest micro-steps that hold `global_batch` samples, cut as evenly as whole samples allow.

    `max_samples` has one cap a rank. With n = ceil(batch / sum of caps) micro-steps, or `num_steps` if given,
    micro-step k gets b_k samples, the b_k differing by at most one, the larger ones first. Of these a group of m ranks
    with cap c is due b_k * m * c / sum(caps); it gets that rounded down or up, so never more than m * c, and the
    roundings up go to the largest remainders. Every micro-step lasts as long as its slowest rank, so there is nothing
    to gain from rounding another way in the next. With equal caps all cells differ by at most one sample, and so do
    the ranks' totals.

    Raises:
        RequestError: a batch or a cap below 1, or `num_steps` that cannot hold the batch or would stay empty.
    """
    if global_batch < 1:
        raise RequestError(f"a global batch of {global_batch} samples trains nothing", hint="ask for at least 1 sample")
    if not max_samples or min(max_samples) < 1:
        raise RequestError(
            f"the micro-batch caps {list(max_samples)} leave a rank without samples",
            hint="every rank must take at least 1 sample",
        )
    caps = tuple(max_samples)
    fewest = -(-global_batch // sum(caps))
    num_steps = fewest if num_steps is None else num_steps
    if not fewest <= num_steps <= global_batch:
        raise RequestError(
            f"{num_steps} accumulation steps cannot hold a global batch of {global_batch}",
            because=f"{sum(caps)} samples fit into one, and each needs at least one",
            hint=f"between {fewest} and {global_batch} accumulation steps can",
        )
    rooms = [cap * num_ranks for cap, num_ranks in sorted(Counter(caps).items())]
    each, more = divmod(global_batch, num_steps)
    kinds = ((more, each + 1), (num_steps - more, each))
    steps = (MicroSteps(count=count, samples=_shared(samples, rooms)) for count, samples in kinds if count)
    return Cells(caps, tuple(steps))


def _shared(samples: int, rooms: Sequence[int]) -> tuple[int, ...]:
    """`samples` in proportion to `rooms`, rounded down or up so that none is lost."""
    whole = sum(rooms)
    shares = [samples * room // whole for room in rooms]
    by_remainder = sorted(range(len(rooms)), key=lambda group: -(samples * rooms[group] % whole))
    for group in by_remainder[: samples - sum(shares)]:
        shares[group] += 1
    return tuple(shares)


def balanced(
    samples: int, caps: Sequence[int], speeds: Sequence[float], counts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The caps that hold one micro-step of `samples` and let its slowest rank be done soonest.

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
