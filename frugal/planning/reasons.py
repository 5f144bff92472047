"""Why a plan is what it is: one sentence a decision, in order of importance."""

from collections.abc import Callable
from math import ceil

from frugal.config.cluster import Cluster
from frugal.config.request import Request
from frugal.planning.search.candidate import TIE, Candidate, SearchResult
from frugal.units import format_bytes, format_seconds


def reasons(request: Request, cluster: Cluster, result: SearchResult) -> tuple[str, ...]:
    """The sentences of `Plan.why`; the last is about what binds."""
    return (
        _activation_checkpointing(request, result),
        _loss(request, result),
        _zero_stage(request, cluster, result),
        *_offload(request, result),
        _micro_batch(request, cluster, result),
    )


def _activation_checkpointing(request: Request, result: SearchResult) -> str:
    taken, mode = result.chosen, result.chosen.strategy.activation_checkpointing
    word = "on" if mode == "full" else mode
    if request.activation_checkpointing != "auto":
        return f"activation checkpointing is {word}, as asked"
    others = _alternatives(result, lambda candidate: candidate.strategy.activation_checkpointing == "off")
    if mode == "off":
        if not others or others[0].time is None or taken.time is None:
            return "activation checkpointing is off: it is not needed"
        slower = others[0].seconds - taken.seconds
        if others[0].seconds <= taken.seconds * TIE:
            return "activation checkpointing is off: it is not needed, and recomputing would gain less than 2 %"
        return (
            f"activation checkpointing is off: it is not needed, and a step would take {format_seconds(slower)} longer"
        )
    what = f"activation checkpointing is {word}{_WHAT[mode]}"
    fitting = [candidate for candidate in others if candidate.fits]
    if fitting:
        return f"{what}: without it {_batch_and_seconds(fitting[0], taken)}"
    return f"{what}: {_does_not_fit(others)} without it" if others else what


_WHAT = {
    "full": "",
    "selective": ", so that products and attention are not repeated",
    "offloaded": ", with the layers' inputs in host memory",
}


def _loss(request: Request, result: SearchResult) -> str:
    taken = result.chosen
    if request.loss != "auto":
        return f"the loss is {request.loss}, as asked"
    if taken.strategy.loss == "plain":
        return ""
    others = _alternatives(result, lambda candidate: candidate.strategy.loss)
    fitting = [candidate for candidate in others if candidate.fits]
    if fitting:
        return f"the loss is tiled: with whole logits {_batch_and_seconds(fitting[0], taken)}"
    return f"the loss is tiled: {_does_not_fit(others)} with whole logits" if others else ""


def _zero_stage(request: Request, cluster: Cluster, result: SearchResult) -> str:
    stage = result.chosen.strategy.zero_stage
    if request.zero_stage is not None:
        return f"ZeRO-{stage}, as asked"
    if cluster.world_size == 1 and result.chosen.strategy.offload_optimizer == "none":
        why = "there is nothing to split" if stage == 0 else f"it sums {request.precision} gradients in fp32"
        return f"ZeRO-{stage} on one GPU: {why}"
    others = _alternatives(result, lambda candidate: candidate.strategy.zero_stage)
    simpler = [candidate for candidate in others if candidate.strategy.zero_stage < stage]
    fitting = [candidate for candidate in simpler if candidate.fits]
    if fitting:
        return (
            f"ZeRO-{stage}: a step takes {format_seconds(result.chosen.seconds)}, with "
            f"ZeRO-{fitting[0].strategy.zero_stage} {format_seconds(fitting[0].seconds)}"
        )
    if simpler:
        return f"ZeRO-{stage}: {_does_not_fit(simpler)} with ZeRO-{simpler[0].strategy.zero_stage}"
    if request.precision != "fp32" and stage == 2:
        return f"ZeRO-2: the lowest stage that sums {request.precision} gradients in fp32"
    return f"ZeRO-{stage}: the lowest stage possible"


