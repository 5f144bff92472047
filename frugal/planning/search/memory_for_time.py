"""An optimizer partly in host memory: a share of its update stays on the device, for a shorter step.

That share adds bytes to what lives on a device throughout a step. So the draft of a strategy with the whole optimizer
on the host says which micro-batches fit beside them, and arithmetic alone finds the fastest share. Left out: what the
allocator wastes, and sequence parallelism.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from frugal.errors import RequestError
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.search.candidate import Candidate, fastest_seconds
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.strategy import RATIOS, Offload, Strategy, in_part, share_on_host

FASTEST = 2
"""Shares that are evaluated; the arithmetic is hardly ever wrong."""

WORTH_A_COMPILER = 1.1
"""How many times faster a share on the device must make a step: DeepSpeed's CPU Adam, which it needs, is compiled on
each host, while torch's, which updates all of an optimizer in host memory, needs nothing."""


def drafts(evaluation: StrategyEvaluation, level: Offload, before: Sequence[Candidate]) -> list[Candidate]:
    """Return drafts of partial offloading that could win over the candidates evaluated `before`."""
    request, number = evaluation.request, evaluation.facts.trainable_parameters
    can_split = request.optimizer.why_not_in_part is None
    on_gpus = evaluation.cluster.devices[0].kind == "cuda"
    if level != "optimizer" or request.offload_ratio is not None or not can_split or not on_gpus:
        return []
    if not evaluation.work or request.zero_stage not in (None, 3):
        return []
    timed = sorted(_faster_shares(evaluation, before), key=lambda each: each[0])
    shares = [part for _, part in timed[:FASTEST]]
    for part in shares[:1]:  # more on the host, where the allocator wastes what the fastest needs
        more = in_part(part, part.offload_ratio + RATIOS[0], number, evaluation.cluster.world_size)
        if more.offload_ratio < 1 and more not in shares:
            shares.append(more)
    return [draft for share in shares if (draft := evaluation.draft(share)) is not None]


def _faster_shares(evaluation: StrategyEvaluation, before: Sequence[Candidate]) -> Iterator[tuple[float, Strategy]]:
    """Yield shares that make a step shorter by enough, with its seconds by arithmetic."""
    request, number = evaluation.request, evaluation.facts.trainable_parameters
    world_size = evaluation.cluster.world_size
    element_bytes = (
        2 * request.optimizer.master_bytes_per_element + request.optimizer.state_bytes_per_element
    )  # with the gradient
    enough = fastest_seconds(before) / WORTH_A_COMPILER
    offloaded = (each.strategy for each in before if each.strategy.offload_optimizer == "cpu")
    candidates = (each for each in offloaded if each.offload_parameters == "none" and each.sequence_parallel == 1)
    # On one GPU nothing else asks for stage 3, which can split the optimizer.
    for whole in dict.fromkeys(replace(each, zero_stage=3) for each in candidates if each.zero_stage >= 2):
        if evaluation.best_case(in_part(whole, RATIOS[0], number, world_size)).seconds >= enough:
            continue
        profile = _draft(evaluation, whole)
        for ratio in RATIOS if profile is not None else ():
            assert profile is not None
            part = in_part(whole, ratio, number, world_size)
            on_device = 1 - share_on_host(profile.costs.facts.trainable_sizes, part, world_size)
            more_bytes = on_device * number / world_size * element_bytes
            if on_device and (seconds := seconds_beside(evaluation, part, profile, more_bytes)) < enough:
                yield seconds, part


def _draft(evaluation: StrategyEvaluation, strategy: Strategy) -> MemoryProfile | None:
    """Return None where there is none, or where the model turns out not to take the tiled loss."""
    try:
        evaluation.source.prepare([strategy])
        return evaluation.source.draft(strategy, True)
    except RequestError:
        if strategy.loss == "tiled" and evaluation.request.loss == "auto":
            return None
        raise


def seconds_beside(
    evaluation: StrategyEvaluation, strategy: Strategy, profile: MemoryProfile, more_bytes: float
) -> float:
    """Return the seconds of a step with `more_bytes` more (or less) on each device; infinite where nothing fits."""
    fitting, more = evaluation.fitting, int(more_bytes)
    if more >= min(device.usable_bytes for device in fitting.devices):
        return float("inf")
    fit = {
        device: fitting.largest_micro_batch(profile, replace(device, held_bytes=device.held_bytes + more), None)
        for device in fitting.devices
    }
    batches = fitting.batches(fit) if min(fit.values()) >= 1 else []
    return evaluation.fastest(profile, strategy, batches)[0].total_seconds if batches else float("inf")
