"""The work of one micro-step, counted without regard to the device, and the predicted seconds of an optimizer step.

The seconds are the sum of five parts. None is hidden behind another, except communication where it is asked to overlap.
Left out of all of them: data loading, stragglers, clocks that fall under load, other users of a link. The parts are
meant to rank strategies; absolute seconds are good to a factor of two until a machine has been calibrated.
"""

from collections import Counter
from dataclasses import dataclass, fields
from math import log2
from typing import Any

from frugal.config.hardware.cluster import Cluster, Device
from frugal.config.request import Request
from frugal.planning.batch import BatchPlan
from frugal.planning.model_facts import ModelFacts
from frugal.planning.plan import StepTime
from frugal.planning.strategy import Strategy, share_on_host


@dataclass(frozen=True)
class Line:
    """An affine function of the micro-batch: `fixed + per_sample * samples`."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: int) -> float:
        """Return the value for a micro-batch of `samples`."""
        return self.fixed + self.per_sample * samples

    def moved(self, start: "Line", end: "Line", share: float) -> "Line":
        per_sample = self.per_sample + share * (end.per_sample - start.per_sample)
        return Line(self.fixed + share * (end.fixed - start.fixed), per_sample)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one micro-step of full-length samples, without what DeepSpeed adds.

    Traffic is the bytes read and written by operators whose FLOPs are not counted: pointwise ones, norms, softmax,
    copies, gathers. They take as long as their bytes; matrix products and attention as long as their FLOPs. On a CPU
    bytes are weighed by what is computed with them, see `frugal.memory_watch`.

    Attributes:
        flops_per_sample: FLOPs of forward and backward, without recomputation.
        recompute_flops_per_sample: FLOPs of the forward that activation checkpointing repeats.
        traffic: bytes of forward and backward, without recomputation.
        recompute_traffic: bytes of what is repeated.
        num_operators: operators of all of it; `num_recomputed` of them repeat, `num_forward` are the forward's.
        moved_per_sample: bytes of activations that go to the host, and come back.
        exchanged_per_sample: bytes that a rank has for those that share its samples, itself included, in
            `num_exchanges` all-to-alls; repeated ones count, too.
    """

    flops_per_sample: float
    recompute_flops_per_sample: float
    traffic: Line
    recompute_traffic: Line
    num_operators: int
    num_forward: int
    num_recomputed: int
    moved_per_sample: float
    exchanged_per_sample: float = 0.0
    num_exchanges: int = 0

    def moved(self, start: "Work", end: "Work", share: float) -> "Work":
        """Return this work plus `share` of the difference `end - start`, both rounded to whole operators.

        It is the work of a model in which that share of the layers use the mode of `end` instead of that of `start`.
        """
        values: dict[str, Any] = {}
        for field in fields(self):
            own, first, last = (getattr(each, field.name) for each in (self, start, end))
            if isinstance(own, Line):
                values[field.name] = own.moved(first, last, share)
            else:
                value = own + share * (last - first)
                values[field.name] = round(value) if isinstance(own, int) else value
        return Work(**values)


Counts = Counter[str]
"""Raw counts recorded for one micro-step at one micro-batch size, by name: `flops` and `recompute_flops`, `traffic`,
`recompute_traffic`, `moved` and `exchanged` in bytes, `num_operators`, `num_forward`, `num_recomputed`,
`num_exchanges`; see `Work`."""


def between(first: Counts, second: Counts, num_samples: tuple[int, int]) -> Work:
    """Return the work for every micro-batch: the line through the counts at two micro-batch sizes."""
    small, large = num_samples

    def slope(name: str) -> float:
        return float(second[name] - first[name]) / (large - small)

    def line(name: str) -> Line:
        per_sample = max(0.0, slope(name))
        return Line(max(0.0, first[name] - per_sample * small), per_sample)

    return Work(
        flops_per_sample=slope("flops"),
        recompute_flops_per_sample=slope("recompute_flops"),
        traffic=line("traffic"),
        recompute_traffic=line("recompute_traffic"),
        num_operators=first["num_operators"],
        num_forward=first["num_forward"],
        num_recomputed=first["num_recomputed"],
        moved_per_sample=slope("moved"),
        exchanged_per_sample=slope("exchanged"),
        num_exchanges=first["num_exchanges"],
    )


HOOK_OPERATORS, STEP_OPERATORS = {0: 0, 1: 3, 2: 8, 3: 80}, {0: 5, 1: 5, 2: 5, 3: 13}
"""The cost of DeepSpeed's Python for each trainable parameter, by ZeRO stage, in operators' time: in a micro-step, and
in the optimizer step. Stages 1 and 2 copy each gradient into a bucket from a hook; stage 3 also fetches and releases
from hooks before and after every module.

These and the next three are measured: processor time of an 8-layer decoder on a CPU rank, its tensors so small that
nothing else takes time (torch 2.13)."""