def _offload(request: Request, result: SearchResult) -> list[str]:
    strategy = result.chosen.strategy
    if strategy.offload_optimizer == "none":
        return []
    what = "optimizer and parameters live" if strategy.offload_parameters != "none" else "the optimizer lives"
    where = "on disk, or in host memory" if strategy.offload_optimizer == "nvme" else "in host memory"
    if request.offload != "auto":
        return [f"{what} {where}, as asked"]
    others = [candidate for candidate in result.candidates if candidate.strategy.offload_optimizer == "none"]
    others = [candidate for candidate in others if candidate.headroom_bytes is not None]
    return [f"{what} {where}: {_does_not_fit(others)} on the GPUs alone" if others else f"{what} {where}"]


def _micro_batch(request: Request, cluster: Cluster, result: SearchResult) -> str:
    candidate = result.chosen
    assert candidate.batch is not None
    batch, micro = candidate.batch, candidate.micro_batch
    if request.micro_batch is not None or request.accumulation_steps is not None:
        pinned = "micro-batch" if request.micro_batch is not None else "number of accumulation steps"
        return f"the {pinned} is as asked"
    if batch.accumulation_steps == 1:
        return "nothing binds: the whole global batch fits into one micro-step"
    if candidate.shortfall_of_next_bytes is None:
        cap = request.micro_batch_cap
        samples = candidate.largest_micro_batch
        name = "--max-samples-per-gpu" if request.max_samples_per_gpu == cap else "--max-tokens-per-gpu"
        return f"{name} binds: it allows {samples} samples at once"
    sentence = (
        f"memory binds: micro-batch {candidate.largest_micro_batch + 1} would be about "
        f"{format_bytes(candidate.shortfall_of_next_bytes)} short"
    )
    if len(cluster.kinds) > 1 and request.micro_batch_cap is None:
        if len(set(batch.micro_batch)) > 1:
            sentence += "; each kind of GPU takes what lets all of them be done together"
    elif micro < candidate.largest_micro_batch:
        steps = ceil(batch.global_batch / (candidate.largest_micro_batch * cluster.world_size))
        why = "in as many steps" if steps == batch.accumulation_steps else "into equal micro-batches at the same speed"
        sentence += f"; {candidate.largest_micro_batch} would fit, and {micro} cuts {batch.global_batch} samples {why}"
    return sentence


def _alternatives(result: SearchResult, trait: Callable[[Candidate], object]) -> list[Candidate]:
    """Options that differ from the chosen one in `trait` and offload as much: fitting and fast ones first."""
    taken = result.chosen
    others = [
        candidate
        for candidate in result.candidates
        if trait(candidate) != trait(taken)
        and candidate.headroom_bytes is not None
        and candidate.strategy.offload_optimizer == taken.strategy.offload_optimizer
        and candidate.strategy.offload_parameters == taken.strategy.offload_parameters
    ]
    return sorted(
        others, key=lambda candidate: (not candidate.fits, candidate.seconds, -(candidate.headroom_bytes or 0))
    )


def _batch_and_seconds(other: Candidate, taken: Candidate) -> str:
    """What another candidate would come to. A draft may promise too much."""
    at_most, at_least = ("at most ", "at least ") if other.is_draft else ("", "")
    return (
        f"{at_most}micro-batch {other.micro_batch} fits instead of {taken.micro_batch}, and a step takes "
        f"{at_least}{format_seconds(other.seconds)} instead of {format_seconds(taken.seconds)}"
    )


def _does_not_fit(candidates: list[Candidate]) -> str:
    """That the nearest of `candidates` does not fit, and by how much."""
    nearest = max(candidates, key=lambda candidate: candidate.headroom_bytes or 0)
    what = "one sample does" if nearest.micro_batch == 1 else f"micro-batch {nearest.micro_batch} does"
    at_least = "at least " if nearest.memory is None or nearest.is_draft else ""
    return f"{what} not fit ({at_least}{format_bytes(-(nearest.headroom_bytes or 0))} short)"
