"""A share of the optimizer's work in host memory: taken where it is faster than all of it, refused where impossible."""

from typing import Any

import pytest

from frugal.config.optimizers import Optimizer
from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import strategy_config
from frugal.errors import RequestError
from frugal.planning.search.mixtures import WORTH_A_COMPILER
from frugal.planning.strategy import (
    RATIOS,
    Strategy,
    allowed_strategies,
    num_groups_on_device,
    offload_levels,
    share_on_host,
    sub_groups,
)
from tests.planning.synthetic import facts, planned

MODEL = {"drafts": True, "num_matrices": 200}
TOO_SMALL: dict[str, Any] = {
    "gpus": 4, "mem": "6.6G", "model": MODEL, "global_batch": 64, "activation_checkpointing": "full",
}  # fmt: skip


def test_groups_end_with_the_part_that_fills_them() -> None:
    assert sub_groups([3, 3, 3, 3, 3], 6) == (6, 6, 3)
    assert sub_groups([3, 3, 3], 9) == (9,)
    assert sub_groups([10, 1, 1], 2) == (10, 2)


def test_the_first_groups_are_the_devices_and_their_number_is_rounded_as_deepspeed_does() -> None:
    assert [num_groups_on_device(8, ratio) for ratio in (0.125, 0.5, 0.875, 1.0)] == [7, 4, 1, 0]
    assert num_groups_on_device(10, 0.9) == 0, "1 - 0.9 is below a tenth"
    strategy = Strategy(zero_stage=3, offload_optimizer="cpu", offload_ratio=0.5, sub_group_elements=10)
    assert share_on_host([30, 10, 10], strategy, 1) == 0.4, "three groups: one on the device, the largest"
    assert share_on_host([30, 10, 10], strategy, 10) == 1.0, "one group, which cannot be cut"


def test_what_fits_stays_on_the_device_where_the_step_is_faster() -> None:
    whole = planned(**TOO_SMALL, offload="optimizer:1")
    made = planned(**TOO_SMALL, offload="optimizer")
    assert whole.strategy.offload_ratio == 1
    assert made.strategy.zero_stage == 3 and made.strategy.offload_ratio in RATIOS
    assert made.time.total_seconds < whole.time.total_seconds / WORTH_A_COMPILER
    assert made.memory.host_bytes_per_node < whole.memory.host_bytes_per_node
    assert made.memory.headroom_bytes >= 0
    told = f"{100 * made.strategy.offload_ratio:.3g} % of the optimizer's sub-groups"
    assert any(line.startswith(told) for line in made.why)
    assert any("needs a C++ compiler" in line for line in made.why)
    whole_seconds = [each.step_seconds for each in made.rejected if each.strategy.offload_ratio == 1]
    assert min(filter(None, whole_seconds)) > made.time.total_seconds


def test_a_pinned_share_is_taken_in_sub_groups_that_allow_it() -> None:
    made = planned(**TOO_SMALL, offload="optimizer:0.75")
    assert (made.strategy.zero_stage, made.strategy.offload_ratio) == (3, 0.75)
    share = share_on_host((5_000_000,) * 200, made.strategy, 4)
    assert share == pytest.approx(0.75, abs=0.04)
    assert "75 % of the optimizer's sub-groups are updated in host memory, as asked" in made.why


def test_it_is_not_searched_where_nothing_has_to_be_offloaded() -> None:
    made = planned(gpus=4, mem="80G", model=MODEL)
    assert all(each.strategy.offload_ratio == 1 for each in made.rejected)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"offload_ratio": 1.5}, "--offload optimizer:1.5 has no share of the update"),
        ({"offload_ratio": 0.0}, "--offload optimizer:0 has no share of the update"),
        ({"zero_stage": 2}, "--offload optimizer:0.5 is impossible with --zero-stage 2"),
        (
            {"optimizer": Optimizer(name="adamw-8bit")},
            "--offload optimizer:0.5 is impossible with --optimizer adamw-8bit",
        ),
        (
            {"optimizer": Optimizer(implementation="fused")},
            "--offload optimizer:0.5 is impossible with `implementation` fused",
        ),
    ],
)
def test_what_deepspeed_cannot_split_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Request(**({"offload_ratio": 0.5} | asked))
    assert caught.value.what == message
    assert caught.value.because and caught.value.hint


def test_cpu_ranks_have_no_host_beside_them() -> None:
    with pytest.raises(RequestError, match="impossible on CPU ranks"):
        planned(gpus=2, mem="8G", device="cpu", offload="optimizer:0.5", model=MODEL)


# Disks: used where a path was given and nothing else fits, and never unasked.


def on_disk(**request: object) -> tuple[Strategy, ...]:
    asked = Request(nvme_path="/scratch", **request)  # type: ignore[arg-type]  # fields of several kinds
    return allowed_strategies(asked, facts(10**9, largest_parameter=10**8 + 1), world_size=4, offload="nvme")


def test_without_a_path_no_disk_is_tried_and_with_one_it_is_the_last() -> None:
    assert offload_levels(Request()) == ("none", "optimizer", "all")
    assert offload_levels(Request(nvme_path="/scratch")) == ("none", "optimizer", "all", "nvme")


def test_asking_for_it_without_a_path_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        Request(offload="nvme")
    assert caught.value.what == "--offload nvme was given without a folder"
    assert "--offload nvme:/local/scratch" in str(caught.value.hint)


def test_only_zero_3_can_and_8_bit_states_cannot() -> None:
    with pytest.raises(RequestError, match="it needs ZeRO stage 3"):
        Request(offload="nvme", nvme_path="/scratch", zero_stage=2)
    with pytest.raises(RequestError, match="only states in fp32 to disk"):
        Request(offload="nvme", nvme_path="/scratch", optimizer=Optimizer(name="adamw-8bit"))


def test_parameters_stay_in_host_memory_before_they_go_to_disk_too() -> None:
    found = {(s.zero_stage, s.offload_optimizer, s.offload_parameters) for s in on_disk()}
    assert found == {(3, "nvme", "cpu"), (3, "nvme", "nvme")}
    assert on_disk()[0].offload_parameters == "cpu"


def test_deepspeed_is_told_all_sizes() -> None:
    strategy = next(s for s in on_disk() if s.offload_parameters == "nvme")
    config = strategy_config(Request(nvme_path="/scratch"), strategy)
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"] == {
        "device": "nvme", "nvme_path": "/scratch", "pin_memory": True, "buffer_count": 4,
    }  # fmt: skip
    assert zero["offload_param"] == {
        "device": "nvme", "nvme_path": "/scratch", "pin_memory": True, "buffer_count": 5,
        "buffer_size": 25_000_001, "max_in_cpu": 0,
    }  # fmt: skip
    assert (zero["stage3_max_live_parameters"], zero["stage3_prefetch_bucket_size"]) == (0, 0)
    assert config["aio"]["block_size"] == 1 << 20
    assert "aio" not in strategy_config(Request(), Strategy(zero_stage=3))
