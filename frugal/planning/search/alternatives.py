"""What a run may try in its first steps: other ways to take the same optimizer steps, each proven to fit.

The gradient of a global batch does not depend on how it is cut, so a step in another way is a step as good. Of all that
the search weighs, these can change between two steps of one engine: the micro-batches, the mode of activation
checkpointing, and whether the loss is tiled. ZeRO stage, offloading and buckets need another engine, and so another
process (`frugal.training.measure.engine_trial`): of these one alternative is looked for, where the run is long enough.

An alternative is predicted to take at most `NEAR` times the plan's seconds, and was dry-run like the plan: it fits.
What is pinned is not varied. Where the gradient does depend on the cut (dropout's masks, statistics of a micro-batch),
the micro-batches stay the plan's. Where samples have different lengths, an alternative must fit at both ends of what
its micro-batches may hold: few samples of full length, and many of the shortest; and what a micro-step is taken to cost
besides its tokens is varied, too, which only changes how samples are grouped (`frugal.planning.length_bucketing`).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
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

TRIAL_SHARE = 0.02
"""Of the rest of a run that the trial of another engine may take at most, counting two restarts: there and back."""

RESTART_SECONDS = 10.0
"""That a restart takes at least: a process that imports torch and DeepSpeed, data, model, engine."""

MOST_EVALUATED = 4
"""Strategies of another engine that are evaluated, those with the best bounds."""

OVERHEADS = (0.25, 4.0)
"""Times the predicted cost of a micro-step besides its tokens that are tried: less of it pads less, in more of them."""

JSON_ALONE = "ds_config.json alone"
"""How the warning begins that is about the plan's own micro-batches."""


def is_worth_it(plan: Plan, steps: float) -> bool:
    """Whether a run of so many optimizer steps may win more by tuning than it costs."""
    return steps >= LEAST_STEPS and steps * plan.time.total_seconds >= LEAST_SECONDS


def other_engine_may_pay(plan: Plan, steps: float) -> bool:
    """Whether a run of so many optimizer steps is long enough to try another engine in it.

    Left out: several nodes, whose hosts would have to agree on a start without a launcher; and states that no other
    layout can read.
    """
    is_long = TRIAL_SHARE * steps * plan.time.total_seconds >= 2 * RESTART_SECONDS
    return is_long and len(plan.cluster.nodes) == 1 and _can_be_resharded(plan, plan.strategy)


def _can_be_resharded(plan: Plan, strategy: Strategy) -> bool:
    on_disk = "nvme" in (strategy.offload_optimizer, strategy.offload_parameters)
    return not on_disk and plan.request.optimizer != "adamw-8bit"


def needs_other_engine(plan: Plan, alternative: Alternative) -> bool:
    """Whether the plan's engine cannot change to it."""
    return _made_alike(plan.strategy, alternative.strategy) != alternative.strategy


def depends_on_cut(plan: Plan) -> bool:
    """Whether other micro-batches would train otherwise, beyond the last bits of sums."""
    return any(note.startswith((DROPOUT, SPLIT_MATTERS, PADDING_MATTERS)) for note in plan.warnings)


def find(search: "Search", plan: Plan, open_source: OpenSource) -> tuple[Alternative, ...]:
    """The plan's alternatives, fastest by prediction first. `search` is one of the plan's own request and cluster."""
    alternatives = {
        (each.strategy, each.batch.micro_batch, each.batch.overhead_tokens): each
        for strategy in _strategies(search, plan)
        for batch in _batches(search, plan, strategy)
        for each in _near(search, plan, strategy, batch)
    }
    alternatives.pop((plan.strategy, plan.batch.micro_batch, plan.batch.overhead_tokens), None)
    by_time = sorted(alternatives.values(), key=lambda each: (each.time.total_seconds, each.strategy.num_mechanisms))
    proven = (dry_run for each in by_time for dry_run in _dry_run(search, plan, each, open_source))
    return tuple(islice(proven, MOST))


