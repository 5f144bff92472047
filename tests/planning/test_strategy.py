"""Which strategies are candidates, and how they are called."""

from frugal.planning.request import Request
from frugal.planning.strategy import Strategy, candidates


def modes(can_recompute: bool = True, **request: object) -> list[str]:
    made = candidates(
        Request(loss="plain", zero_stage=3, **request),  # type: ignore[arg-type]  # any field
        world_size=2, offload="none", trainable_parameters=1000, can_recompute=can_recompute,
    )  # fmt: skip
    return [each.activation_checkpointing for each in made]


def test_auto_tries_the_modes_whose_cost_is_known_and_a_pin_is_kept() -> None:
    assert modes() == ["off", "full"]
    assert modes(can_recompute=False) == ["off"]
    assert modes(activation_checkpointing="offloaded") == ["offloaded"]
    assert modes(activation_checkpointing="selective") == ["selective"]


def test_a_strategy_says_its_mode() -> None:
    assert str(Strategy(zero_stage=2, activation_checkpointing="selective")) == (
        "ZeRO-2, activation checkpointing selective"
    )
