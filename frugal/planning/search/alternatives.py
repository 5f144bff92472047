"""What a run may try in its first steps: other ways to take the same optimizer steps, each proven to fit.

The gradient of a global batch does not depend on how it is cut, so a step in another way is a step as good. Of all that
the search weighs, these can change between two steps of one engine: the micro-batches, the mode of activation
checkpointing, and whether the loss is tiled. ZeRO stage, offloading and buckets stay: the engine was made for them.

An alternative is predicted to take at most `NEAR` times the plan's seconds, and its own profile, with the allocator
replayed, says that it fits, with room for what the plan's profile was below its dry run. What is pinned is not varied.
Where the gradient does depend on the cut (dropout's masks, statistics of a micro-batch), the micro-batches stay the
plan's. Where samples have different lengths, an alternative must fit at both ends of what its micro-batches may hold:
few samples of full length, and many of the shortest (`frugal.planning.length_bucketing`).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from frugal.errors import RequestError
from frugal.planning import length_bucketing
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import Alternative, Plan
from frugal.planning.report import DROPOUT, PADDING_MATTERS, SPLIT_MATTERS
from frugal.planning.search.candidate import OpenSource
from frugal.planning.strategy import Strategy

if TYPE_CHECKING:
    from frugal.planning.search.search import Search

NEAR = 1.25
"""Times the plan's predicted seconds: predictions are not further off than that, see `bench.planning.choice`."""

MOST = 8
"""Alternatives of one plan."""

CUTS = (1, 2, 4)
"""How many times smaller micro-batches than those that fit are varied."""

LEAST_STEPS, LEAST_SECONDS = 200, 300.0
"""Runs of fewer optimizer steps, or of less predicted time, are not tuned: they could not win back what it takes."""

EXCESS = 1.01
"""Times a profile's bytes that a dry run is trusted to take at most, see `frugal.planning.search.search.TRUST`."""

JSON_ALONE = "ds_config.json alone"
"""How the warning begins that is about the plan's own micro-batches."""


def is_worth_it(plan: Plan, steps: float) -> bool:
    """Whether a run of so many optimizer steps may win more by tuning than it costs."""
    return steps >= LEAST_STEPS and steps * plan.time.total_seconds >= LEAST_SECONDS


def depends_on_cut(plan: Plan) -> bool:
    """Whether other micro-batches would train otherwise, beyond the last bits of sums."""
    return any(note.startswith((DROPOUT, SPLIT_MATTERS, PADDING_MATTERS)) for note in plan.warnings)


def find(search: "Search", plan: Plan, open_source: OpenSource) -> tuple[Alternative, ...]:
    """The plan's alternatives, fastest by prediction first. `search` is one of the plan's own request and cluster."""
    alternatives = {
        (each.strategy, each.batch.micro_batch): each
        for strategy in _strategies(search, plan)
        for batch in _batches(search, plan, strategy)
        for each in _proven(search, plan, strategy, batch, open_source)
    }
    alternatives.pop((plan.strategy, plan.batch.micro_batch), None)
    by_time = sorted(alternatives.values(), key=lambda each: (each.time.total_seconds, each.strategy.num_mechanisms))
    return tuple(by_time[:MOST])


def _strategies(search: "Search", plan: Plan) -> Iterator[Strategy]:
    """The plan's own strategy, then those that one engine can change to, as far as they could be fast enough.

    What the engine was made for stays the plan's, also where the search comes to it by a way of its own: a share of the
    optimizer in host memory, parameters kept within nodes, small buckets, a tiled MLP.
    """
    own = plan.strategy
    yield own
    search.evaluation.evaluate(own)  # so that the work of a step is known
    is_tiled = own.mlp == "tiled"
    allowed = (each for level in search.levels for each in search.strategies(level, tiled_mlp=is_tiled))
    for strategy in dict.fromkeys(_made_alike(own, each) for each in allowed):
        if strategy != own and search.evaluation.best_case(strategy).seconds <= NEAR * plan.time.total_seconds:
            yield strategy


def _made_alike(own: Strategy, other: Strategy) -> Strategy:
    """`own` with what a running engine can change as in `other`."""
    return replace(
        own, activation_checkpointing=other.activation_checkpointing, layer_modes=other.layer_modes, loss=other.loss
    )