def find_of_other_engine(search: "Search", plan: Plan, open_source: OpenSource) -> tuple[Alternative, ...]:
    """The fastest by prediction of another ZeRO stage, offloading or size of buckets that was dry-run and fits, if any.

    What decides about sums stays: the type in which gradients are accumulated. So do sequence parallelism, a tiled MLP,
    and how segments grow.
    """
    own, evaluation, most = plan.strategy, search.evaluation, NEAR * plan.time.total_seconds
    evaluation.evaluate(own)
    allowed = (
        each
        for level in search.levels
        for small in (False, True)
        for each in search.strategies(level, small_buckets=small, tiled_mlp=own.mlp == "tiled")
    )
    kept = ("gradient_accumulation_dtype", "sequence_parallel", "mlp", "expandable_segments")
    others = {
        each: evaluation.best_case(each).seconds
        for each in allowed
        if _made_alike(own, each) != each
        and _can_be_resharded(plan, each)
        and all(getattr(each, name) == getattr(own, name) for name in kept)
    }
    near = [
        each for each in sorted(others, key=lambda each: (others[each], each.num_mechanisms)) if others[each] <= most
    ]
    evaluated = [
        each
        for strategy in near[:MOST_EVALUATED]
        for batch in _batches(search, plan, strategy)
        for each in _near(search, plan, strategy, batch)
    ]
    evaluated.sort(key=lambda each: (each.time.total_seconds, each.strategy.num_mechanisms))
    proven = (dry_run for each in evaluated for dry_run in _dry_run(search, plan, each, open_source))
    return tuple(islice(proven, 1))


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
    if strategy == plan.strategy:
        yield from _other_groups(plan)
    else:
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


def _other_groups(plan: Plan) -> Iterator[BatchPlan]:
    """The plan's own micro-batches, filled in other ways, where that changes anything for a typical global batch."""
    batch, lengths, seq_len = plan.batch, plan.request.lengths, plan.request.seq_len
    if lengths is None or batch.overhead_tokens is None:
        return
    known = {length_bucketing.grouping(lengths, batch, seq_len)}
    for times in OVERHEADS:
        other = replace(batch, overhead_tokens=max(1, round(times * batch.overhead_tokens)))
        grouping = length_bucketing.grouping(lengths, other, seq_len)
        if grouping not in known:
            known.add(grouping)
            yield other


def _near(search: "Search", plan: Plan, strategy: Strategy, batch: BatchPlan) -> Iterator[Alternative]:
    """The alternative, if it is near the plan's time and its profile says that it fits."""
    evaluation, accumulates = search.evaluation, batch.accumulation_steps > 1
    is_offloaded = strategy.offload_optimizer != "none" and _made_alike(plan.strategy, strategy) == strategy
    if is_offloaded and accumulates != (plan.batch.accumulation_steps > 1):
        return  # DeepSpeed makes its buffers on the host for the one or the other
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


def _dry_run(search: "Search", plan: Plan, other: Alternative, open_source: OpenSource) -> Iterator[Alternative]:
    """The alternative with what its dry runs take, if that fits."""
    evaluation, strategy, batch = search.evaluation, other.strategy, other.batch
    if (strategy, batch.micro_batch) == (plan.strategy, plan.batch.micro_batch):
        yield replace(other, memory=plan.memory)
        return
    steps = max(batch.accumulation_steps, 1 if plan.request.lengths is None else 2)
    loads = evaluation.fitting.loads(batch)
    memories = [search.source.dry_run(strategy, micro, steps, device) for device, micro in loads]
    if batch.shortest is not None:
        try:
            memories += _of_shortest(search, plan, other, steps, open_source)
        except RequestError:  # the model cannot read samples that short
            return
    memory = min(memories, key=lambda each: each.headroom_bytes)
    if memory.fits and evaluation.fitting.host_shortfall_bytes(memory) <= 0:
        yield replace(other, memory=memory)


def _of_shortest(
    search: "Search", plan: Plan, other: Alternative, steps: int, open_source: OpenSource
) -> list[MemoryBreakdown]:
    """What micro-batches take that hold nothing but the shortest samples.

    Raises:
        RequestError: the model cannot read samples that short.
    """
    seq_len, shortest = plan.request.seq_len, other.batch.shortest
    assert shortest is not None
    with open_source(replace(plan.request, seq_len=shortest, lengths=None), plan.cluster) as source:
        return [
            source.dry_run(other.strategy, length_bucketing.most_samples(micro, seq_len, shortest), steps, device)
            for device, micro in search.evaluation.fitting.loads(other.batch)
        ]


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
