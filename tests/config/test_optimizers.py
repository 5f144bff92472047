"""Optimizers: their settings, and their memory by arithmetic."""

import random
from typing import Any, get_args

import pytest
import torch

from frugal.config.optimizers import IMPLEMENTATIONS, Optimizer, OptimizerName
from frugal.config.request import Request
from frugal.deepspeed_adapter.json_config import strategy_config
from frugal.errors import RequestError
from frugal.planning.planner import _request_notes
from frugal.planning.strategy import Strategy


def refusal(optimizer: str, **settings: object) -> str:
    with pytest.raises(RequestError) as caught:
        Request(optimizer=Optimizer.of(optimizer), **settings)  # type: ignore[arg-type]  # that is the point
    error = caught.value
    return "\n".join([error.what, *error.because, f"hint: {error.hint}"])


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("sgd,implementation=deepspeed", "there is fused, foreach, for-loop"),
        ("adamw,momentum=0.9", "`momentum` was given with --optimizer adamw"),
        ("sgd,beta2=0.999", "`beta1`, `beta2` and `epsilon` do not go together with --optimizer sgd"),
        ("sgd,decay-norms=false", "`decay-norms` false is impossible with --optimizer sgd"),
        (
            "adamw,beta1=1",
            "`beta1` of --optimizer is 1\nit must be at least 0, and less than 1, or nothing is forgotten",
        ),
        ("sgd,momentum=nan", "`momentum` of --optimizer is nan\nit must be at least 0, and less than 1"),
        ("adamw,beta2=-0.1", "`beta2` of --optimizer is -0.1\nit must be at least 0"),
        ("adamw,epsilon=0", "`epsilon` of --optimizer is 0\nit must be a finite number over 0"),
        ("adamw,epsilon=inf", "`epsilon` of --optimizer is inf\nit must be a finite number over 0"),
        ("adamw,beta2=much", "`beta2` of --optimizer is much\nit must be a number"),
        (
            "adamw,reference-batch=1.5,lr-rule=sqrt",
            "`reference-batch` of --optimizer is 1.5\nit must be a whole number",
        ),
        ("adamw,reference-batch=1000000T,lr-rule=sqrt", "it must be from 1 to 1,000,000,000,000,000"),
        ("adamw,decay-norms=maybe", "`decay-norms` of --optimizer is maybe\nit must be true or false"),
        ("adam", "`name` of --optimizer is adam\nit must be one of adamw, sgd, adamw-8bit"),
        ("Muon", "--optimizer Muon is impossible\nupdates of DeepSpeed 0.19.8's Muon depend on the number of ranks"),
        ("adamw,beta2", "`beta2` of --optimizer has no value\nhint: write --optimizer adamw,beta2=0.99"),
        ("adamw,beta2=0.9,adam_beta2=0.9", "`beta2` of --optimizer is there twice"),
        ("adamw,bta2=0.9", "--optimizer knows no `bta2`\nit has name, implementation, states, momentum, beta1, beta2"),
        ("adamw,bta2=0.9", "hint: did you mean `beta2`?"),
        ("adamw,lr=1e-4", "hint: it is a setting of its own: --learning-rate"),
    ],
)
def test_keys_that_the_optimizer_does_not_have_or_outside_their_range_are_refused(optimizer: str, said: str) -> None:
    assert said in refusal(optimizer)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_printed_is_read_as_the_same(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(get_args(OptimizerName))
    asked: dict[str, Any] = {"name": name, "states": draw.choice((None, "fp32"))}
    if name == "sgd":
        asked["momentum"] = draw.random()
    else:
        asked |= {"beta1": draw.random(), "beta2": draw.random(), "epsilon": 10 ** draw.uniform(-12, 2)}
        asked["decay_norms"] = draw.random() < 0.5
    if draw.random() < 0.5:
        asked |= {"reference_batch": draw.randrange(1, 10**9), "lr_rule": draw.choice(("linear", "sqrt"))}
    optimizer = Optimizer(**asked)
    written = {key.replace("_", "-"): value for key, value in asked.items()}
    assert Optimizer.of(str(optimizer)) == Optimizer.of(written) == Optimizer.of(optimizer) == optimizer


def test_counts_and_other_trainers_names_are_read() -> None:
    assert Optimizer.of("adamw,reference-batch=4M,lr-rule=sqrt").reference_batch == 4_000_000
    assert Optimizer.of("adamw,eps=1e-6,adam_beta1=0.8") == Optimizer(epsilon=1e-6, beta1=0.8)
    assert Optimizer.of("adamw-8bit,decay-norms=false").decay_norms is False


@pytest.mark.parametrize(
    ("text", "state_bytes", "master_bytes"),
    [
        ("adamw", 8, 4), ("sgd", 0, 4), ("sgd,momentum=0.9", 4, 4), ("adamw-8bit", 2.03125, 4),
        ("adamw,states=bf16", 4, 2), ("sgd,states=bf16", 0, 2), ("sgd,states=bf16,momentum=0.9", 2, 2),
    ],
)  # fmt: skip
def test_bytes_per_element(text: str, state_bytes: float, master_bytes: int) -> None:
    optimizer = Optimizer.of(text)
    assert (optimizer.state_bytes_per_element, optimizer.master_bytes_per_element) == (state_bytes, master_bytes)


@pytest.mark.parametrize(
    ("optimizer", "settings", "because"),
    [
        ("adamw", {"precision": "fp32"}, "they are rounded to the model's own type"),
        ("adamw", {"precision": "fp16"}, "they are rounded to the model's own type"),
        ("adamw-8bit", {}, "it keeps its moments in 8 bits already, and needs master weights in fp32"),
        ("adamw", {"offload": "nvme", "nvme_path": "/scratch"}, "DeepSpeed moves only states in fp32 to disk"),
        ("sgd", {"offload": "all"}, "on the host only DeepSpeed's own CPU Adam keeps states in bf16"),
        ("adamw,implementation=fused", {"offload": "optimizer"}, "on the host only DeepSpeed's own CPU Adam"),
    ],
)
def test_states_in_bf16_are_refused_where_deepspeed_cannot_keep_them(
    optimizer: str, settings: dict[str, str], because: str
) -> None:
    name, value = next(iter(settings.items()), ("optimizer", optimizer))
    said = refusal(f"{optimizer},states=bf16", **settings)
    assert said.startswith("`states` bf16 ")
    assert f"is impossible with --{name} {value}\n{because}" in said


def test_a_mean_that_bf16_cannot_let_decay_is_said() -> None:
    def notes(optimizer: str) -> list[str]:
        return list(_request_notes(Request(optimizer=Optimizer.of(optimizer), learning_rate=1e-3), 1))

    assert notes("adamw,beta2=0.999") == notes("adamw,states=bf16") == notes("adamw,beta2=0.99,states=bf16") == []
    (said,) = notes("adamw,beta2=0.999,states=bf16")
    assert said.startswith("optimizer.beta2 0.999 with states in bf16: ") and said.endswith("; up to 0.99 it does")
    mean = torch.tensor([1.0, 0.3, 7.0], dtype=torch.bfloat16)
    assert torch.equal(mean * 0.999, mean)
    assert (mean * 0.99 < mean).all()


def test_a_rate_whose_updates_bf16_loses_is_said() -> None:
    def notes(rate: float, optimizer: str = "adamw,states=bf16", **settings: Any) -> list[str]:
        return list(_request_notes(Request(learning_rate=rate, optimizer=Optimizer.of(optimizer), **settings), 1))

    (said,) = notes(1e-4)
    assert said.startswith("a learning rate of 0.0001 with states in bf16: ") and "weights above 0.031 hardly" in said
    scaled = "adamw,states=bf16,reference-batch=1,lr-rule=sqrt"
    assert notes(2e-4, scaled, global_batch=4) == [], "the rate that the run has counts"
    assert notes(1e-3) == notes(0) == notes(1e-4, "adamw") == notes(1e-4, "sgd,states=bf16") == []
    weight = torch.nn.Parameter(torch.tensor([0.032, 0.03], dtype=torch.bfloat16))
    before, optimizer = weight.detach().clone(), torch.optim.AdamW([weight], lr=1e-4, weight_decay=0, fused=True)
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert (weight == before).tolist() == [True, False]


def test_on_the_host_states_in_bf16_are_deepspeeds_own() -> None:
    asked, on_host = Request(optimizer=Optimizer(states="bf16")), Strategy(zero_stage=2, offload_optimizer="cpu")
    config = strategy_config(asked, on_host)
    assert config["bf16"] == {
        "enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
    }  # fmt: skip
    assert "torch_adam" not in config["optimizer"]["params"]
    assert strategy_config(asked, Strategy(zero_stage=2))["optimizer"]["params"]["torch_adam"]
    assert strategy_config(Request(), on_host)["bf16"] == {"enabled": True}


def test_without_a_wish_the_first_implementation_is_taken() -> None:
    assert {name: Optimizer(name=name).kernels for name in IMPLEMENTATIONS} == {
        "adamw": "fused", "sgd": "fused", "adamw-8bit": None,
    }  # fmt: skip
