"""Ways to take more of a device's memory for a shorter step, and which of them are worth evaluating.

A share of an optimizer in host memory stays on the device; what ZeRO-3 gathers is kept within a node (hpZ of ZeRO++,
Wang et al. 2023). Both add bytes to what is live on a device throughout a step. So the draft of a strategy without them
says which micro-batches fit beside them, and arithmetic alone finds the fastest. Left out: what the allocator wastes.
Not tried: both at once, which can be pinned, and with sequence parallelism.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from frugal.config import optimizers
from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.search.candidate import TIE, Candidate, Profile, fastest_seconds
from frugal.planning.search.evaluate import StrategyEvaluation
from frugal.planning.strategy import RATIOS, Offload, Strategy, in_part, share_on_host

FASTEST = 2
"""Of each way those that are evaluated; what arithmetic says of them is hardly ever wrong."""

WORTH_A_COMPILER = 1.1
"""How many times faster a share on the device must make a step: DeepSpeed's CPU Adam, which it needs, is compiled on
each host, while torch's, which updates all of an optimizer in host memory, needs nothing."""


def drafts(evaluation: StrategyEvaluation, level: Offload, before: Sequence[Candidate]) -> list[Candidate]:
    """Drafts of what could win over the candidates of a level of offloading that were evaluated `before`."""
    ways = (*_fastest_shares(evaluation, level, before), *_fastest_within_nodes(evaluation, before))
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


def _fastest_shares(evaluation: StrategyEvaluation, level: Offload, before: Sequence[Candidate]) -> Sequence[Strategy]:
    """The optimizer's sub-groups: of all strategies with all of them on the host the fastest shares, and one larger.

    The larger share leaves room for what the allocator wastes. None where the optimizer cannot be split, or a share was
    pinned.
    """
    request, number = evaluation.request, evaluation.facts.trainable_parameters
    world_size = evaluation.cluster.world_size
    can_split = optimizers.why_not_in_part(request.optimizer, request.optimizer_implementation) is None
    if level != "optimizer" or request.offload_ratio is not None or not can_split or not _is_searched(evaluation):
        return []
    element_bytes = 2 * request.master_bytes_per_element + request.state_bytes_per_element  # with the gradient

    def timed(strategy: Strategy, profile: Profile) -> Iterator[tuple[float, Strategy]]:
        for ratio in RATIOS:
            part = in_part(strategy, ratio, number, world_size)
            on_device = 1 - share_on_host(profile.trainable_sizes, part, world_size)
            if on_device:
                yield seconds_beside(evaluation, part, profile, on_device * number / world_size * element_bytes), part

    fastest = fastest_seconds(before)
    ways: list[tuple[float, Strategy]] = []
    for strategy in _in_zero_3(before, "cpu"):
        best = evaluation.best_case(in_part(strategy, RATIOS[0], number, world_size))
        if best.seconds * WORTH_A_COMPILER < fastest and (profile := _draft(evaluation, strategy)) is not None:
            ways += timed(strategy, profile)
    parts = _fastest(ways, fastest, WORTH_A_COMPILER)
    larger = [in_part(part, part.offload_ratio + RATIOS[0], number, world_size) for part in parts[:1]]
    return parts + [part for part in larger if part.offload_ratio < 1 and part not in parts]


def _fastest_within_nodes(evaluation: StrategyEvaluation, before: Sequence[Candidate]) -> Sequence[Strategy]:
    """All ranks of a node keep the parameters between them: fewer would keep more each, and save no more.

    None on one node, on nodes of different numbers of devices, or where it was pinned.
    """
    cluster, request = evaluation.cluster, evaluation.request
    counts = {len(node.devices) for node in cluster.nodes}
    if request.secondary_partition is not None or len(cluster.nodes) == 1 or counts == {1} or len(counts) > 1:
        return []
    if not _is_searched(evaluation):
        return []
    (ranks,), element_bytes, fastest = counts, 4 if request.precision == "fp32" else 2, fastest_seconds(before)
    if fastest == float("inf"):
        return []
    ways = []
    for place in ("none", "cpu"):
        for strategy in _in_zero_3(before, place):
            kept = replace(strategy, secondary_partition=ranks)
            if evaluation.best_case(kept).seconds * TIE >= fastest:
                continue
            if (profile := _draft(evaluation, strategy)) is not None:
                more_bytes = profile.packed.weight_bytes(profile.parameters, element_bytes) / ranks
                ways.append((seconds_beside(evaluation, kept, profile, more_bytes), kept))
    return _fastest(ways, fastest, TIE)


def _is_searched(evaluation: StrategyEvaluation) -> bool:
    """Whether ZeRO-3 on GPUs may be taken, and some work is known."""
    is_on_gpus = evaluation.cluster.devices[0].kind == "cuda"
    return is_on_gpus and bool(evaluation.work) and evaluation.request.zero_stage in (None, 3)


def _in_zero_3(before: Sequence[Candidate], optimizer: str) -> list[Strategy]:
    """The strategies with parameters on the devices and the optimizer there or on the host, all of it.

    Those that differ only in the stage are one: on one GPU nothing else asks for stage 3.
    """
    strategies = (candidate.strategy for candidate in before)
    right = (each for each in strategies if (each.offload_optimizer, each.offload_parameters) == (optimizer, "none"))
    return list(
        dict.fromkeys(
            replace(each, zero_stage=3)
            for each in right
            if each.zero_stage >= 2 and each.offload_ratio == each.secondary_partition == each.sequence_parallel == 1
        )
    )


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


def _fastest(timed: list[tuple[float, Strategy]], fastest: float, gain: float) -> list[Strategy]:
    """Those few that are faster than what fits already, by a factor of `gain`."""
    timed.sort(key=lambda pair: pair[0])
    return [strategy for seconds, strategy in timed if seconds * gain < fastest][:FASTEST]