def _batches(search: "Search", plan: Plan, strategy: Strategy) -> Iterator[BatchPlan]:
    """Cuts of the global batch to try with a strategy: what fits, and smaller ones."""
    request, most = plan.request, plan.batch.micro_batch
    if depends_on_cut(plan):
        yield plan.batch
        return
    if strategy != plan.strategy:
        try:
            candidate = search.evaluation.evaluate(strategy)
        except RequestError:  # the model cannot take the tiled loss
            return
        if candidate.batch is None:
            return
        yield replace(candidate.batch, shortest=plan.batch.shortest, overhead_tokens=plan.batch.overhead_tokens)
        most = candidate.batch.micro_batch
    if request.micro_batch is not None or request.accumulation_steps is not None:
        return
    for cut in CUTS:
        batch = BatchPlan.of(
            plan.batch.global_batch, [max(1, micro // cut) for micro in most], plan.batch.global_tokens,
            sequence_parallel=plan.batch.sequence_parallel,
        ).tightened()  # fmt: skip
        lacks_samples = request.batch_norm == "sync" and any(0 in sizes for sizes in batch.sizes)
        if (batch.is_uniform or not request.even) and not lacks_samples:
            yield replace(batch, shortest=plan.batch.shortest, overhead_tokens=plan.batch.overhead_tokens)


def _proven(
    search: "Search", plan: Plan, strategy: Strategy, batch: BatchPlan, open_source: OpenSource
) -> Iterator[Alternative]:
    """The alternative, if it is near the plan's time and fits."""
    evaluation, accumulates = search.evaluation, batch.accumulation_steps > 1
    is_offloaded = strategy.offload_optimizer != "none"
    if is_offloaded and accumulates != (plan.batch.accumulation_steps > 1):
        return  # DeepSpeed makes its buffers on the host for the one or the other
    try:
        profile = search.source.profile(strategy, accumulates or plan.request.lengths is not None)
        time = evaluation.time(profile, strategy, batch)
        if time.total_seconds > NEAR * plan.time.total_seconds:
            return
        loads = evaluation.fitting.loads(batch)
        memories = [profile.memory(micro, device) for device, micro in loads]
        if batch.shortest is not None:
            memories += _of_shortest(search, plan, strategy, batch, open_source)
    except RequestError:  # as above; or it cannot read samples that short
        return
    memory = min(memories, key=lambda each: each.headroom_bytes)
    is_within = memory.total_bytes * _excess(search, plan) <= memory.usable_bytes + memory.context
    if memory.fits and is_within and evaluation.fitting.host_shortfall_bytes(memory) <= 0:
        yield Alternative(strategy=strategy, batch=batch, memory=memory, time=time)


def _of_shortest(
    search: "Search", plan: Plan, strategy: Strategy, batch: BatchPlan, open_source: OpenSource
) -> list[MemoryBreakdown]:
    """What micro-batches take that hold nothing but the shortest samples. Of the plan's own strategy: less than proven.

    Raises:
        RequestError: the model cannot read samples that short.
    """
    assert batch.shortest is not None
    if strategy == plan.strategy:
        return [plan.memory]
    short = replace(plan.request, seq_len=batch.shortest, lengths=None)
    with open_source(short, plan.cluster) as source:
        profile = source.profile(strategy, True)
        return [
            profile.memory(length_bucketing.most_samples(micro, plan.request.seq_len, batch.shortest), device)
            for device, micro in search.evaluation.fitting.loads(batch)
        ]


def _excess(search: "Search", plan: Plan) -> float:
    """How many times more the plan's dry run took than its profile says; at least 1."""
    if plan.request.lengths is not None:  # of which end the plan's memory is, it does not say
        return EXCESS
    profile = search.source.profile(plan.strategy, plan.batch.accumulation_steps > 1)
    of_profile = max(
        profile.memory(micro, device).total_bytes for device, micro in search.evaluation.fitting.loads(plan.batch)
    )
    return max(1.0, plan.memory.total_bytes / of_profile)


def changed_to(plan: Plan, alternative: Alternative) -> Plan:
    """The plan of a run that goes on as `alternative` says."""
    request, batch = plan.request, alternative.batch
    notes = [note for note in plan.warnings if not note.startswith(JSON_ALONE)]
    if not batch.is_uniform:
        notes.append(
            f"{JSON_ALONE} trains {batch.capacity} samples a step, not {batch.global_batch}: DeepSpeed's JSON knows no "
            "uneven micro-batches, plan.json does"
        )
    return replace(
        plan,
        strategy=alternative.strategy,
        batch=batch,
        memory=alternative.memory,
        time=alternative.time,
        warnings=tuple(notes),
        grouping=None
        if request.lengths is None
        else length_bucketing.grouping(request.lengths, batch, request.seq_len),
        alternatives=(),
        tuned_from=plan.digest,
    ).sealed()