REPEATED_HOOKS = 0.45
"""Share of stage 3's hooks that run once more where layers are recomputed."""

REPEATED_OPERATORS = 2.4
"""A recomputed operator, in operators' time: torch's activation checkpointing packs and unpacks each saved tensor in
Python."""

PYTHON_OPERATORS = 2.0
"""The extra cost of each operator in forward and recomputation under `selective`, whose choice is made by Python for
each of them, in operators' time."""

NORM_BYTES = 20
"""Read and written for the norm of one gradient element: DeepSpeed copies it to fp64 first (`get_norm_dtype`)."""

NVME_BANDWIDTH = 2e9
"""Bytes/s of one node's disk, reading or writing: a PCIe 4.0 drive sustains 2 to 5 GB/s."""


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model under one strategy.

    Attributes:
        facts: the model's sizes.
        work: what one micro-step makes a device do.
        gathers: ZeRO-3's all-gathers in a micro-step and the elements they bring; None: unknown, everything is taken
            to be gathered twice.
    """

    facts: ModelFacts
    work: Work
    gathers: tuple[int, int] | None = None


def step_time(model: ModelCosts, strategy: Strategy, batch: BatchPlan, cluster: Cluster, request: Request) -> StepTime:
    """Return the predicted seconds of one optimizer step."""
    compute, recompute, moving = _compute_seconds(model, strategy, batch, cluster, request.element_bytes)
    communication = _communication_seconds(model, strategy, batch, cluster, request.element_bytes)
    if strategy.overlap_comm:  # it hides behind backward, two thirds of the compute; what is longer stays
        communication = max(0.0, communication - 2 / 3 * compute)
    parts = {
        "compute_seconds": compute,
        "recompute_seconds": recompute,
        "communication_seconds": communication + exchange_seconds(model, strategy, batch, cluster),
        "offload_seconds": moving + _offload_seconds(model, strategy, batch, cluster, request),
        "optimizer_seconds": _optimizer_seconds(model, strategy, cluster, request),
    }
    return StepTime(**parts, total_seconds=sum(parts.values()))


def _compute_seconds(
    model: ModelCosts, strategy: Strategy, batch: BatchPlan, cluster: Cluster, element_bytes: int
) -> tuple[float, float, float]:
    """Return the seconds of forward and backward, of recomputation, and of copying activations to the host and back.

    A micro-step lasts as long as its slowest rank, because ZeRO-2 and 3 meet in each one, and all meet at the end.
    Equal devices differ only in their micro-batch sizes, of which the largest counts.
    """
    ranks = dict.fromkeys(zip(cluster.kind_of_rank, batch.cap_of_rank, strict=True))
    groups = {cap: group for group, cap in enumerate(batch.groups)}
    plain = total = moving = 0.0
    for steps in batch.micro_steps:
        largest = batch.largest_in(steps)
        loads = dict.fromkeys((cluster.kinds[kind], largest[groups[cap]]) for kind, cap in ranks)
        seconds = [_micro_step_seconds(model, strategy, *load, element_bytes, cluster.world_size) for load in loads]
        slowest = max(seconds, key=lambda parts: parts[1] + parts[2])
        plain, total, moving = (
            so_far + steps.count * more for so_far, more in zip((plain, total, moving), slowest, strict=True)
        )
    return plain, total - plain, moving


def _micro_step_seconds(
    model: ModelCosts, strategy: Strategy, device: Device, samples: int, element_bytes: int, world_size: int
) -> tuple[float, float, float]:
    """Return one micro-step's seconds on one device: without recomputation, with it, and of moving activations.

        kernels = FLOPs / (FLOP/s of matrix products) + traffic / (bytes/s of memory)

    Matrix products and attention are bound by their FLOPs, everything else by the bytes it reads and writes; one
    kernel runs after the other. A GPU's host runs ahead, so there the longer one counts, kernels or launches; on a
    CPU they are the same thread's, and add up. Activations in host memory are copied on the stream that computes,
    down in forward and up in backward, so that nothing hides them (`frugal.models.activation_checkpointing`).

    Left out: small products, which reach less of the peak; attention kernels, which reach about half of it, but whose
    FLOPs are counted without regard to causality, twice what they do; caches.
    """
    work = model.work
    kernels = work.flops_per_sample * samples / device.matrix_flops
    # To sum gradients, besides the collectives' own: stages 0 and 1 add them to what is there, two reads and a write.
    # Stages 2 and 3 copy them into a bucket, divide them by the number of ranks, and add the rank's own part to its sum
    # in fp32.
    into_bucket = 4 * element_bytes + (8 + element_bytes) / world_size
    gradients = (3 * element_bytes if strategy.zero_stage <= 1 else into_bucket) * model.facts.trainable_parameters
    kernels += (work.traffic.at(samples) + gradients) / device.memory_bandwidth
    again = work.recompute_flops_per_sample * samples / device.matrix_flops
    again += work.recompute_traffic.at(samples) / device.memory_bandwidth
    hooks = HOOK_OPERATORS[strategy.zero_stage] * len(model.facts.trainable_sizes)
    operators = work.num_operators - work.num_recomputed + hooks
    repeated = REPEATED_OPERATORS * work.num_recomputed
    if strategy.zero_stage == 3 and work.num_recomputed:
        repeated += REPEATED_HOOKS * hooks
    repeated += strategy.share("selective") * PYTHON_OPERATORS * (work.num_forward + work.num_recomputed)
    launch, launch_again = operators * device.operator_seconds, repeated * device.operator_seconds
    moving = work.moved_per_sample * samples / device.host_link_bandwidth
    if device.kind == "cpu":
        return kernels + launch, kernels + launch + again + launch_again, 0.0
    return max(kernels, launch), max(kernels + again, launch + launch_again), moving


def _communication_seconds(
    model: ModelCosts, strategy: Strategy, batch: BatchPlan, cluster: Cluster, element_bytes: int
) -> float:
    """Return the collectives' seconds: bytes that each rank sends, over the slowest link of the ring, plus latency.

    With S bytes of gradients or parameters on W ranks, a ring sends (W-1)/W x S for an all-gather or a reduce-scatter
    and twice that for an all-reduce. DeepSpeed 0.19.8, per optimizer step with n micro-steps:

        stage 0   all-reduce once                                    2
        stage 1   all-reduce once, all-gather once                   2 + 1
        stage 2   all-reduce in each micro-step, all-gather once     2n + 1
        stage 3   two all-gathers and a reduce-scatter each          3n

    (in units of (W-1)/W x S). Stages 1 and 2 use an all-reduce for the gradients even where a reduce-scatter would do
    (`use_multi_rank_bucket_allreduce`). Source: the wire bytes of 25M parameters in bf16 on 2 nodes, counted at the
    network card, for n = 1 and 8: 50.6 / 50.6, 75.7 / 75.9, 75.3 / 430 and 75.9 / 607 MB; these formulas give
    50 / 50, 75 / 75, 75 / 425 and 75 / 600. What stage 3 gathers is known better where it was simulated: parameters
    that stay are not gathered, and those of recomputed layers three times.

    Between nodes a ring leaves and enters each node once, whatever the ranks in it, so `inter_bandwidth`, that of a
    node, is the ring's. Left out: NCCL's trees and hierarchies, which do better than one ring on many nodes.
    """
    world_size, num_steps = cluster.world_size, batch.accumulation_steps
    if world_size == 1:
        return 0.0
    bandwidth = (
        cluster.intra_bandwidth if len(cluster.nodes) == 1 else min(cluster.intra_bandwidth, cluster.inter_bandwidth)
    )
    gradients = model.facts.trainable_parameters * element_bytes
    num_buckets = max(1, -(-gradients // (strategy.reduce_bucket_elements * element_bytes)))
    if strategy.zero_stage == 3:
        weights = model.facts.packed.weight_bytes(model.facts.parameters, element_bytes)
        num_gathers, gathered = (2 * num_buckets, 2 * weights)
        if model.gathers is not None:
            num_gathers, gathered = model.gathers[0], model.gathers[1] * element_bytes
        stays = sum(size for size in model.facts.trainable_sizes if size <= strategy.persistence_threshold_elements)
        volume = num_steps * (gathered + gradients) + stays * element_bytes
        num_collectives = num_steps * (num_gathers + num_buckets) + (stays > 0)
    else:
        reductions = num_steps if strategy.zero_stage == 2 else 1
        volume = 2 * reductions * gradients + (gradients if strategy.zero_stage >= 1 else 0)
        num_collectives = reductions * num_buckets + (num_buckets if strategy.zero_stage >= 1 else 0)
    transfer = (world_size - 1) / world_size * volume / bandwidth
    return transfer + num_collectives * cluster.hop_seconds * log2(world_size)


def exchange_seconds(model: ModelCosts, strategy: Strategy, batch: BatchPlan, cluster: Cluster) -> float:
    """Return the seconds of the all-to-alls of ranks that share samples.

    Of the bytes that a rank has for all n of its group, (n-1)/n leave it. Within a node they travel over the links
    between its devices; with a group over several nodes most of them pass a node's own link, which its ranks share.
    Nothing of the model goes on meanwhile, so overlapped gradients hide none of it.
    """
    work, size = model.work, strategy.sequence_parallel
    if size == 1:
        return 0.0
    per_node = min(len(node.devices) for node in cluster.nodes)
    is_inside = all(len(node.devices) % size == 0 for node in cluster.nodes)
    bandwidth = (
        cluster.intra_bandwidth if is_inside else min(cluster.intra_bandwidth, cluster.inter_bandwidth / per_node)
    )
    seconds = 0.0
    for steps in batch.micro_steps:
        sent = (size - 1) / size * work.exchanged_per_sample * max(batch.largest_in(steps))
        seconds += steps.count * (sent / bandwidth + work.num_exchanges * cluster.hop_seconds * log2(size))
    return seconds


def _offload_seconds(
    model: ModelCosts, strategy: Strategy, batch: BatchPlan, cluster: Cluster, request: Request
) -> float:
    """Return the seconds of PCIe traffic and of the optimizer's update on the host.

    Each rank moves its share of the gradients down in every micro-step and of the parameters updated there up once.
    With parameters offloaded, its share of them also comes up twice in every micro-step. The host then reads and writes
    master weights and states and reads gradients, 32 bytes an element for Adam, for all ranks of the node at once.
    Sub-groups that stay on the device are updated before them (`_optimizer_seconds`). What lives on NVMe is read and
    written by all ranks of the node at once. Left out: that DeepSpeed overlaps some of the copies, and the device's
    update with the host's; slow hosts.
    """
    if strategy.offload_optimizer == "none":
        return 0.0
    world_size, num_steps = cluster.world_size, batch.accumulation_steps
    share = model.facts.trainable_parameters * request.element_bytes / world_size
    on_host = share_on_host(model.facts.trainable_sizes, strategy, world_size)
    moved = num_steps * share + on_host * share
    if strategy.offload_parameters != "none":
        weights = model.facts.packed.weight_bytes(model.facts.parameters, request.element_bytes)
        moved += 2 * num_steps * weights / world_size
    ranks_per_node = max(len(node.devices) for node in cluster.nodes)
    states = request.optimizer.master_bytes_per_element + request.optimizer.state_bytes_per_element
    moved_on_disk = 0.0
    if strategy.offload_optimizer == "nvme":  # master weight, states and gradient: written and read
        moved_on_disk += 2 * (states + 4) * model.facts.trainable_parameters / world_size
    if strategy.offload_parameters == "nvme":
        moved_on_disk += (2 * num_steps + 1) * model.facts.parameters * request.element_bytes / world_size
    touched = on_host * model.facts.trainable_parameters / world_size * ranks_per_node * (8 + 2 * states)
    disk = moved_on_disk * ranks_per_node / NVME_BANDWIDTH
    slowest = min(device.host_link_bandwidth for device in cluster.kinds)
    return moved / slowest + touched / cluster.host_bandwidth + disk


def _optimizer_seconds(model: ModelCosts, strategy: Strategy, cluster: Cluster, request: Request) -> float:
    """Return the seconds of the update on the device, bound by its memory's bytes/s.

    For each element a rank owns: the gradient is read for its norm and again for the update (4 bytes each), master
    weight and the optimizer's states are read and written, the parameter is written. For states in bf16 the gradient
    is rounded to them on the way. Left out: the temporaries of optimizers that are not fused.
    """
    on_device = 1 - share_on_host(model.facts.trainable_sizes, strategy, cluster.world_size)
    if not on_device:
        return 0.0
    owned = on_device * model.facts.trainable_parameters / (cluster.world_size if strategy.zero_stage >= 1 else 1)
    master = request.optimizer.master_bytes_per_element
    rounded = 0 if master == 4 else 2 * master
    traffic = owned * (
        4 + rounded + NORM_BYTES + 2 * (master + request.optimizer.state_bytes_per_element) + request.element_bytes
    )
    operators = on_device * STEP_OPERATORS[strategy.zero_stage] * len(model.facts.trainable_sizes)
    of_host = cluster.host_bandwidth / max(len(node.devices) for node in cluster.nodes)
    return max(
        traffic / (of_host if device.kind == "cpu" else device.memory_bandwidth) + operators * device.operator_seconds
        for device in cluster.kinds
    )
