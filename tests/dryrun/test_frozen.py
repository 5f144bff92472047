"""Models of which a part is trained: dry-run as they are measured, and only that part has gradients and states."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ranks import Ranks
from frugal.engine.engine import initialize
from frugal.models.loading import quantised
from frugal.models.objectives import CausalLM
from frugal.models.resolve import resolve
from tests.dryrun.test_truth import LLAMA, assert_as_dry_run, plan_for
from tests.engine.small_models import ragged_samples


class Adapted(nn.Module):
    """A frozen linear layer and a product of two narrow ones beside it (https://arxiv.org/abs/2106.09685)."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapted() -> Any:
    """A Llama with adapters made by hand."""
    model = LLAMA().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def lora() -> Any:
    """The same with peft's adapters."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(LLAMA(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def nf4() -> Any:
    """Adapters around a base in 4 bits."""
    from peft import LoraConfig, get_peft_model

    base = quantised.apply(LLAMA(), reference="llama", dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))


def head_only() -> Any:
    """A Llama whose layers are frozen, so that nothing below the head has a gradient."""
    model = LLAMA().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    return model


MODELS = {"adapted": adapted, "lora": lora, "nf4": nf4, "head only": head_only}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize(
    ("name", "zero_stage", "precision", "mode"),
    [
        ("adapted", 2, "bf16", "selective"),
        ("adapted", 3, "bf16", "off"),
        ("head only", 2, "fp32", "off"),
        ("lora", 3, "bf16", "full"),
        ("nf4", 3, "fp32", "full"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                ("adapted", 0, "fp32", "off"),
                ("adapted", 1, "fp32", "full"),
                ("lora", 0, "fp32", "selective"),
                ("lora", 2, "bf16", "off"),
                ("nf4", 0, "fp32", "selective"),
                ("nf4", 2, "fp32", "off"),
            )
        ),
    ],
)
def test_frozen_parameters_are_as_dry_run(
    world_size: int, name: str, zero_stage: int, precision: str, mode: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue({1: "one_rank", 2: "two_ranks"}[world_size])
    plan = plan_for(world_size, 4, 2, zero_stage, precision, mode)

    assert_as_dry_run(plan, ranks, MODELS[name])


def trained(name: str, zero_stage: int) -> tuple[list[float], set[str], int, bool]:
    """Losses, the names of what changed, the elements with optimizer states on this rank, and whether `F.linear` is
    torch's own once the engine is gone. Runs on ranks."""
    import deepspeed

    torch.manual_seed(0)
    model = MODELS[name]()
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    plan = plan_for(torch.distributed.get_world_size(), 2, 2, zero_stage, "fp32", "selective")
    engine = initialize(model, plan, CausalLM())
    losses = [engine.train_step(ragged_samples(8, seed=0)).loss for _ in range(3)]
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero_stage == 3):
        changed = {key for key, value in engine.module.named_parameters() if not torch.equal(value, before[key])}
    states = [state["exp_avg"] for state in engine.deepspeed.optimizer.optimizer.state.values()]
    engine.destroy()
    return losses, changed, sum(state.numel() for state in states), F.linear is torch._C._nn.linear


@pytest.mark.parametrize(
    ("name", "zero_stage"),
    [
        ("adapted", 2),
        ("lora", 3),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("adapted", 3), ("lora", 2))),
    ],
)
def test_only_what_is_trainable_is_trained_and_has_states(name: str, zero_stage: int, two_ranks: Ranks) -> None:
    """And nothing is left behind that keeps the inputs of frozen layers, as ZeRO-3 does."""
    trainable = {key: value for key, value in MODELS[name]().named_parameters() if value.requires_grad}
    for losses, changed, elements, is_linear_torchs in two_ranks.run(trained, name, zero_stage):
        assert losses == sorted(losses, reverse=True)
        assert changed == trainable.keys()
        assert elements == sum(parameter.numel() for parameter in trainable.values()) / 2
        assert is_linear_torchs


def test_the_task_of_an_adapted_model_is_that_of_the_model_inside() -> None:
    assert resolve("tests.dryrun.test_frozen:lora").task == "causal-lm"


def test_a_factory_s_frozen_parameters_are_not_counted_as_trainable() -> None:
    model = resolve("tests.dryrun.test_frozen:adapted").build(dtype=torch.bfloat16, device="meta")
    sizes = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    assert sizes == [4 * 64, 64 * 4, 4 * 64, 32 * 4] * 2
