"""What optimizers go with, and what they take by arithmetic."""

import pytest

from frugal.config.optimizers import IMPLEMENTATIONS, OptimizerName, implementation, state_bytes_per_element
from frugal.config.request import Request
from frugal.errors import RequestError


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
    ("optimizer", "momentum", "state_bytes"),
    [("adamw", None, 8), ("sgd", None, 0), ("sgd", 0.9, 4), ("adamw-8bit", None, 2.03125)],
)
def test_states_per_element(optimizer: OptimizerName, momentum: float | None, state_bytes: float) -> None:
    assert state_bytes_per_element(optimizer, momentum) == state_bytes


def test_without_a_wish_the_first_implementation_is_taken() -> None:
    assert {name: implementation(name, None) for name in IMPLEMENTATIONS} == {
        "adamw": "fused", "sgd": "fused", "adamw-8bit": None,
    }  # fmt: skip
