"""Samples of different lengths, cut into micro-steps under a budget of padded tokens.

A plan is proven for `micro_batch` samples of `seq_len` tokens on each rank. A micro-batch of n samples, the longest of
l tokens, is padded to n x l. It may take the place of the proven one where

    n x max(l, shortest) <= micro_batch x seq_len

A step's memory is a sum of parts that grow with n, l, n x l and n x l x l. Under this bound n x l is never more than
was proven, nor is n x l x l <= (n x l) x seq_len. Parts that grow with n alone (a class for each sample, attention's
statistics rounded up) could be: along n x l = B the bytes are a + b B + c B l + d B / l + e l, which is convex in l, so
the most is at one of its two ends, l = seq_len and l = `shortest`. The plan was dry-run at both. Where only the first
was dry-run `shortest` is `seq_len`: no micro-batch has more samples than planned, and short ones are merely together.

What a caching allocator loses between micro-steps of different shapes is replayed (`frugal.planning.planner`)
over global batches that are drawn from the data (`drawn_runs`). The longest come first, so that later ones find blocks
that are large enough.

Left out: kernels that round lengths up.

In the plan the micro-batch sizes stay those of full-length samples, which is what its memory is proven for. It adds how
short samples may be before they no longer count by their tokens (`BatchPlan.shortest`), what a micro-step costs besides
tokens (`BatchPlan.overhead_tokens`), and what that makes of a typical global batch of the data (`Grouping`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby

import numpy as np
import numpy.typing as npt

from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.config.sample_lengths import Lengths
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Grouping, StepTime

Stretches = tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]
"""`(ends, tokens)`: for each budget fraction and first sample, the index after the micro-step's last sample and the
padded tokens of its slowest rank; shapes `(fractions, samples + 1)`."""

SMALLER = 0.95
"""The ratio of each fraction of the budget that is tried to the one before."""

EVENNESS = 0.01
"""Weight of a quadratic penalty on full micro-batches; breaks ties in favour of even ones."""

MOST_SAMPLES = 4096
"""With more samples all micro-steps get the same fraction of the budget; a choice for each would gain below 1 %."""


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """The padded `tokens` of each rank in a micro-batch, where a sample counts at least `shortest` tokens."""

    tokens: tuple[int, ...]
    shortest: int

    def __post_init__(self) -> None:
        assert self.tokens and min(self.tokens) >= 1 and self.shortest >= 1

    def most_samples(self, rank: int, longest: int) -> int:
        """Return the samples that a micro-batch of `rank` may have, the longest of `longest` tokens; at least 1."""
        return max(1, self.tokens[rank] // max(longest, self.shortest))

    def part(self, part: float) -> "TokenBudget":
        """Return a fraction of the budget, for every rank."""
        return replace(self, tokens=tuple(max(1, int(tokens * part)) for tokens in self.tokens))


MicroStep = tuple[range, ...]
"""The samples of each rank as indices into all of them, longest first; empty where it takes none."""


def grouped(lengths: Sequence[int], budget: TokenBudget, overhead: int | None = None) -> list[MicroStep]:
    """Group a global batch into micro-steps; `lengths` are the tokens of its samples, longest first.

    Each micro-batch is a range of them.

    More and smaller micro-steps pad less. `overhead` is the fixed cost of a micro-step, in tokens of the same time;
    None: the fewest micro-steps are wanted, and of these the least work. A micro-step takes as long as its slowest
    rank, so its ranks get the same fraction of their budgets. Dynamic programming from the last sample back finds the
    fractions: best(s) = min over fractions f of cost(s, f) + best(end(s, f)). For docstrings in batches of 64 and 512
    that is 5 and 2 % less than with the best fraction for all micro-steps, by this count.

    Left out: that attention's work grows faster than tokens, which would favour smaller micro-steps.
    """
    if len(lengths) > MOST_SAMPLES:
        return _alike(lengths, budget, overhead)
    parts = _parts(lengths, budget)
    ends, tokens = _micro_steps(lengths, budget, parts)
    full = max(budget.tokens)
    if overhead is None:  # more than anything else could take
        overhead = 2 * len(lengths) * lengths[0] * full // min(budget.tokens) + 1
    seconds = (tokens + EVENNESS * tokens * tokens / full + overhead).T
    ends = ends.T
    least, best = np.zeros(len(lengths) + 1), [0] * len(lengths)
    for start in range(len(lengths) - 1, -1, -1):
        remaining = seconds[start] + least[ends[start]]
        best[start] = int(remaining.argmin())
        least[start] = remaining[best[start]]
    steps: list[MicroStep] = []
    start = 0
    while start < len(lengths):
        steps.append(_step(lengths, start, budget.part(parts[best[start]]), is_odd=len(steps) % 2 == 1))
        start = int(ends[start, best[start]])
    return steps


def _parts(lengths: Sequence[int], budget: TokenBudget) -> list[float]:
    """Return fractions of the budget, until no micro-batch has more than one sample."""
    parts = [1.0]
    while parts[-1] * max(budget.tokens) >= max(lengths[-1], budget.shortest):
        parts.append(parts[-1] * SMALLER)
    return parts


def _micro_steps(lengths: Sequence[int], budget: TokenBudget, parts: Sequence[float]) -> Stretches:
    """Return the micro-step that begins with each sample and fills each fraction of the budget.

    Ranks with equal budgets are doubled: two stretches of k micro-batches, one behind the other, are one of 2 k.
    """
    end, fastest = len(lengths), max(budget.tokens)
    samples = np.asarray(lengths)
    starts = np.broadcast_to(np.arange(end + 1), (len(parts), end + 1))
    all_ranks: Stretches = starts, np.zeros(starts.shape)
    for tokens, ranks in groupby(budget.tokens):
        fitting = np.array([[max(1, int(tokens * part))] for part in parts])
        sizes = np.maximum(1, fitting // np.maximum(samples, budget.shortest))
        ends = np.pad(np.minimum(starts[:, :-1] + sizes, end), ((0, 0), (0, 1)), constant_values=end)
        padded = (ends - starts) * np.append(samples, 0) * (fastest / tokens)
        of_ranks: Stretches = ends, padded
        num_ranks = len(list(ranks))
        while num_ranks:
            if num_ranks % 2:
                all_ranks = _joined(all_ranks, of_ranks)
            num_ranks //= 2
            if num_ranks:
                of_ranks = _joined(of_ranks, of_ranks)
    return all_ranks


def _joined(first: Stretches, second: Stretches) -> Stretches:
    """Join two stretches, the second of which begins where the first ends."""
    ends, tokens = second
    most = np.maximum(first[1], np.take_along_axis(tokens, first[0], axis=1))
    return np.take_along_axis(ends, first[0], axis=1), most


def _step(lengths: Sequence[int], start: int, budget: TokenBudget, *, is_odd: bool) -> MicroStep:
    """Return the micro-step that begins with sample `start`.

    The first micro-batches have the longest samples, so in every other micro-step ranks with equal budgets change
    places.
    """
    taken: list[range] = []
    for rank in range(len(budget.tokens)):
        size = min(budget.most_samples(rank, lengths[start]), len(lengths) - start) if start < len(lengths) else 0
        taken.append(range(start, start + size))
        start += size
    if not is_odd:
        return tuple(taken)
    of_budget: dict[int, list[range]] = {}
    for tokens, samples in zip(budget.tokens, taken, strict=True):
        of_budget.setdefault(tokens, []).append(samples)
    return tuple(of_budget[tokens].pop() for tokens in budget.tokens)


def _alike(lengths: Sequence[int], budget: TokenBudget, overhead: int | None) -> list[MicroStep]:
    """Group into micro-steps with one fraction of the budget: the best, or the smallest with the fewest micro-steps."""
    best = _filled(lengths, budget)
    least = work(lengths, best, budget) + len(best) * (overhead or 0)
    for part in _parts(lengths, budget)[1:]:
        steps = _filled(lengths, budget.part(part))
        cost = work(lengths, steps, budget) + len(steps) * (overhead or 0)
        if len(steps) == len(best) or (overhead is not None and cost < least):
            best, least = steps, cost
        elif overhead is None or len(steps) * overhead > least:
            break
    return best


def _filled(lengths: Sequence[int], budget: TokenBudget) -> list[MicroStep]:
    """Group into micro-steps that fill the budget, one after the other."""
    steps: list[MicroStep] = []
    while (start := max((samples.stop for samples in steps[-1]), default=0) if steps else 0) < len(lengths):
        steps.append(_step(lengths, start, budget, is_odd=len(steps) % 2 == 1))
    return steps


def work(lengths: Sequence[int], steps: Sequence[MicroStep], budget: TokenBudget) -> float:
    """Sum the padded tokens of each micro-step's slowest rank; ranks are as fast as their budgets are large."""
    fastest = max(budget.tokens)
    return sum(
        max(_padded(lengths, samples) * fastest / tokens for samples, tokens in zip(step, budget.tokens, strict=True))
        for step in steps
    )


