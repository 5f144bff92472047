"""Samples of different lengths, cut into micro-steps under a budget of padded tokens.

A plan is proven for `micro_batch` samples of `seq_len` tokens on each rank. A micro-batch of n samples, the longest of
l tokens, is padded to n x l. It may take the place of the proven one where

    n x max(l, shortest) <= micro_batch x seq_len

What a step holds is a sum of parts that grow with n, l, n x l and n x l x l. Under this bound n x l is never more than
was proven, nor is n x l x l <= (n x l) x seq_len. Parts that grow with n alone (a class for each sample, attention's
statistics rounded up) could be: along n x l = B the bytes are a + b B + c B l + d B / l + e l, which is convex in l, so
the most is at one of its two ends, l = seq_len and l = `shortest`. The plan was rehearsed at both. Where only the first
was rehearsed `shortest` is `seq_len`: no micro-batch has more samples than planned, and short ones are merely together.

Left out: kernels that round lengths up, and what a caching allocator loses between micro-steps of different shapes. The
longest come first, so that later ones find blocks that are large enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

FINENESS = 64
"""The budget that evens out the cells is found to one part in so many: what is idle then is less than 2 %."""

SMALLER = 0.85
"""Each next part of the budget that is tried, of the one before: the best micro-step is missed by 8 % at most."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """What a micro-batch may take: `tokens` (padded) of each rank, where a sample counts at least `shortest` tokens."""

    tokens: tuple[int, ...]
    shortest: int

    def __post_init__(self) -> None:
        assert self.tokens and min(self.tokens) >= 1 and self.shortest >= 1

    def most_samples(self, rank: int, longest: int) -> int:
        """The samples a micro-batch of `rank` may have, the longest of them with so many tokens; at least 1."""
        return max(1, self.tokens[rank] // max(longest, self.shortest))

    def part(self, part: float) -> "TokenBudget":
        """A part of it, for every rank."""
        return replace(self, tokens=tuple(max(1, int(tokens * part)) for tokens in self.tokens))


MicroStep = tuple[range, ...]
"""Of each rank the samples it takes, as places among all of them, longest first; empty where it takes none."""


def grouped(lengths: Sequence[int], budget: TokenBudget, overhead: int | None = None) -> list[MicroStep]:
    """The micro-steps of a global batch. `lengths` are tokens of its samples, longest first; each cell is a stretch.

    First the fewest micro-steps that stretches under the budget allow, and under the smallest part of the budget that
    still allows as few: the ranks of one micro-step, which wait for each other, then have nearly as many padded tokens.
    More budget never reaches less far, because a cell that begins later has shorter samples and holds no fewer.

    More and smaller micro-steps pad less. `overhead` is what a micro-step takes besides its tokens, in tokens of the
    same time; None: the fewest micro-steps are wanted. With it, ever smaller parts of the budget are tried until even
    cells without any padding could not be sooner done.

    Left out: that attention's work grows faster than tokens, which would favour smaller micro-steps.
    """
    best = _filled(lengths, budget)
    low, high = 0, FINENESS  # it takes more steps with `low` parts of the budget, and as few with `high`
    while high - low > 1:
        middle = (low + high) // 2
        steps = _filled(lengths, budget.part(middle / FINENESS), most_steps=len(best))
        if steps:
            best, high = steps, middle
        else:
            low = middle
    if overhead is None:
        return best
    without_padding = sum(lengths) * max(budget.tokens) / sum(budget.tokens)
    least = work(lengths, best, budget) + len(best) * overhead
    part, steps = high / FINENESS, best
    while steps and max(len(cell) for step in steps for cell in step) > 1:
        part *= SMALLER
        most_steps = int((least - without_padding) / overhead) if overhead else len(lengths)
        steps = _filled(lengths, budget.part(part), most_steps=most_steps)
        found = work(lengths, steps, budget) + len(steps) * overhead
        if steps and found < least:
            best, least = steps, found
    return best


def _filled(lengths: Sequence[int], budget: TokenBudget, *, most_steps: int | None = None) -> list[MicroStep]:
    """Cells filled one after the other; nothing if that takes more than `most_steps`.

    The first rank to be dealt to gets the longest samples, so every other micro-step begins with the last rank.
    """
    steps: list[MicroStep] = []
    num_ranks, start, end = len(budget.tokens), 0, len(lengths)
    while start < end:
        if most_steps is not None and len(steps) >= most_steps:
            return []
        cells = [range(0)] * num_ranks
        for rank in range(num_ranks) if len(steps) % 2 == 0 else range(num_ranks - 1, -1, -1):
            if start < end:
                size = min(budget.most_samples(rank, lengths[start]), end - start)
                cells[rank] = range(start, start + size)
                start += size
        steps.append(tuple(cells))
    return steps


def work(lengths: Sequence[int], steps: Sequence[MicroStep], budget: TokenBudget) -> float:
    """Padded tokens of each micro-step's slowest rank, summed; ranks are as fast as their budgets are large."""
    fastest = max(budget.tokens)
    return sum(
        max(_padded(lengths, cell) * fastest / tokens for cell, tokens in zip(cells, budget.tokens, strict=True))
        for cells in steps
    )


def padded_tokens(lengths: Sequence[int], steps: Sequence[MicroStep]) -> int:
    """Tokens of all cells with their padding."""
    return sum(_padded(lengths, cell) for cells in steps for cell in cells)


def _padded(lengths: Sequence[int], cell: range) -> int:
    return len(cell) * lengths[cell.start] if cell else 0
