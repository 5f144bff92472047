"""A plan for samples of different lengths: what a typical global batch comes to, and which micro-batches are proven.

The plan's cells stay those of full-length samples, which is what its memory is proven for. What is added: how short
samples may be before they no longer count by their tokens (`Batch.shortest`), what a micro-step costs besides tokens
(`Batch.overhead_tokens`), and what that makes of the data (`Grouping`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

from frugal.planning.cluster import Cluster
from frugal.planning.grouping import TokenBudget, grouped, padded_tokens, work
from frugal.planning.lengths import Lengths
from frugal.planning.plan import Batch, Grouping, StepTime
from frugal.planning.request import Request

ENOUGH_STEPS = 8
"""Full micro-steps of a typical global batch that are cut for an estimate; larger ones are estimated from a part."""

SHORTEST_SHARE = 64
"""Samples shorter than this part of the longest count as this long: no cell has more times the micro-batch."""

MANY = 64
"""Times the micro-batch at which a micro-step's fixed cost is nothing beside its work."""

StepTimeOf = Callable[[Batch], StepTime]


def shortest_choices(request: Request, batch: Batch) -> Iterator[int]:
    """What `Batch.shortest` could be, the best first; each has to be rehearsed with `most_samples`.

    No less than the data has, nor than what puts a whole global batch, or the most samples allowed, into one cell.
    """
    lengths, seq_len = request.lengths, request.seq_len
    assert lengths is not None
    caps = [cap for cap in (request.micro_batch, request.max_samples_per_gpu) if cap is not None]
    most = min(caps, default=_samples_a_step(lengths, batch))
    least = max(lengths.tokens[0], -(-max(batch.micro_batch) * seq_len // most), -(-seq_len // SHORTEST_SHARE))
    while least < seq_len:
        yield least
        least *= 4


def _samples_a_step(lengths: Lengths, batch: Batch) -> int:
    """Of a typical global batch."""
    if batch.global_tokens is None:
        return batch.global_batch
    return max(1, int(batch.global_tokens / (lengths.counted_mean or lengths.mean)))


def most_samples(micro_batch: int, seq_len: int, shortest: int) -> int:
    """The samples of a cell that holds nothing but the shortest."""
    return micro_batch * seq_len // shortest


def overhead_tokens(step_time: StepTimeOf, batch: Batch, request: Request, cluster: Cluster) -> int:
    """What a micro-step takes besides its tokens, in tokens that could be computed in the same time.

    Its communication is what twice the micro-steps take longer, but for the work in them. Its launches are what is
    left of the smallest cells' seconds when those that grow with the cells are taken off. At the least it reads the
    weights: p of them take p x bytes / (bytes/s), the time of 2 p FLOPs for each of (FLOP/s) x bytes / (2 bytes/s)
    tokens. Ranks are taken to be as fast as their cells are large.
    """
    weights = max(device.matrix_flops / device.memory_bandwidth for device in cluster.devices) / 2
    least = round(weights * (4 if request.precision == "fp32" else 2))
    once = step_time(batch)
    caps, steps = batch.micro_batch, batch.accumulation_steps
    twice = step_time(Batch.of(2 * batch.global_batch, caps, accumulation_steps=2 * steps))
    between = twice.total_seconds - once.total_seconds - once.compute_seconds - once.recompute_seconds
    smallest, largest = (
        step_time(Batch.of(len(caps) * cell, (cell,) * len(caps))) for cell in (1, MANY * max(caps) + 1)
    )
    a_cell, many_cells = (time.compute_seconds + time.recompute_seconds for time in (smallest, largest))
    each = (many_cells - a_cell) / (MANY * max(caps))
    seconds = between / steps + max(0.0, a_cell - each)
    return max(least, round(seconds / (each / request.seq_len))) if each > 0 else least


@lru_cache(maxsize=64)  # strategies often allow the same micro-batch
def grouping(lengths: Lengths, batch: Batch, seq_len: int) -> Grouping:
    """What a typical global batch of these lengths comes to under `batch`."""
    wanted = _samples_a_step(lengths, batch)
    number = min(wanted, max(512, int(ENOUGH_STEPS * sum(batch.micro_batch) * seq_len / lengths.mean)))
    typical = lengths.typical(number)
    budget = TokenBudget(tokens=tuple(cap * seq_len for cap in batch.micro_batch), shortest=batch.shortest or seq_len)
    steps = grouped(typical, budget, batch.overhead_tokens)
    tokens, fixed = sum(typical), lengths.expected_longest(max(batch.micro_batch)) / lengths.mean
    return Grouping(
        num_samples=lengths.num_samples,
        num_tokens=lengths.num_tokens,
        median=lengths.quantile(0.5),
        percentile_99=lengths.quantile(0.99),
        longest=lengths.longest,
        source=lengths.source,
        step_samples=wanted,
        step_tokens=round(lengths.mean * wanted),
        micro_steps=-(-len(steps) * wanted // number),
        padding=padded_tokens(typical, steps) / tokens - 1,
        fixed_padding=fixed - 1,
        full_share=work(typical, steps, budget) / (len(steps) * max(budget.tokens)),
    )


def time_of(step_time: StepTimeOf, batch: Batch, found: Grouping) -> StepTime:
    """Seconds of a step on the data: as many micro-steps as it takes, and the work that is in them.

    Left out: that attention's work grows faster than tokens, so short samples take less than this; launches, where
    the work of a micro-step is less than they take.
    """
    full = step_time(
        Batch.of(found.micro_steps * sum(batch.micro_batch), batch.micro_batch, accumulation_steps=found.micro_steps)
    )
    parts = replace(
        full,
        compute_seconds=full.compute_seconds * found.full_share,
        recompute_seconds=full.recompute_seconds * found.full_share,
        total_seconds=full.total_seconds - (full.compute_seconds + full.recompute_seconds) * (1 - found.full_share),
    )
    return parts


def best(request: Request, cluster: Cluster, batch: Batch, step_time: StepTimeOf) -> Batch:
    """`batch` with the best that could be proven of it."""
    shortest = next(shortest_choices(request, batch), None)
    return replace(batch, shortest=shortest, overhead_tokens=overhead_tokens(step_time, batch, request, cluster))
