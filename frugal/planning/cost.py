"""How long an optimizer step takes: seconds, by arithmetic.

The sum of five parts, none hidden behind another, but for communication that is asked to overlap. What is left out of
all of them: data loading, stragglers, clocks that fall under load, other users of a link. The parts are meant to rank
strategies; absolute seconds are good to a factor of two until a machine has been calibrated.
"""

from math import log2
from typing import Protocol

from frugal.planning.cluster import Cluster
from frugal.planning.optimizers import state_bytes_per_element
from frugal.planning.plan import Batch, StepTime
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy

ZERO_3_OPERATOR_FACTOR = 2.0
"""ZeRO-3's Python hooks on every submodule: measured 2.7x on a step of tiny tensors, 1.1x on a real one."""

HOP_SECONDS = 20e-6
"""Latency of one message between two GPUs, with the launch of its kernel."""

PCIE_BANDWIDTH = 12e9
"""Bytes/s between a GPU and pinned host memory: half of what PCIe 4.0 x16 promises."""

NVME_BANDWIDTH = 2e9
"""Bytes/s of one node's disk, reading or writing: a PCIe 4.0 drive sustains 2 to 5 GB/s."""

HOST_BANDWIDTH = 50e9
"""Bytes/s that one node's CPUs reach in an optimizer, all its ranks together: half of an 8-channel DDR4 server."""


class Work(Protocol):
    """What a model's step costs, whatever it runs on; a `MemoryProfile` is one.

    FLOPs are those of one full-length sample: `flops_per_sample` of forward and backward, `recompute_flops_per_sample`
    of the forward that activation checkpointing repeats (0 without). `num_operators` run in one micro-step.
    """

    @property
    def parameters(self) -> int: ...
    @property
    def trainable_parameters(self) -> int: ...
    @property
    def flops_per_sample(self) -> float: ...
    @property
    def recompute_flops_per_sample(self) -> float: ...
    @property
    def num_operators(self) -> int: ...


def step_time(work: Work, strategy: Strategy, batch: Batch, cluster: Cluster, request: Request) -> StepTime:
    """Predicted seconds of one optimizer step."""
    element_bytes = 4 if request.precision == "fp32" else 2
    compute, recompute = _compute_seconds(work, strategy, batch, cluster)
    communication = _communication_seconds(work, strategy, batch, cluster, element_bytes)
    if strategy.overlap_comm:  # it hides behind backward, two thirds of the compute; what is longer stays
        communication = max(0.0, communication - 2 / 3 * compute)
    parts = {
        "compute_seconds": compute,
        "recompute_seconds": recompute,
        "communication_seconds": communication,
        "offload_seconds": _offload_seconds(work, strategy, batch, cluster, request, element_bytes),
        "optimizer_seconds": _optimizer_seconds(work, strategy, cluster, request, element_bytes),
    }
    return StepTime(**parts, total_seconds=sum(parts.values()))


def _compute_seconds(work: Work, strategy: Strategy, batch: Batch, cluster: Cluster) -> tuple[float, float]:
    """Forward and backward, and what recomputation adds.

    A micro-step lasts as long as its slowest rank, because ZeRO-2 and 3 meet in each one: the larger of
    cell x FLOPs / FLOP/s and operators x launch time. Left out: that small matrices reach less of the peak; work that
    is bound by memory rather than by FLOPs is contained in the efficiency of `Device.matrix_flops`.
    """
    operator_seconds = max(device.operator_seconds for device in cluster.devices)
    launch = work.num_operators * operator_seconds * (ZERO_3_OPERATOR_FACTOR if strategy.zero_stage == 3 else 1.0)
    ranks = set(zip((device.matrix_flops for device in cluster.devices), batch.micro_batch, strict=True))
    groups = {cap: group for group, cap in enumerate(batch.cut.groups)}
    plain = total = 0.0
    for steps in batch.micro_steps:
        cell = batch.cut.largest_in(steps)
        seconds_per_flop = max(cell[groups[cap]] / speed for speed, cap in ranks)
        plain += steps.count * max(seconds_per_flop * work.flops_per_sample, launch)
        total += steps.count * max(seconds_per_flop * (work.flops_per_sample + work.recompute_flops_per_sample), launch)
    return plain, total - plain


