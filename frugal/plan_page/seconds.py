"""What `frugal.planning.cost` says of a step's seconds, as a few numbers that hold for every micro-batch.

A micro-step lasts max(kernels, launches), where kernels are a line in its samples; everything else is a line in the
number of micro-steps. The numbers are taken from the cost model itself, by asking it about devices that launch in no
time, and about devices that compute in none.
"""

from dataclasses import replace
from math import inf
from typing import Any

from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import step_time
from frugal.planning.memory.profile import MemoryProfile
from frugal.planning.plan import StepTime

SAMPLES = 1024
"""Of the micro-step through which the second point of a line goes."""


def seconds_of(profile: MemoryProfile, cluster: Cluster, request: Request) -> dict[str, Any] | None:
    """The numbers; None where there are no such: devices that differ, samples of different lengths, and communication
    that hides behind the computation.

    `kernels`, `kernels_again` (with recomputation) and `moving`: seconds of a micro-step without samples, and what a
    sample adds. `launch`, `launch_again`: of a micro-step. `exchange`: all-to-alls of ranks that share samples, what a
    sample adds. `communication` and `offload`: of a step without micro-steps, and what a micro-step adds. `optimizer`:
    of a step. `adds_up`: kernels and launches are one after the
    other, as on a CPU.
    """
    if len(cluster.kinds) > 1 or request.lengths is not None or profile.strategy.overlap_comm:
        return None
    device = cluster.kinds[0]

    def asked(samples: int, num_steps: int, **changed: float) -> StepTime:
        nodes = tuple(
            replace(node, devices=tuple(replace(each, **changed) for each in node.devices))  # type: ignore[arg-type]
            for node in cluster.nodes
        )
        shared_by = profile.strategy.sequence_parallel
        caps = (samples,) * (cluster.world_size // shared_by)
        batch = BatchPlan.of(samples * len(caps) * num_steps, caps, sequence_parallel=shared_by)
        return step_time(profile.costs, profile.strategy, batch, replace(cluster, nodes=nodes), request)

    at_once = {"operator_seconds": 0.0}
    one, many = asked(1, 1, **at_once), asked(SAMPLES, 1, **at_once)
    none = asked(1, 1, matrix_flops=inf, memory_bandwidth=inf)
    two = asked(1, 2, **at_once)

    def line(name: str) -> tuple[float, float]:
        first, last = getattr(one, name), getattr(many, name)
        slope = (last - first) / (SAMPLES - 1)
        return first - slope, slope

    kernels, again = line("compute_seconds"), line("recompute_seconds")
    moving = profile.costs.work.moved_per_sample / device.host_link_bandwidth if device.kind == "cuda" else 0.0
    exchange = line("communication_seconds")[1]
    communication = two.communication_seconds - one.communication_seconds - exchange
    offload = two.offload_seconds - one.offload_seconds - moving
    return {
        "kernels": kernels,
        "kernels_again": (kernels[0] + again[0], kernels[1] + again[1]),
        "launch": none.compute_seconds,
        "launch_again": none.compute_seconds + none.recompute_seconds,
        "moving": moving,
        "exchange": exchange,
        "communication": (one.communication_seconds - exchange - communication, communication),
        "offload": (one.offload_seconds - moving - offload, offload),
        "optimizer": asked(1, 1).optimizer_seconds,
        "adds_up": device.kind == "cpu",
    }
