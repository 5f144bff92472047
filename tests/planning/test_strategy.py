"""Which strategies are candidates, and how they are called."""

import pytest

from frugal.planning import strategy
from frugal.planning.request import Request
from frugal.planning.strategy import Strategy, candidates


def modes(on_gpus: bool = True, can_recompute: bool = True, **request: object) -> list[str]:
    made = candidates(
        Request(loss="plain", zero_stage=3, **request),  # type: ignore[arg-type]  # any field
        world_size=2, offload="none", trainable_parameters=1000, can_recompute=can_recompute, on_gpus=on_gpus,
    )  # fmt: skip
    return [each.activation_checkpointing for each in made]


def test_auto_tries_the_modes_that_everybody_knows_and_a_pin_any() -> None:
    assert modes() == ["off", "full"]
    assert modes(activation_checkpointing="offloaded") == ["offloaded"]
    assert modes(activation_checkpointing="selective") == ["selective"]


def test_auto_may_try_all_modes_but_nothing_is_moved_where_the_host_is_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strategy, "AUTO_TRIES_SELECTIVE_AND_OFFLOADED", True)
    assert modes() == ["off", "full", "selective", "offloaded"]
    assert modes(on_gpus=False) == ["off", "full", "selective"]
    assert modes(can_recompute=False) == ["off"]


def test_a_strategy_says_its_mode() -> None:
    assert str(Strategy(zero_stage=2, activation_checkpointing="selective")) == (
        "ZeRO-2, activation checkpointing selective"
    )
