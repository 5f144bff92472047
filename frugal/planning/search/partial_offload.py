"""Which share of an optimizer in host memory is worth evaluating, found by arithmetic alone.

What is updated on the device adds master weights, states and gradients to what is live there throughout a step. So the
draft of a strategy with everything on the host says which micro-batches fit beside each share, without a simulation of
its own. Left out: what the allocator wastes.
"""

from collections.abc import Sequence
from dataclasses import replace

from frugal.config import optimizers
from frugal.errors import RequestError
from frugal.planning.search.candidate import TIE, Candidate, Profile, fastest_seconds
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.strategy import RATIOS, Offload, Strategy, in_part, share_on_host

FASTEST = 2
"""Shares that are evaluated; what arithmetic says of them is hardly ever wrong."""


def drafts(evaluation: StrategyEvaluation, level: Offload, before: Sequence[Candidate]) -> list[Candidate]:
    """Drafts of the shares that could win over the candidates of a level of offloading that were evaluated `before`.

    Of all strategies whose best case is fast enough the fastest shares, and one larger share, which leaves room for
    what the allocator wastes. None where the optimizer cannot be split, or was pinned.
    """
    number = evaluation.facts.trainable_parameters
    world_size, fastest = evaluation.cluster.world_size, fastest_seconds(before)
    if not _is_searched(evaluation, level):
        return []
    timed = []
    for strategy in _with_all_on_host(before):
        best = evaluation.best_case(in_part(strategy, RATIOS[0], number, world_size))
        if best.seconds * TIE < fastest and (profile := _draft(evaluation, strategy)) is not None:
            timed += _timed(evaluation, strategy, profile)
    timed.sort(key=lambda pair: pair[0])
    parts = [part for seconds, part in timed if seconds * TIE < fastest][:FASTEST]
    larger = [in_part(part, part.offload_ratio + RATIOS[0], number, world_size) for part in parts[:1]]
    parts += [part for part in larger if part.offload_ratio < 1 and part not in parts]
    return [draft for part in parts if (draft := evaluation.draft(part)) is not None]


def _is_searched(evaluation: StrategyEvaluation, level: Offload) -> bool:
    request = evaluation.request
    return (
        level == "optimizer"
        and request.offload_ratio is None
        and request.zero_stage in (None, 3)
        and optimizers.why_not_in_part(request.optimizer, request.optimizer_implementation) is None
        and evaluation.cluster.devices[0].kind == "cuda"
        and bool(evaluation.work)
    )


def _with_all_on_host(before: Sequence[Candidate]) -> list[Strategy]:
    """The strategies to split, all in ZeRO-3: also on one GPU, where nothing else asks for it."""
    strategies = (candidate.strategy for candidate in before)
    on_host = (each for each in strategies if (each.offload_optimizer, each.offload_parameters) == ("cpu", "none"))
    return list(dict.fromkeys(replace(each, zero_stage=3) for each in on_host if each.zero_stage >= 2))


def _draft(evaluation: StrategyEvaluation, strategy: Strategy) -> Profile | None:
    """None where there is none, or where a model turns out not to take the tiled loss."""
    try:
        evaluation.source.prepare([strategy])
        return evaluation.source.draft(strategy, True)
    except RequestError:
        if strategy.loss == "tiled" and evaluation.request.loss == "auto":
            return None
        raise


def _timed(evaluation: StrategyEvaluation, strategy: Strategy, profile: Profile) -> list[tuple[float, Strategy]]:
    """Seconds of a step with each share that may fit."""
    request, fitting, world_size = evaluation.request, evaluation.fitting, evaluation.cluster.world_size
    number = evaluation.facts.trainable_parameters
    element_bytes = 2 * request.master_bytes_per_element + request.state_bytes_per_element  # with the gradient
    timed = []
    for ratio in RATIOS:
        part = in_part(strategy, ratio, number, world_size)
        on_device = 1 - share_on_host(profile.trainable_sizes, part, world_size)
        more_bytes = int(on_device * number / world_size * element_bytes)
        if not 0 < more_bytes < min(device.usable_bytes for device in fitting.devices):
            continue
        fit = {
            device: fitting.largest_micro_batch(
                profile, replace(device, held_bytes=device.held_bytes + more_bytes), None
            )
            for device in fitting.devices
        }
        batches = fitting.batches(fit) if min(fit.values()) >= 1 else []
        if batches:
            timed.append((evaluation.fastest(profile, part, batches)[0].total_seconds, part))
    return timed
