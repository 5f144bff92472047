"""What optimizers go with, and what they take by arithmetic."""

import pytest

from frugal.config.optimizers import IMPLEMENTATIONS, OptimizerName, implementation, state_bytes_per_element
from frugal.config.request import Request
from frugal.errors import RequestError
from frugal.planning.strategy import allowed_strategies, offload_levels


def refusal(**settings: object) -> str:
    with pytest.raises(RequestError) as caught:
        Request(**settings)  # type: ignore[arg-type]  # that is the point
    error = caught.value
    return "\n".join([error.what, *error.because, f"hint: {error.hint}"])


def test_an_implementation_that_there_is_not_is_refused_with_those_there_are() -> None:
    assert refusal(optimizer="sgd", optimizer_implementation="deepspeed") == (
        "--optimizer sgd has no deepspeed implementation\n"
        "there is fused, foreach, for-loop\n"
        "hint: leave --optimizer-implementation out"
    )


def test_momentum_is_sgds() -> None:
    assert refusal(momentum=0.9) == (
        "--momentum was given with --optimizer adamw\n"
        "only sgd has a momentum to choose\n"
        "hint: leave one of them out, or use --optimizer sgd"
    )
    assert Request(optimizer="sgd", momentum=0.9).momentum == 0.9


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ("--precision bf16", {}),
        ("--zero-stage 2", {"precision": "fp32", "zero_stage": 2}),
        ("--offload optimizer", {"precision": "fp32", "offload": "optimizer"}),
    ],
)
def test_adafactor_is_refused_where_it_would_see_flat_parts(given: str, settings: dict[str, object]) -> None:
    text = refusal(optimizer="adafactor", **settings)
    assert text.startswith(f"--optimizer adafactor cannot be used with {given}\n")
    assert "its step depends on the number of GPUs" in text
    assert text.endswith("hint: use --precision fp32 --zero-stage 0 --offload none, or --optimizer adamw-8bit")


def test_the_way_out_of_that_works() -> None:
    request = Request(optimizer="adafactor", precision="fp32", zero_stage=0, offload="none")
    found = allowed_strategies(request, world_size=4, offload="none", trainable_parameters=1000)
    assert {strategy.zero_stage for strategy in found} == {0}
    assert Request(optimizer="adamw-8bit").precision == "bf16"


def test_adafactor_without_pins_is_never_split_or_moved() -> None:
    request = Request(optimizer="adafactor", precision="fp32")
    assert offload_levels(request) == ("none",)
    found = allowed_strategies(request, world_size=4, offload="none", trainable_parameters=1000)
    assert {strategy.zero_stage for strategy in found} == {0}


@pytest.mark.parametrize(
    ("optimizer", "momentum", "state_bytes"),
    [("adamw", None, 8), ("sgd", None, 0), ("sgd", 0.9, 4), ("adafactor", None, 0), ("adamw-8bit", None, 2.03125)],
)
def test_states_per_element(optimizer: OptimizerName, momentum: float | None, state_bytes: float) -> None:
    assert state_bytes_per_element(optimizer, momentum) == state_bytes


def test_without_a_wish_the_first_implementation_is_taken() -> None:
    assert {name: implementation(name, None) for name in IMPLEMENTATIONS} == {
        "adamw": "fused", "sgd": "fused", "adafactor": "for-loop", "adamw-8bit": None,
    }  # fmt: skip
