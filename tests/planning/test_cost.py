"""The cost model's arithmetic, against what was counted and measured."""

from dataclasses import replace
from typing import Any

import pytest

from frugal.config.hardware.cluster import Cluster, Device, Node
from frugal.config.request import Request
from frugal.planning import cost
from frugal.planning.batch import BatchPlan
from frugal.planning.cost import Line, ModelCosts, Work
from frugal.planning.plan import StepTime
from frugal.planning.strategy import Place, Strategy
from tests.planning.synthetic import facts


def model(number: int = 25_000_000, work_of: Work | None = None, **more: Any) -> ModelCosts:
    gathers = more.pop("gathers", None)
    return ModelCosts(facts=facts(number, **more), work=work() if work_of is None else work_of, gathers=gathers)


def work(**changes: Any) -> Work:
    nothing: dict[str, Any] = {
        "flops_per_sample": 1e12, "recompute_flops_per_sample": 0.0, "traffic": Line(), "recompute_traffic": Line(),
        "num_operators": 0, "num_forward": 0, "num_recomputed": 0, "moved_per_sample": 0.0,
    }  # fmt: skip
    return Work(**(nothing | changes))


def cluster(world_size: int, *, nodes: int = 1, speeds: tuple[float, ...] = (), bandwidth: float = 1e9) -> Cluster:
    made = tuple(
        Device(
            name="card", kind="cuda", memory_bytes=1 << 34, context_bytes=0, margin_bytes=0,
            matrix_flops=speeds[i % len(speeds)] if speeds else 1e12, memory_bandwidth=1e12,
        )
        for i in range(world_size // nodes)
    )  # fmt: skip
    node = Node(devices=made)
    return Cluster(nodes=(node,) * nodes, intra_bandwidth=bandwidth, inter_bandwidth=bandwidth, hop_seconds=0.0)


def step(strategy: Strategy, num_steps: int, *, on: Cluster, micro: int = 1, **counted: Any) -> StepTime:
    batch = BatchPlan.of(num_steps * on.world_size * micro, (micro,) * on.world_size)
    return cost.step_time(model(work_of=work(**counted)), strategy, batch, on, Request())


@pytest.mark.parametrize(
    ("zero_stage", "num_steps", "measured_megabytes"),
    [(0, 1, 50.6), (0, 8, 50.6), (1, 1, 75.7), (1, 8, 75.9), (2, 1, 75.3), (2, 8, 430), (3, 1, 75.9), (3, 8, 607)],
)
def test_wire_bytes_are_those_counted_at_the_network_card(
    zero_stage: int, num_steps: int, measured_megabytes: float
) -> None:
    time = step(Strategy(zero_stage=zero_stage), num_steps, on=cluster(2, nodes=2, bandwidth=1e6))
    assert time.communication_seconds == pytest.approx(measured_megabytes, rel=0.02)


def test_one_gpu_communicates_nothing() -> None:
    assert step(Strategy(zero_stage=2), 4, on=cluster(1)).communication_seconds == 0


def test_stage_3_sends_what_was_seen_to_be_gathered() -> None:
    made, on = model(gathers=(10, 75_000_000)), cluster(2, bandwidth=1e6)
    batch = BatchPlan.of(2, (1, 1))
    time = cost.step_time(made, Strategy(zero_stage=3), batch, on, Request())
    assert time.communication_seconds == pytest.approx((75 + 25) * 2 / 2)  # bf16, half of it from the other rank


def test_a_collective_of_nothing_takes_its_latency() -> None:
    on = replace(cluster(4, bandwidth=1e30), hop_seconds=1e-3)
    time = step(Strategy(zero_stage=2, reduce_bucket_elements=5_000_000), 3, on=on)
    assert time.communication_seconds == pytest.approx((3 * 5 + 5) * 2 * 1e-3)  # five buckets, two doublings


def test_a_micro_step_waits_for_its_slowest_rank() -> None:
    even = step(Strategy(zero_stage=0), 1, on=cluster(2)).compute_seconds
    mixed = step(Strategy(zero_stage=0), 1, on=cluster(2, speeds=(1e12, 0.5e12))).compute_seconds
    assert mixed == pytest.approx(2 * even, rel=1e-3)


def test_operators_without_products_take_as_long_as_their_bytes() -> None:
    without, with_ = (
        step(Strategy(zero_stage=2), 2, on=cluster(1), micro=3, traffic=t) for t in (Line(), Line(1e9, 2e9))
    )
    assert with_.compute_seconds - without.compute_seconds == pytest.approx(2 * (1 + 3 * 2) * 1e9 / 1e12)


def test_many_small_micro_steps_are_bound_by_launches_on_a_gpu() -> None:
    small: dict[str, Any] = {"flops_per_sample": 1e6, "num_operators": 1000}
    launches = 1000 + cost.HOOK_OPERATORS[2]
    assert step(Strategy(zero_stage=2), 8, on=cluster(1), **small).compute_seconds == pytest.approx(
        8 * launches * 10e-6
    )


def test_on_a_cpu_launches_add_to_the_work() -> None:
    (node,) = cluster(1).nodes
    cpu = replace(cluster(1), nodes=(Node(devices=(replace(node.devices[0], kind="cpu"),)),))
    work_alone, both = (step(Strategy(zero_stage=0), 1, on=cpu, num_operators=n).compute_seconds for n in (0, 1000))
    assert both - work_alone == pytest.approx(1000 * 10e-6)


def test_recomputation_takes_its_flops_and_bytes() -> None:
    again = step(
        Strategy(zero_stage=2), 1, on=cluster(1), recompute_flops_per_sample=3e11, recompute_traffic=Line(0.0, 1e11)
    )
    assert again.recompute_seconds == pytest.approx(0.3 + 0.1)


def test_python_chooses_each_operator_under_selective() -> None:
    launched: dict[str, Any] = {
        "flops_per_sample": 0.0,
        "num_operators": 2000,
        "num_forward": 500,
        "num_recomputed": 500,
    }
    full, selective = (
        step(Strategy(zero_stage=2, activation_checkpointing=mode), 1, on=cluster(1), **launched)
        for mode in ("full", "selective")
    )
    assert selective.recompute_seconds - full.recompute_seconds == pytest.approx(cost.PYTHON_OPERATORS * 1000 * 10e-6)


def test_activations_in_host_memory_travel_while_nothing_computes() -> None:
    time = step(Strategy(zero_stage=2, activation_checkpointing="offloaded"), 3, on=cluster(1), moved_per_sample=2.4e9)
    assert time.offload_seconds == pytest.approx(3 * 2.4 / 12)


def test_offload_moves_the_optimizer_from_the_device_to_the_host() -> None:
    here = step(Strategy(zero_stage=2), 4, on=cluster(4))
    away = step(Strategy(zero_stage=2, offload_optimizer="cpu"), 4, on=cluster(4))
    assert here.offload_seconds == 0 < here.optimizer_seconds
    assert away.optimizer_seconds == 0 < away.offload_seconds
    assert away.total_seconds > here.total_seconds


def test_communication_that_overlaps_hides_behind_backward_which_is_two_thirds_of_the_compute() -> None:
    # 25M gradients in bf16 on two ranks, all-reduced and gathered: half of 3 x 50 MB a rank, 3 s at 25 MB/s.
    apart, overlapped = (
        step(Strategy(zero_stage=2, overlap_comm=overlap), 1, on=cluster(2, bandwidth=25e6))
        for overlap in (False, True)
    )
    assert apart.communication_seconds == pytest.approx(3.0)
    assert apart.compute_seconds == pytest.approx(1.0, rel=1e-3)  # 1 TFLOP on 1 TFLOP/s; backward is two products of 3
    assert overlapped.communication_seconds == pytest.approx(3.0 - 2 / 3, rel=1e-3)
    shorter = step(Strategy(zero_stage=2, overlap_comm=True), 1, on=cluster(2, bandwidth=1e9))
    assert shorter.communication_seconds == 0


def test_a_ring_over_nodes_is_as_fast_as_the_links_between_them() -> None:
    on = replace(cluster(4, nodes=2, bandwidth=1e9), inter_bandwidth=1e6)
    time = step(Strategy(zero_stage=0), 1, on=on)
    assert time.communication_seconds == pytest.approx(3 / 4 * 2 * 50)  # 50 MB of gradients, all-reduced by 4 ranks


def test_a_recomputed_operator_is_launched_in_the_time_of_2_4_others() -> None:
    off, full = (
        step(Strategy(zero_stage=0), 1, on=cluster(1), flops_per_sample=0.0, num_operators=n, num_recomputed=again)
        for n, again in ((1500, 0), (2000, 500))
    )
    assert full.compute_seconds == pytest.approx(off.compute_seconds)
    assert full.recompute_seconds == pytest.approx(500 * 2.4 * 10e-6)


def offloaded(optimizer: Place, parameters: Place = "none", *, on: Cluster, num_steps: int = 1) -> float:
    """Seconds of offloading under ZeRO-3."""
    on_disk = {"nvme_path": "/scratch", "nvme_buffer_elements": 1} if "nvme" in (optimizer, parameters) else {}
    strategy = Strategy(zero_stage=3, offload_optimizer=optimizer, offload_parameters=parameters, **on_disk)  # type: ignore[arg-type]  # two fields of two kinds
    return step(strategy, num_steps, on=on).offload_seconds


def test_offloaded_parameters_come_up_for_forward_and_again_for_backward() -> None:
    on = cluster(4)  # a rank's share of 25M parameters in bf16 is 12.5 MB, its link 12 GB/s
    more = offloaded("cpu", "cpu", on=on, num_steps=3) - offloaded("cpu", on=on, num_steps=3)
    assert more == pytest.approx(3 * 2 * 12.5e6 / 12e9)


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 0.4), (2, 0.2)])
def test_the_ranks_of_a_node_share_its_disk_of_2_gb_a_second(nodes: int, seconds: float) -> None:
    # Master weight, Adam's two moments and the gradient, 16 bytes for each of 25M elements, read and written: 800 MB.
    on = cluster(4, nodes=nodes)
    assert offloaded("nvme", "cpu", on=on) - offloaded("cpu", "cpu", on=on) == pytest.approx(seconds)


def test_parameters_on_disk_are_read_twice_a_micro_step_and_written_once_a_step() -> None:
    on = cluster(4)  # 50 MB of parameters in bf16, over 2 GB/s
    more = offloaded("nvme", "nvme", on=on, num_steps=3) - offloaded("nvme", "cpu", on=on, num_steps=3)
    assert more == pytest.approx((2 * 3 + 1) * 0.025)


def test_an_update_reads_and_writes_50_bytes_for_each_element_a_rank_owns() -> None:
    # The gradient, 4; its copy in fp64 for the norm, 20; master weight and two moments, 12 in and out; the weight, 2.
    for stage, owned in ((0, 25e6), (1, 6.25e6), (2, 6.25e6)):
        time = step(Strategy(zero_stage=stage), 1, on=cluster(4))
        assert time.optimizer_seconds == pytest.approx(owned * 50 / 1e12 + 5 * 10e-6)
