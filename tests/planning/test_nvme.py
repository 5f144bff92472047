"""NVMe is used where a path was given and nothing else fits, and never unasked."""

import pytest

from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import strategy_config
from frugal.errors import RequestError
from frugal.planning.strategy import Strategy, allowed_strategies, offload_levels
from tests.planning.synthetic import facts


def on_disk(**request: object) -> tuple[Strategy, ...]:
    asked = Request(nvme_path="/scratch", **request)  # type: ignore[arg-type]  # fields of several kinds
    return allowed_strategies(asked, facts(10**9, largest_parameter=10**8 + 1), world_size=4, offload="nvme")


def test_without_a_path_no_disk_is_tried_and_with_one_it_is_the_last() -> None:
    assert offload_levels(Request()) == ("none", "optimizer", "all")
    assert offload_levels(Request(nvme_path="/scratch")) == ("none", "optimizer", "all", "nvme")


def test_asking_for_it_without_a_path_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        Request(offload="nvme")
    assert caught.value.what == "--offload nvme was given without --nvme-path"
    assert "--nvme-path /local/scratch" in str(caught.value.hint)


def test_only_zero_3_can_and_8_bit_states_cannot() -> None:
    with pytest.raises(RequestError, match="it needs ZeRO stage 3"):
        Request(offload="nvme", nvme_path="/scratch", zero_stage=2)
    with pytest.raises(RequestError, match="only states in fp32 to disk"):
        Request(offload="nvme", nvme_path="/scratch", optimizer="adamw-8bit")


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
