"""What optimizers go with, and what they take by arithmetic."""

from dataclasses import replace

import pytest

from bench.plans import plan_by_hand
from frugal.config.optimizers import IMPLEMENTATIONS, OptimizerName, implementation, state_bytes_per_element
from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import strategy_config
from frugal.errors import RequestError
from frugal.planning.plan import Plan
from frugal.planning.strategy import Strategy


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


def test_numbers_of_adam_are_adams_and_in_their_range() -> None:
    assert refusal(optimizer="sgd", adam_beta2=0.999) == (
        "--adam-beta2 and --optimizer sgd do not go together\n"
        "sgd keeps no moments of the gradient; its one number is --momentum\n"
        "hint: leave one of them out, or use --optimizer adamw"
    )
    assert refusal(adam_beta1=1.0).startswith("--adam-beta1 is 1\nit must be less than 1, or nothing is ever forgotten")
    assert refusal(adam_beta2=-0.1).startswith("--adam-beta2 is -0.1\nit must be a finite number, at least 0")
    assert refusal(adam_epsilon=0.0).startswith("--adam-epsilon is 0\na parameter without a gradient would be divided")


def test_every_adamw_is_told_its_numbers() -> None:
    request = Request(adam_beta2=0.999, adam_epsilon=1e-6)
    assert (request.betas, request.epsilon) == ((0.9, 0.999), 1e-6)
    assert (Request().betas, Request().epsilon) == ((0.9, 0.95), 1e-8)
    for kernels in IMPLEMENTATIONS["adamw"]:
        asked = replace(request, optimizer_implementation=kernels)
        told = strategy_config(asked, Strategy(zero_stage=2))["optimizer"]["params"]
        assert (told["betas"], told["eps"]) == ([0.9, 0.999], 1e-6)


def test_a_plan_is_the_same_as_before_there_were_numbers_to_ask_for() -> None:
    plan, asked = (
        plan_by_hand(world_size=1, global_batch=1, micro_batch=1, zero_stage=2, request=request)
        for request in ({}, {"adam_beta2": 0.999})
    )
    assert b"adam_" not in plan.to_json() and Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(asked.to_json()).request.betas == (0.9, 0.999)
    assert asked.digest != plan.digest


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
