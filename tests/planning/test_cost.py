"""The cost model's arithmetic, against what was counted and measured."""

from dataclasses import dataclass

import pytest

from frugal.planning import cost
from frugal.planning.cluster import Cluster, Device, Node
from frugal.planning.plan import Batch, StepTime
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy


@dataclass
class Work:
    parameters: int = 25_000_000
    trainable_parameters: int = 25_000_000
    flops_per_sample: float = 1e12
    recompute_flops_per_sample: float = 0.0
    num_operators: int = 0


def cluster(world_size: int, *, nodes: int = 1, speeds: tuple[float, ...] = (), bandwidth: float = 1e9) -> Cluster:
    made = tuple(
        Device(
            name="card", kind="cuda", memory_bytes=1 << 34, context_bytes=0, margin_bytes=0,
            matrix_flops=speeds[i % len(speeds)] if speeds else 1e12, memory_bandwidth=1e12,
        )
        for i in range(world_size // nodes)
    )  # fmt: skip
    return Cluster(nodes=(Node(devices=made),) * nodes, intra_bandwidth=bandwidth, inter_bandwidth=bandwidth)


def step(strategy: Strategy, num_steps: int, *, on: Cluster, work: Work | None = None, micro: int = 1) -> StepTime:
    batch = Batch.of(num_steps * on.world_size * micro, (micro,) * on.world_size)
    return cost.step_time(work or Work(), strategy, batch, on, Request())


@pytest.mark.parametrize(
    ("zero_stage", "num_steps", "measured_megabytes"),
    [(0, 1, 50.6), (0, 8, 50.6), (1, 1, 75.7), (1, 8, 75.9), (2, 1, 75.3), (2, 8, 430), (3, 1, 75.9), (3, 8, 607)],
)
def test_wire_bytes_are_those_counted_at_the_network_card(
    zero_stage: int, num_steps: int, measured_megabytes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "HOP_SECONDS", 0.0)
    time = step(Strategy(zero_stage=zero_stage), num_steps, on=cluster(2, nodes=2, bandwidth=1e6))
    assert time.communication_seconds == pytest.approx(measured_megabytes, rel=0.02)


def test_one_gpu_communicates_nothing() -> None:
    assert step(Strategy(zero_stage=2), 4, on=cluster(1)).communication_seconds == 0


def test_a_micro_step_waits_for_its_slowest_rank() -> None:
    even = step(Strategy(zero_stage=0), 1, on=cluster(2)).compute_seconds
    mixed = step(Strategy(zero_stage=0), 1, on=cluster(2, speeds=(1e12, 0.5e12))).compute_seconds
    assert mixed == pytest.approx(2 * even)


def test_many_small_micro_steps_are_bound_by_launches() -> None:
    work = Work(flops_per_sample=1e6, num_operators=1000)
    assert step(Strategy(zero_stage=2), 8, on=cluster(1), work=work).compute_seconds == pytest.approx(8 * 1000 * 10e-6)


def test_recomputation_is_free_while_launches_bind() -> None:
    work = Work(flops_per_sample=1e6, recompute_flops_per_sample=3e5, num_operators=1000)
    assert step(Strategy(zero_stage=2), 8, on=cluster(1), work=work).recompute_seconds == 0


def test_offload_moves_the_optimizer_from_the_device_to_the_host() -> None:
    here = step(Strategy(zero_stage=2), 4, on=cluster(4))
    away = step(Strategy(zero_stage=2, offload_optimizer="cpu"), 4, on=cluster(4))
    assert here.offload_seconds == 0 < here.optimizer_seconds
    assert away.optimizer_seconds == 0 < away.offload_seconds
    assert away.total_seconds > here.total_seconds


def test_more_accumulation_favours_the_stage_that_reduces_once() -> None:
    on = cluster(4)
    once, every = Strategy(zero_stage=1), Strategy(zero_stage=2)
    assert step(once, 1, on=on).total_seconds == step(every, 1, on=on).total_seconds
    assert step(once, 8, on=on).total_seconds < step(every, 8, on=on).total_seconds
