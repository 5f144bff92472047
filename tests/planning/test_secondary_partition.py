"""hpZ: memory for fewer bytes between nodes, taken where it makes a step faster, and refused where it cannot be."""

from contextlib import suppress
from typing import Any

import pytest

from frugal.errors import NothingFitsError, RequestError
from tests.planning.synthetic import planned

MODEL = {"drafts": True, "num_matrices": 200}
NODES: dict[str, Any] = {"nodes": 4, "gpus": 4, "mem": "12G", "global_batch": 256, "zero_stage": 3, "model": MODEL}


def communication(plan: Any) -> float:
    return float(plan.time.communication_seconds)


def test_it_is_taken_where_the_gathers_between_nodes_cost_more_than_its_memory() -> None:
    made, pinned = planned(**NODES), {group: planned(**NODES, secondary_partition=group) for group in (1, 2, 4)}
    fastest = min(pinned, key=lambda group: pinned[group].time.total_seconds)
    assert made.strategy == pinned[fastest].strategy
    assert fastest == 2, "over PCIe half a gather less is worth twice the memory"
    assert made.time.total_seconds < pinned[1].time.total_seconds / 1.02
    assert made.memory.headroom_bytes >= 0
    assert any(line.startswith("2 ranks of a node keep the parameters between them") for line in made.why)


@pytest.mark.parametrize("mem", ["9G", "10G", "11G", "16G"])
def test_it_is_as_fast_as_the_best_that_can_be_pinned(mem: str) -> None:
    nodes = NODES | {"mem": mem}
    seconds = []
    for group in (1, 2, 4):
        with suppress(NothingFitsError):
            seconds.append(planned(**nodes, secondary_partition=group).time.total_seconds)
    assert planned(**nodes).time.total_seconds <= 1.02 * min(seconds)


def test_over_nvlink_a_whole_node_keeps_them() -> None:
    """Half a gather less inside a node is then no gain."""
    made = planned(**{name: value for name, value in NODES.items() if name != "mem"}, gpu="a100-40g")
    assert made.strategy.secondary_partition == 4


def test_beside_it_a_part_of_the_optimizer_stays_on_the_host() -> None:
    """As fast as the best of both that can be pinned."""
    tight = NODES | {"nodes": 2, "mem": "5.2G", "activation_checkpointing": "full", "offload": "optimizer"}
    pins = [{"offload_ratio": ratio, "secondary_partition": group} for ratio in (0.5, 0.75, 1.0) for group in (1, 2, 4)]
    seconds = []
    for pin in pins:
        with suppress(NothingFitsError):
            seconds.append(planned(**tight | pin).time.total_seconds)
    assert len(seconds) > 5
    assert planned(**tight).time.total_seconds <= 1.1 * min(seconds), "what a compiler must be worth"


def test_modes_of_layers_are_mixed_beside_it() -> None:
    deep = NODES | {"mem": "11G", "model": {**MODEL, "num_layers": 24, "bytes_per_token": 2_000_000}}
    made, alone = planned(**deep), planned(**deep, activation_checkpointing="full")
    assert made.strategy.secondary_partition > 1 and made.strategy.layer_modes
    assert made.time.total_seconds < alone.time.total_seconds / 1.02


def test_the_first_gather_of_a_step_and_the_gradients_still_go_between_nodes() -> None:
    """Of 4 GPUs on each of 4 nodes, one micro-step of 1B parameters in bf16: bytes that leave a rank."""
    plain = planned(**NODES | {"global_batch": 16}, secondary_partition=1)
    kept = planned(**NODES | {"global_batch": 16}, secondary_partition=4)
    assert plain.batch.accumulation_steps == kept.batch.accumulation_steps == 1
    between, within = plain.cluster.inter_bandwidth, plain.cluster.intra_bandwidth
    saved = 2e9 * (15 / 16 / min(between, within) - 3 / 4 / within)  # one of two gathers
    assert communication(plain) - communication(kept) == pytest.approx(saved, rel=1e-3)


def test_it_is_not_searched_on_one_node_or_nodes_of_one_gpu() -> None:
    for cluster in ({"nodes": 1}, {"gpus": 1, "nodes": 8}):
        made = planned(**NODES | cluster)
        assert {each.strategy.secondary_partition for each in made.rejected} | {made.strategy.secondary_partition} == {
            1
        }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secondary_partition": 4, "zero_stage": 2}, "--secondary-partition 4 is impossible with --zero-stage 2"),
        ({"secondary_partition": 4, "offload": "all"}, "--secondary-partition 4 is impossible with --offload all"),
        ({"secondary_partition": 4, "nodes": 1}, "--secondary-partition 4 is impossible on one node"),
        ({"secondary_partition": 3}, "--secondary-partition 3 is impossible on nodes of 4"),
    ],
)
def test_groups_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        planned(**NODES | settings)
    assert caught.value.what == message
    assert caught.value.because and caught.value.hint


def test_quantised_communication_is_refused_with_the_reason() -> None:
    with pytest.raises(Exception, match="quantised communication changes the numbers"):
        planned(**NODES, zero_quantized_weights=True)