def padded_tokens(lengths: Sequence[int], steps: Sequence[MicroStep]) -> int:
    """Count the tokens of all micro-batches with their padding."""
    return sum(_padded(lengths, samples) for step in steps for samples in step)


def _padded(lengths: Sequence[int], samples: range) -> int:
    """Count the tokens of one micro-batch with its padding: its first sample is its longest."""
    return len(samples) * lengths[samples.start] if samples else 0


ENOUGH_STEPS = 8
"""Full micro-steps of a typical global batch that are cut for an estimate; more are estimated from these."""

SHORTEST_SHARE = 64
"""Samples shorter than this fraction of the longest count as this long: no rank takes more than this many times its
planned micro-batch."""

MANY = 64
"""Times the micro-batch at which a micro-step's fixed cost is negligible."""

StepTimeOf = Callable[[BatchPlan], StepTime]


def shortest_choices(request: Request, batch: BatchPlan) -> Iterator[int]:
    """Yield candidates for `BatchPlan.shortest`, the best first; each has to be dry-run with `most_samples`.

    No less than the data has, nor than what puts a whole global batch, or the most samples allowed, into one
    micro-batch.
    """
    lengths, seq_len = request.lengths, request.seq_len
    assert lengths is not None
    most = request.micro_batch or _samples_a_step(lengths, batch)
    least = max(lengths.tokens[0], -(-max(batch.micro_batch) * seq_len // most), -(-seq_len // SHORTEST_SHARE))
    while least < seq_len:
        yield least
        least *= 4


def _samples_a_step(lengths: Lengths, batch: BatchPlan) -> int:
    """Return the samples of a typical global batch."""
    if batch.global_tokens is None:
        return batch.global_batch
    return max(1, int(batch.global_tokens / (lengths.counted_mean or lengths.mean)))


def most_samples(micro_batch: int, seq_len: int, shortest: int) -> int:
    """Return the samples of a micro-batch that holds only the shortest."""
    return micro_batch * seq_len // shortest


def overhead_tokens(step_time: StepTimeOf, batch: BatchPlan, request: Request, cluster: Cluster) -> int:
    """Return the fixed cost of a micro-step, in tokens that could be computed in the same time.

    Its communication is what twice the micro-steps take longer, but for the work in them. Its launches are what is left
    of the smallest micro-batches' seconds when those that grow with the samples are taken off. At the least it reads
    the weights: p of them take p x bytes / (bytes/s), the time of 2 p FLOPs for each of (FLOP/s) x bytes / (2 bytes/s)
    tokens. Ranks are taken to be as fast as their micro-batches are large.
    """
    weights = max(device.matrix_flops / device.memory_bandwidth for device in cluster.devices) / 2
    least = round(weights * request.element_bytes)
    once = step_time(batch)
    caps, steps = batch.micro_batch, batch.accumulation_steps
    cut = partial(BatchPlan.of, sequence_parallel=batch.sequence_parallel)
    twice = step_time(cut(2 * batch.global_batch, caps, accumulation_steps=2 * steps))
    between = twice.total_seconds - once.total_seconds - once.compute_seconds - once.recompute_seconds
    smallest, largest = (step_time(cut(len(caps) * micro, (micro,) * len(caps))) for micro in (1, MANY * max(caps) + 1))
    one_sample, many_samples = (time.compute_seconds + time.recompute_seconds for time in (smallest, largest))
    per_sample = (many_samples - one_sample) / (MANY * max(caps))
    seconds = between / steps + max(0.0, one_sample - per_sample)
    return max(least, round(seconds / (per_sample / request.seq_len))) if per_sample > 0 else least


@lru_cache(maxsize=64)  # strategies often allow the same micro-batch
def grouping(lengths: Lengths, batch: BatchPlan, seq_len: int) -> Grouping:
    """Return the micro-steps and padding of a typical global batch of these lengths under `batch`."""
    step_samples = _samples_a_step(lengths, batch)
    num_drawn = _num_drawn(lengths, batch, seq_len)
    typical, budget = lengths.typical(num_drawn), _budget(batch, seq_len)
    steps = grouped(typical, budget, batch.overhead_tokens)
    tokens, fixed = sum(typical), lengths.expected_longest(max(batch.micro_batch)) / lengths.mean
    return Grouping(
        num_samples=lengths.num_samples,
        num_tokens=lengths.num_tokens,
        median=lengths.quantile(0.5),
        percentile_99=lengths.quantile(0.99),
        longest=lengths.longest,
        source=lengths.source,
        step_samples=step_samples,
        step_tokens=round(lengths.mean * step_samples),
        micro_steps=-(-len(steps) * step_samples // num_drawn),
        padding=padded_tokens(typical, steps) / tokens - 1,
        fixed_padding=fixed - 1,
        full_share=work(typical, steps, budget) / (len(steps) * max(budget.tokens)),
    )


def _num_drawn(lengths: Lengths, batch: BatchPlan, seq_len: int) -> int:
    """Return the samples of a global batch, or as many of a huge one as are enough to see how it is cut."""
    enough = max(512, int(ENOUGH_STEPS * sum(batch.micro_batch) * seq_len / lengths.mean))
    return min(_samples_a_step(lengths, batch), enough)


def _budget(batch: BatchPlan, seq_len: int) -> TokenBudget:
    return TokenBudget(tokens=tuple(cap * seq_len for cap in batch.micro_batch), shortest=batch.shortest or seq_len)


DRAWS, DRAWN_MICRO_STEPS = 3, 24
"""Runs that are drawn from the data, and the micro-steps of each. What an allocator keeps depends on their order, so
more of them would find other peaks, too; of GPT-2's those of 256 micro-steps are no higher than those of 24."""

Shape = tuple[int, int]
"""The samples of a micro-batch, and the tokens that each is padded to."""

DrawnRun = list[list[tuple[Shape, ...]]]
"""The micro-steps of each optimizer step, with the shape of each rank's micro-batch."""


def drawn_runs(lengths: Lengths, batch: BatchPlan, seq_len: int) -> list[DrawnRun]:
    """Draw short runs from the data, cut into micro-steps as `frugal train` does it.

    Samples come at random, since batches of one mean would need less than those of data; the longest is in the last
    global batch of each run, when the allocator has segments for shorter ones. Of a global batch that takes many
    micro-steps `ENOUGH_STEPS` are kept, evenly spread.
    """
    number, budget = _num_drawn(lengths, batch, seq_len), _budget(batch, seq_len)
    num_steps = max(2, DRAWN_MICRO_STEPS // min(ENOUGH_STEPS, grouping(lengths, batch, seq_len).micro_steps))
    runs = []
    for run in range(DRAWS):
        drawn = [lengths.drawn(number, run * num_steps + step) for step in range(num_steps)]
        drawn[-1][0] = lengths.longest
        runs.append([_shapes(sorted(samples, reverse=True), budget, batch.overhead_tokens) for samples in drawn])
    return runs


def _shapes(lengths: Sequence[int], budget: TokenBudget, overhead: int | None) -> list[tuple[Shape, ...]]:
    """Return the shapes of a global batch's micro-batches; a rank without samples runs one, a short one."""
    steps = grouped(lengths, budget, overhead)
    kept = [steps[i * len(steps) // ENOUGH_STEPS] for i in range(ENOUGH_STEPS)] if len(steps) > ENOUGH_STEPS else steps
    return [
        tuple((len(samples), lengths[samples.start]) if samples else (1, lengths[-1]) for samples in step)
        for step in kept
    ]


def time_of(step_time: StepTimeOf, batch: BatchPlan, grouping: Grouping) -> StepTime:
    """Return the seconds of a step on the data: its number of micro-steps, and the work that is in them.

    Left out: that attention's work grows faster than tokens, so short samples take less than this; launches, where
    the work of a micro-step is less than they take.
    """
    full = step_time(
        BatchPlan.of(
            grouping.micro_steps * sum(batch.micro_batch),
            batch.micro_batch,
            accumulation_steps=grouping.micro_steps,
            sequence_parallel=batch.sequence_parallel,
        )
    )
    return replace(
        full,
        compute_seconds=full.compute_seconds * grouping.full_share,
        recompute_seconds=full.recompute_seconds * grouping.full_share,
        total_seconds=full.total_seconds - (full.compute_seconds + full.recompute_seconds) * (1 - grouping.full_share),
    )
