"""Plans made by hand, to run a strategy rather than choose one."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from frugal.config.hardware.cluster import Cluster, Device, Node
from frugal.config.hardware.local_host import versions
from frugal.config.request import Request
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.planning.plan import ModelSummary, Plan, StepTime
from frugal.planning.search.mixtures import Runs
from frugal.planning.strategy import LayerMode, Strategy


def without_calibration() -> None:
    """Have this process plan without a calibration of the machine, so that results of machines can be compared."""
    os.environ["XDG_CONFIG_HOME"] = os.devnull


def plan_by_hand(
    *,
    world_size: int,
    global_batch: int,
    micro_batch: int | tuple[int, ...],
    zero_stage: int,
    request: dict[str, Any] | None = None,
    strategy: dict[str, Any] | None = None,
) -> Plan:
    """A plan with exactly these choices, and a prediction that claims nothing."""
    shared_by = (strategy or {}).get("sequence_parallel", 1)
    caps = (micro_batch,) * (world_size // shared_by) if isinstance(micro_batch, int) else micro_batch
    device = Device(
        name="cpu rank",
        kind="cpu",
        memory_bytes=8 << 30,
        context_bytes=0,
        margin_bytes=0,
        matrix_flops=1e11,
        memory_bandwidth=1e10,
    )
    memory = MemoryBreakdown(
        parameters=0, gradients=0, optimizer=0, activations=0, logits=0, communication=0, temporary=0, slack=0,
        context=0, total_bytes=0, usable_bytes=8 << 30, host_bytes_per_node=0, phase="none", operator="none",
    )  # fmt: skip
    return Plan(
        frugal_version=versions()["frugal"],
        versions={},
        request=Request(**{"precision": "fp32", "seq_len": 64, "global_batch": global_batch, **(request or {})}),
        defaults=(),
        model=ModelSummary(
            task="causal-lm", parameters=0, trainable_parameters=0, largest_parameter=0, flops_per_sample=0.0
        ),
        cluster=Cluster(nodes=(Node(devices=(device,) * world_size),), intra_bandwidth=1e9, inter_bandwidth=1e9),
        strategy=Strategy(zero_stage=zero_stage, **{"reduce_bucket_elements": 1_000_000, **(strategy or {})}),
        batch=BatchPlan.of(global_batch, caps, sequence_parallel=shared_by),
        memory=memory,
        time=StepTime(
            compute_seconds=0,
            recompute_seconds=0,
            communication_seconds=0,
            offload_seconds=0,
            optimizer_seconds=0,
            total_seconds=0,
        ),
        why=(),
        warnings=(),
        rejected=(),
    ).sealed()


def all_mixtures(modes: Sequence[LayerMode], num_layers: int) -> Iterator[Runs]:
    """Yield those in which layers that keep more come last; `modes`: the least kept first."""
    if len(modes) == 1:
        yield ((modes[0], num_layers),)
        return
    for count in range(num_layers + 1):
        for others in all_mixtures(modes[1:], num_layers - count):
            yield ((modes[0], count), *others)
