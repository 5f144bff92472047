"""Ways to take more of a device's memory for a shorter step, and which of them are worth evaluating.

A share of an optimizer in host memory stays on the device; what ZeRO-3 gathers is kept within a node (hpZ of ZeRO++,
Wang et al. 2023). Both add bytes to what is live on a device throughout a step. So the draft of a strategy without them
says which micro-batches fit beside them, and arithmetic alone finds the fastest. Left out: what the allocator wastes.
Groups of fewer ranks than a node has keep more each, and have a little less to gather: worth it over PCIe. Both ways at
once are tried, too; none with sequence parallelism.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from frugal.config import optimizers
from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.search.candidate import TIE, Candidate, Profile, fastest_seconds
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.strategy import RATIOS, Offload, Strategy, in_part, share_on_host

FASTEST = 2
"""Of each way those that are evaluated; what arithmetic says of them is hardly ever wrong."""

Timed = tuple[float, Strategy]
"""Seconds of a step by arithmetic, and of what."""

WORTH_A_COMPILER = 1.1
"""How many times faster a share on the device must make a step: DeepSpeed's CPU Adam, which it needs, is compiled on
each host, while torch's, which updates all of an optimizer in host memory, needs nothing."""


def drafts(evaluation: StrategyEvaluation, level: Offload, before: Sequence[Candidate]) -> list[Candidate]:
    """Drafts of what could win over the candidates of a level of offloading that were evaluated `before`."""
    if not _is_searched(evaluation):
        return []
    fastest = fastest_seconds(before)
    within = _within_nodes(evaluation, before, fastest)
    shares = _shares(evaluation, level, before, min([fastest, *(seconds for seconds, _ in within)]))
    ways = (*_with_room(within, evaluation.cluster), *_with_more_on_host(shares, evaluation))
    return [draft for way in ways if (draft := evaluation.draft(way)) is not None]


def check_secondary_partition(request: Request, cluster: Cluster) -> None:
    """Whether groups of so many ranks can keep the parameters between them.

    Raises:
        RequestError: they cannot.
    """
    number = request.secondary_partition or 1
    if number == 1:
        return
    what, because = "", ""
    if request.zero_stage not in (None, 3):
        what, because = f"with --zero-stage {request.zero_stage}", "only ZeRO-3 gathers parameters"
    elif request.offload in ("all", "nvme"):
        what, because = f"with --offload {request.offload}", "what a node keeps would be in host memory, too"
    elif (request.sequence_parallel or 1) > 1:
        what, because = f"with --sequence-parallel {request.sequence_parallel}", "the two have not been held together"
    elif len(cluster.nodes) == 1:
        what, because = "on one node", "there are no gathers between nodes to save"
    elif any(len(node.devices) % number for node in cluster.nodes):
        counts = ", ".join(str(count) for count in sorted({len(node.devices) for node in cluster.nodes}))
        what, because = f"on nodes of {counts}", "a group of ranks would be on two nodes"
    if what:
        hint = "leave it out: it is chosen where it makes a step faster"
        raise RequestError(f"--secondary-partition {number} is impossible {what}", because=because, hint=hint)


def _within_nodes(evaluation: StrategyEvaluation, before: Sequence[Candidate], fastest: float) -> list[Timed]:
    """Groups of ranks of a node that keep the parameters between them, faster than what fits already by a tie."""
    if fastest == float("inf"):  # with more bytes on a device nothing more fits
        return []
    ways: list[Timed] = []
    for place in ("none", "cpu"):
        for strategy in _in_zero_3(before, place):
            of_strategy = fastest
            for group in _groups(evaluation):
                kept = replace(strategy, secondary_partition=group)
                if evaluation.best_case(kept).seconds * TIE >= of_strategy:
                    continue
                if (profile := _draft(evaluation, strategy)) is not None:
                    more_bytes = _group_bytes(evaluation, kept, profile)
                    if (seconds := seconds_beside(evaluation, kept, profile, more_bytes)) * TIE < of_strategy:
                        ways.append((seconds, kept))
                        of_strategy = seconds
    return sorted(ways, key=_seconds)[:FASTEST]


