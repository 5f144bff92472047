"""What optimizers go with, and what they take by arithmetic."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from frugal.config.optimizers import IMPLEMENTATIONS, OptimizerName, implementation, state_bytes_per_element
from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import strategy_config
from frugal.errors import RequestError
from frugal.planning.planner import _request_notes
from frugal.planning.strategy import Strategy


def refusal(**settings: object) -> str:
    with pytest.raises(RequestError) as caught:
        Request(**settings)  # type: ignore[arg-type]  # that is the point
    error = caught.value
    return "\n".join([error.what, *error.because, f"hint: {error.hint}"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "sgd", "optimizer_implementation": "deepspeed"}, "there is fused, foreach, for-loop"),
        ({"momentum": 0.9}, "optimizer.momentum was given with --optimizer adamw"),
        ({"optimizer": "sgd", "adam_beta2": 0.999}, "optimizer.beta2 and --optimizer sgd do not go together"),
        ({"adam_beta1": 1.0}, "optimizer.beta1 is 1.0\nit must be less than 1"),
        ({"adam_beta2": -0.1}, "optimizer.beta2 is -0.1\nit must be a finite number, at least 0"),
        ({"adam_epsilon": 0.0}, "optimizer.epsilon is 0\na parameter without a gradient would be divided by zero"),
    ],
)
def test_numbers_that_the_optimizer_does_not_have_or_outside_their_range_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    assert said in refusal(**settings)


def test_every_adamw_is_told_its_numbers() -> None:
    request = Request(adam_beta2=0.999, adam_epsilon=1e-6)
    assert (request.betas, request.epsilon) == ((0.9, 0.999), 1e-6)
    assert (Request().betas, Request().epsilon) == ((0.9, 0.95), 1e-8)
    for kernels in IMPLEMENTATIONS["adamw"]:
        asked = replace(request, optimizer_implementation=kernels)
        told = strategy_config(asked, Strategy(zero_stage=2))["optimizer"]["params"]
        assert (told["betas"], told["eps"]) == ([0.9, 0.999], 1e-6)


@pytest.mark.parametrize(
    ("optimizer", "momentum", "state_bytes"),
    [("adamw", None, 8), ("sgd", None, 0), ("sgd", 0.9, 4), ("adamw-8bit", None, 2.03125)],
)
def test_states_per_element(optimizer: OptimizerName, momentum: float | None, state_bytes: float) -> None:
    assert state_bytes_per_element(optimizer, momentum) == state_bytes
    in_blocks = optimizer == "adamw-8bit"
    assert state_bytes_per_element(optimizer, momentum, "bf16") == (state_bytes if in_blocks else state_bytes / 2)


@pytest.mark.parametrize(
    ("settings", "because"),
    [
        ({"precision": "fp32"}, "they are rounded to the model's own type"),
        ({"precision": "fp16"}, "they are rounded to the model's own type"),
        ({"optimizer": "adamw-8bit"}, "it keeps its moments in 8 bits already, and needs master weights in fp32"),
        ({"offload": "nvme", "nvme_path": "/scratch"}, "DeepSpeed moves only states in fp32 to disk"),
        ({"offload": "all", "optimizer": "sgd"}, "on the host only DeepSpeed's own CPU Adam keeps states in bf16"),
        ({"offload": "optimizer", "optimizer_implementation": "fused"}, "on the host only DeepSpeed's own CPU Adam"),
    ],
)
def test_states_in_bf16_are_refused_where_deepspeed_cannot_keep_them(settings: dict[str, str], because: str) -> None:
    name, value = next(iter(settings.items()))
    said = refusal(optimizer_states="bf16", **settings)
    assert said.startswith(f"--optimizer-states bf16 is impossible with --{name} {value}\n{because}")
    assert "leave --optimizer-states out" in said


def test_a_mean_that_bf16_cannot_let_decay_is_said() -> None:
    def notes(beta2: float | None, **settings: Any) -> list[str]:
        return _request_notes(Request(adam_beta2=beta2, learning_rate=1e-3, **settings), 1)

    assert notes(0.999) == notes(None, optimizer_states="bf16") == notes(0.99, optimizer_states="bf16") == []
    (said,) = notes(0.999, optimizer_states="bf16")
    assert said.startswith("optimizer.beta2 0.999 with states in bf16: ") and said.endswith("; up to 0.99 it does")
    mean = torch.tensor([1.0, 0.3, 7.0], dtype=torch.bfloat16)
    assert torch.equal(mean * 0.999, mean)
    assert (mean * 0.99 < mean).all()


def test_a_rate_whose_updates_bf16_loses_is_said() -> None:
    def notes(rate: float, **settings: Any) -> list[str]:
        return _request_notes(Request(learning_rate=rate, **settings), 1)

    (said,) = notes(1e-4, optimizer_states="bf16")
    assert said.startswith("a learning rate of 0.0001 with states in bf16: ") and "weights above 0.031 hardly" in said
    scaled = {"reference_batch": 1, "lr_rule": "sqrt", "global_batch": 4, "optimizer_states": "bf16"}
    assert notes(2e-4, **scaled) == [], "the rate that the run has counts"
    assert notes(1e-3, optimizer_states="bf16") == notes(0, optimizer_states="bf16") == notes(1e-4) == []
    assert notes(1e-4, optimizer_states="bf16", optimizer="sgd") == []
    weight = torch.nn.Parameter(torch.tensor([0.032, 0.03], dtype=torch.bfloat16))
    before, optimizer = weight.detach().clone(), torch.optim.AdamW([weight], lr=1e-4, weight_decay=0, fused=True)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight == before).tolist() == [True, False]


def test_on_the_host_states_in_bf16_are_deepspeeds_own() -> None:
    asked, on_host = Request(optimizer_states="bf16"), Strategy(zero_stage=2, offload_optimizer="cpu")
    config = strategy_config(asked, on_host)
    assert config["bf16"] == {
        "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
    }  # fmt: skip
    assert "torch_adam" not in config["optimizer"]["params"]
    assert strategy_config(asked, Strategy(zero_stage=2))["optimizer"]["params"]["torch_adam"]
    assert strategy_config(Request(), on_host)["bf16"] == {"enabled": True}


def test_without_a_wish_the_first_implementation_is_taken() -> None:
    assert {name: implementation(name, None) for name in IMPLEMENTATIONS} == {
        "adamw": "fused", "sgd": "fused", "adamw-8bit": None,
    }  # fmt: skip
