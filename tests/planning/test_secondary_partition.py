"""hpZ: memory for fewer bytes between nodes, taken where it makes a step faster, and refused where it cannot be."""

from typing import Any

import pytest

from frugal.errors import RequestError
from tests.planning.synthetic import planned

MODEL = {"drafts": True, "num_matrices": 200}
NODES: dict[str, Any] = {"nodes": 4, "gpus": 4, "mem": "12G", "global_batch": 256, "zero_stage": 3, "model": MODEL}


def communication(plan: Any) -> float:
    return float(plan.time.communication_seconds)


def test_it_is_taken_where_the_gathers_between_nodes_cost_more_than_its_memory() -> None:
    plain, made = planned(**NODES, secondary_partition=1), planned(**NODES)
    assert plain.strategy.secondary_partition == 1
    assert made.strategy.secondary_partition == 4, "all ranks of a node"
    assert made.time.total_seconds < plain.time.total_seconds / 1.02
    assert made.memory.headroom_bytes >= 0
    assert any(line.startswith("4 ranks of a node keep the parameters between them") for line in made.why)


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