def _communication_seconds(work: Work, strategy: Strategy, batch: Batch, cluster: Cluster, element_bytes: int) -> float:
    """What the collectives take: bytes that each rank sends, over the slowest link of the ring, plus latency.

    With S bytes of gradients or parameters on W ranks, a ring sends (W-1)/W x S for an all-gather or a reduce-scatter
    and twice that for an all-reduce. DeepSpeed 0.19.8, per optimizer step with n micro-steps:

        stage 0   all-reduce once                                    2
        stage 1   all-reduce once, all-gather once                   2 + 1
        stage 2   all-reduce in each micro-step, all-gather once     2n + 1
        stage 3   two all-gathers and a reduce-scatter each          3n

    (in units of (W-1)/W x S). Stages 1 and 2 use an all-reduce for the gradients even where a reduce-scatter would do
    (`use_multi_rank_bucket_allreduce`). Source: the wire bytes of 25M parameters in bf16 on 2 nodes, counted at the
    network card, for n = 1 and 8: 50.6 / 50.6, 75.7 / 75.9, 75.3 / 430 and 75.9 / 607 MB; these formulas give
    50 / 50, 75 / 75, 75 / 425 and 75 / 600. Left out: that persistent small parameters are not gathered in ZeRO-3, and
    NCCL's trees and hierarchies, which do better than one ring on many nodes.
    """
    world_size, num_steps = cluster.world_size, batch.accumulation_steps
    if world_size == 1:
        return 0.0
    bandwidth = (
        cluster.intra_bandwidth if len(cluster.nodes) == 1 else min(cluster.intra_bandwidth, cluster.inter_bandwidth)
    )
    gradients, parameters = work.trainable_parameters * element_bytes, work.parameters * element_bytes
    if strategy.zero_stage == 3:
        volume = num_steps * (2 * parameters + gradients)
    else:
        reductions = num_steps if strategy.zero_stage == 2 else 1
        volume = 2 * reductions * gradients + (gradients if strategy.zero_stage >= 1 else 0)
    bucket_bytes = strategy.reduce_bucket_elements * element_bytes
    num_collectives = max(1, volume // bucket_bytes)
    transfer = (world_size - 1) / world_size * volume / bandwidth
    return transfer + num_collectives * HOP_SECONDS * log2(world_size)


def _offload_seconds(
    work: Work, strategy: Strategy, batch: Batch, cluster: Cluster, request: Request, element_bytes: int
) -> float:
    """PCIe traffic and the optimizer on the host.

    Each rank moves its share of the gradients down in every micro-step and of the updated parameters up once. With
    parameters offloaded, its share of them also comes up twice in every micro-step. The host then reads and writes
    master weights and states and reads gradients, 32 bytes an element for Adam, for all ranks of the node at once.
    What lives on NVMe is read and written by all ranks of the node at once. Left out: that DeepSpeed overlaps some of
    the copies; slow hosts.
    """
    if strategy.offload_optimizer == "none":
        return 0.0
    world_size, num_steps = cluster.world_size, batch.accumulation_steps
    share = work.trainable_parameters * element_bytes / world_size
    moved = num_steps * share + share
    if strategy.offload_parameters != "none":
        moved += 2 * num_steps * work.parameters * element_bytes / world_size
    ranks_per_node = max(len(node.devices) for node in cluster.nodes)
    states = state_bytes_per_element(request.optimizer, request.momentum)
    moved_on_disk = 0.0
    if strategy.offload_optimizer == "nvme":  # master weight, states and gradient: written and read
        moved_on_disk += 2 * (4 + states + 4) * work.trainable_parameters / world_size
    if strategy.offload_parameters == "nvme":
        moved_on_disk += (2 * num_steps + 1) * work.parameters * element_bytes / world_size
    touched = work.trainable_parameters / world_size * ranks_per_node * (8 + 2 * (4 + states))
    disk = moved_on_disk * ranks_per_node / NVME_BANDWIDTH
    return moved / PCIE_BANDWIDTH + touched / HOST_BANDWIDTH + disk


def _optimizer_seconds(work: Work, strategy: Strategy, cluster: Cluster, request: Request, element_bytes: int) -> float:
    """The update on the device, bound by its memory's bytes/s.

    For each element a rank owns: the gradient is read for its norm and again for the update (4 bytes each), master
    weight and the optimizer's states are read and written, the parameter is written. Left out: the fp64 copies
    DeepSpeed makes for the norm, and the temporaries of optimizers that are not fused.
    """
    if strategy.offload_optimizer != "none":
        return 0.0
    owned = work.trainable_parameters / (cluster.world_size if strategy.zero_stage >= 1 else 1)
    states = state_bytes_per_element(request.optimizer, request.momentum)
    traffic = owned * (8 + 2 * (4 + states) + element_bytes)
    return traffic / min(device.memory_bandwidth for device in cluster.devices)
