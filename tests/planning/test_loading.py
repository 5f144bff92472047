"""What loading takes of hosts counts like any other memory."""

import pytest

from frugal.planning.memory.breakdown import Loading, loading_of
from frugal.planning.model_facts import RANDOM, Reading, Weights
from frugal.planning.strategy import Strategy
from frugal.units import GIB

PARAMETERS, LARGEST = 8 * GIB, GIB  # elements, 16 and 2 GiB in bf16
PRETRAINED = Weights(origin="pretrained", reading={"bf16": Reading(passing_bytes=3 * GIB, keeping_bytes=18 * GIB)})


def loading(weights: Weights, strategy: Strategy, kind: str = "cuda") -> Loading:
    """On eight ranks, in bf16."""
    return loading_of(
        weights, strategy, precision="bf16", parameters=PARAMETERS, largest_parameter=LARGEST, world_size=8, kind=kind
    )


@pytest.mark.parametrize(("zero_stage", "on_device"), [(2, 16 * GIB), (3, 2 * GIB)])
def test_hosts_of_pretrained_weights_hold_what_passes_through(zero_stage: int, on_device: int) -> None:
    found = loading(PRETRAINED, Strategy(zero_stage=zero_stage))
    assert (found.rank_0_bytes, found.rank_bytes, found.device_bytes) == (3 * GIB, 3 * GIB, on_device)


def test_parameters_that_stay_on_the_host_are_counted_there() -> None:
    found = loading(PRETRAINED, Strategy(zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu"))
    assert found.rank_bytes == 3 * GIB + 15 * GIB // 8, "an eighth of what all of them would add"
    assert found.device_bytes == 0


def test_random_weights_are_on_the_host_of_rank_0_alone() -> None:
    found = loading(RANDOM, Strategy(zero_stage=2))
    assert (found.way, found.rank_0_bytes, found.rank_bytes) == ("by-rank-0", 16 * GIB, 0)


def test_a_factory_is_called_on_every_rank() -> None:
    found = loading(Weights(origin="factory", reading={}), Strategy(zero_stage=2))
    assert (found.way, found.rank_0_bytes, found.rank_bytes) == ("by-every-rank", 16 * GIB, 16 * GIB)


def test_a_cpu_rank_has_whole_parameters_until_it_has_its_parts() -> None:
    found = loading(RANDOM, Strategy(zero_stage=3), kind="cpu")
    assert found.rank_0_bytes == 16 * GIB + 2 * GIB // 8
    assert found.rank_bytes == 2 * GIB + 2 * GIB