def _shares(evaluation: StrategyEvaluation, level: Offload, before: Sequence[Candidate], fastest: float) -> list[Timed]:
    """Shares of the optimizer's sub-groups on the device where all of them were on the host, in groups and without.

    None where the optimizer cannot be split, or a share was pinned.
    """
    request, number = evaluation.request, evaluation.facts.trainable_parameters
    world_size = evaluation.cluster.world_size
    can_split = optimizers.why_not_in_part(request.optimizer, request.optimizer_implementation) is None
    if level != "optimizer" or request.offload_ratio is not None or not can_split:
        return []
    element_bytes = 2 * request.master_bytes_per_element + request.state_bytes_per_element  # with the gradient
    ways: list[Timed] = []
    for strategy in _in_zero_3(before, "cpu"):
        of_strategy = fastest / WORTH_A_COMPILER
        for whole in (strategy, *(replace(strategy, secondary_partition=group) for group in _groups(evaluation))):
            best = evaluation.best_case(in_part(whole, RATIOS[0], number, world_size)).seconds
            profile = _draft(evaluation, strategy) if best < of_strategy else None
            if profile is None:
                continue
            timed: list[Timed] = []
            for ratio in RATIOS:
                part = in_part(whole, ratio, number, world_size)
                on_device = 1 - share_on_host(profile.trainable_sizes, part, world_size)
                more_bytes = on_device * number / world_size * element_bytes
                if whole != strategy:
                    more_bytes += _group_bytes(evaluation, whole, profile)
                if on_device:
                    timed.append((seconds_beside(evaluation, part, profile, more_bytes), part))
            timed = [each for each in timed if _seconds(each) < of_strategy]
            ways += timed
            of_strategy = min([of_strategy, *(seconds / TIE for seconds, _ in timed)])
    return sorted(ways, key=_seconds)[:FASTEST]


def _with_room(within: Sequence[Timed], cluster: Cluster) -> list[Strategy]:
    """These, and the fastest in groups of a whole node, which leave room for what the allocator wastes."""
    ways = [way for _, way in within]
    most = len(cluster.nodes[0].devices)
    return list(dict.fromkeys((*ways, *(replace(way, secondary_partition=most) for way in ways[:1]))))


def _with_more_on_host(shares: Sequence[Timed], evaluation: StrategyEvaluation) -> list[Strategy]:
    """These, and the fastest with more of the optimizer on the host, for the same reason."""
    number, world_size = evaluation.facts.trainable_parameters, evaluation.cluster.world_size
    parts = [part for _, part in shares]
    larger = [in_part(part, part.offload_ratio + RATIOS[0], number, world_size) for part in parts[:1]]
    return parts + [part for part in larger if part.offload_ratio < 1 and part not in parts]


def _groups(evaluation: StrategyEvaluation) -> list[int]:
    """Ranks of a node that may keep the parameters between them, the most first: those keep the least each.

    None on one node, on nodes without such a number in common, or where it was pinned.
    """
    cluster = evaluation.cluster
    if evaluation.request.secondary_partition is not None or len(cluster.nodes) == 1:
        return []
    in_common = gcd(*(len(node.devices) for node in cluster.nodes))
    return [number for number in range(in_common, 1, -1) if in_common % number == 0]


def _group_bytes(evaluation: StrategyEvaluation, strategy: Strategy, profile: Profile) -> float:
    """What a rank of a group keeps of the parameters."""
    element_bytes = 4 if evaluation.request.precision == "fp32" else 2
    return profile.packed.weight_bytes(profile.parameters, element_bytes) / strategy.secondary_partition


def _is_searched(evaluation: StrategyEvaluation) -> bool:
    """Whether ZeRO-3 on GPUs may be taken, and some work is known."""
    is_on_gpus = evaluation.cluster.devices[0].kind == "cuda"
    return is_on_gpus and bool(evaluation.work) and evaluation.request.zero_stage in (None, 3)


def _in_zero_3(before: Sequence[Candidate], optimizer: str) -> list[Strategy]:
    """The strategies with parameters on the devices and the optimizer there or on the host.

    Those that differ only in the stage are one: on one GPU nothing else asks for stage 3.
    """
    strategies = (candidate.strategy for candidate in before)
    right = (each for each in strategies if (each.offload_optimizer, each.offload_parameters) == (optimizer, "none"))
    in_zero_3 = (replace(each, zero_stage=3) for each in right if each.zero_stage >= 2 and each.sequence_parallel == 1)
    return list(dict.fromkeys(in_zero_3))


def _draft(evaluation: StrategyEvaluation, strategy: Strategy) -> Profile | None:
    """None where there is none, or where a model turns out not to take the tiled loss."""
    try:
        evaluation.source.prepare([strategy])
        return evaluation.source.draft(strategy, True)
    except RequestError:
        if strategy.loss == "tiled" and evaluation.request.loss == "auto":
            return None
        raise


def seconds_beside(evaluation: StrategyEvaluation, strategy: Strategy, profile: Profile, more_bytes: float) -> float:
    """Of a step with so many bytes more on each device, or less; infinite where nothing fits beside them."""
    fitting, more = evaluation.fitting, int(more_bytes)
    if more >= min(device.usable_bytes for device in fitting.devices):
        return float("inf")
    fit = {
        device: fitting.largest_micro_batch(profile, replace(device, held_bytes=device.held_bytes + more), None)
        for device in fitting.devices
    }
    batches = fitting.batches(fit) if min(fit.values()) >= 1 else []
    return evaluation.fastest(profile, strategy, batches)[0].total_seconds if batches else float("inf")


def _seconds(timed: Timed) -> float:
    return timed[0]
