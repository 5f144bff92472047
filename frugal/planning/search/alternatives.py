"""Alternatives of a plan: other ways to take the same optimizer steps, which a run may try in its first steps.

The gradient of a global batch does not depend on how it is cut, so a step taken in another way is as good. Of all that
the search weighs, three things can change between two steps of one engine: the micro-batches, the mode of activation
checkpointing, and whether the loss is tiled.

An alternative is predicted to take at most `NEAR` times the plan's seconds, and was dry-run like the plan: it fits.
Pinned settings are not varied. Where the gradient does depend on the cut (dropout's masks, statistics of a
micro-batch), the micro-batches stay the plan's. Where samples have different lengths, an alternative must fit at both
ends of what its micro-batches may hold: few samples of full length, and many of the shortest.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from frugal.errors import RequestError
from frugal.planning import length_bucketing
from frugal.planning.batch import BatchPlan
from frugal.planning.plan import Alternative, Plan
from frugal.planning.report import DRAWS, DROPOUT, PADDING_MATTERS, SPLIT_MATTERS
from frugal.planning.search.candidate import OpenSource
from frugal.planning.strategy import Strategy

if TYPE_CHECKING:
    from frugal.planning.search.search import Search

NEAR = 1.25
"""Times the plan's predicted seconds: predictions are not further off than that, see `bench.planning.choice`."""

MOST = 8
"""Alternatives of one plan."""

CUTS = (1, 2, 4)
"""Divisors of the largest micro-batches that fit."""

LEAST_STEPS, LEAST_SECONDS = 200, 300.0
"""Shorter runs, in optimizer steps or predicted seconds, are not tuned: tuning would cost more than it could gain."""

JSON_ALONE = "ds_config.json alone"
"""The beginning of the warning about the plan's own micro-batches."""


def is_worth_it(plan: Plan, steps: float) -> bool:
    """Return whether a run of `steps` optimizer steps may gain more by tuning than it costs."""
    return steps >= LEAST_STEPS and steps * plan.time.total_seconds >= LEAST_SECONDS


def find(search: "Search", plan: Plan, open_source: OpenSource) -> tuple[Alternative, ...]:
    """Return the plan's alternatives, fastest by prediction first. `search`: of the plan's own request and cluster."""
    alternatives = {
        (each.strategy, each.batch.micro_batch): each
        for strategy in _strategies(search, plan)
        for batch in _batches(search, plan, strategy)
        for each in _near(search, plan, strategy, batch)
    }
    alternatives.pop((plan.strategy, plan.batch.micro_batch), None)
    by_time = sorted(alternatives.values(), key=lambda each: (each.time.total_seconds, each.strategy.num_mechanisms))
    return tuple(islice((dry_run for each in by_time for dry_run in _dry_run(search, each, open_source)), MOST))


def _strategies(search: "Search", plan: Plan) -> Iterator[Strategy]:
    """Yield the plan's strategy, then those that its engine can change to and that may be fast enough.

    All else that the engine was made for stays the plan's.
    """
    own = plan.strategy
    yield own
    search.evaluation.evaluate(own)  # so that the work of a step is known
    is_tiled = own.mlp == "tiled"
    allowed = (each for level in search.levels for each in search.strategies(level, tiled_mlp=is_tiled))
    changed = (
        replace(
            own, activation_checkpointing=each.activation_checkpointing, layer_modes=each.layer_modes, loss=each.loss
        )
        for each in allowed
    )
    for strategy in dict.fromkeys(changed):
        if strategy != own and search.evaluation.best_case(strategy).seconds <= NEAR * plan.time.total_seconds:
            yield strategy


def _batches(search: "Search", plan: Plan, strategy: Strategy) -> Iterator[BatchPlan]:
    """Yield the cuts of the global batch to try with a strategy: the largest micro-batches that fit, and smaller."""
    request, own = plan.request, plan.batch
    if any(note.startswith((DROPOUT, DRAWS, SPLIT_MATTERS, PADDING_MATTERS)) for note in plan.warnings):
        yield own
        return
    most = own.micro_batch
    if strategy != plan.strategy:
        try:
            candidate = search.evaluation.evaluate(strategy)
        except RequestError:  # the model cannot take the tiled loss
            return
        if candidate.batch is None:
            return
        yield replace(candidate.batch, shortest=own.shortest, overhead_tokens=own.overhead_tokens)
        most = candidate.batch.micro_batch
    if request.micro_batch is not None or request.accumulation_steps is not None:
        return
    for cut in CUTS:
        batch = BatchPlan.of(
            own.global_batch, [max(1, micro // cut) for micro in most], own.global_tokens,
            sequence_parallel=own.sequence_parallel,
        ).tightened()  # fmt: skip
        lacks_samples = request.batch_norm == "sync" and any(0 in sizes for sizes in batch.sizes)
        if (batch.is_uniform or not request.even) and not lacks_samples:
            yield replace(batch, shortest=own.shortest, overhead_tokens=own.overhead_tokens)


def _near(search: "Search", plan: Plan, strategy: Strategy, batch: BatchPlan) -> Iterator[Alternative]:
    """Yield the alternative if it is near the plan's time and fits by its profile."""
    evaluation, accumulates = search.evaluation, batch.accumulation_steps > 1
    if strategy.offload_optimizer != "none" and accumulates != (plan.batch.accumulation_steps > 1):
        return  # DeepSpeed makes its buffers on the host for one or the other
    try:
        profile = search.source.profile(strategy, accumulates or plan.request.lengths is not None)
    except RequestError:  # the model cannot take the tiled loss
        return
    time = evaluation.time(profile.costs, strategy, batch)
    if time.total_seconds > NEAR * plan.time.total_seconds:
        return
    memories = (profile.memory(micro, device) for device, micro in evaluation.fitting.loads(batch))
    memory = min(memories, key=lambda each: each.headroom_bytes)
    if memory.fits:
        yield Alternative(strategy=strategy, batch=batch, memory=memory, time=time)


def _dry_run(search: "Search", other: Alternative, open_source: OpenSource) -> Iterator[Alternative]:
    """Yield the alternative with the memory of its dry runs, if that fits."""
    evaluation = search.evaluation
    memory = evaluation.dry_run(other.strategy, other.batch)
    if other.batch.shortest is not None:
        try:
            of_shortest = evaluation.dry_run_of_shortest(other.strategy, other.batch, open_source)
        except RequestError:  # the model cannot read samples that short
            return
        memory = min(memory, of_shortest, key=lambda each: each.headroom_bytes)
    if memory.fits and evaluation.fitting.host_shortfall_bytes(memory) <= 0:
        yield replace(other, memory=memory)


def change_to(plan: Plan, alternative: Alternative) -> Plan:
    """Return the plan of a run that continues as `alternative` says."""
    request, batch = plan.request, alternative.batch
    notes = [note for note in plan.warnings if not note.startswith(JSON_ALONE)]
    if not batch.is_uniform:
        notes.append(
            f"{JSON_ALONE} trains {batch.capacity} samples a step, not {batch.global_batch}: DeepSpeed's JSON knows no "
            "uneven micro-batches, plan.json does"
        )
    lengths, seq_len = request.lengths, request.seq_len
    grouping = None if lengths is None else length_bucketing.grouping(lengths, batch, seq_len)
    return replace(
        plan, strategy=alternative.strategy, batch=batch, memory=alternative.memory, time=alternative.time,
        warnings=tuple(notes), grouping=grouping, alternatives=(), tuned_from=plan.digest,
    ).sealed()  # fmt: skip
