"""A tiled MLP gives the loss and the gradient of a whole one, and keeps a part of the memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.ranks import Ranks
from frugal.config.adapters import Lora
from frugal.errors import RequestError
from frugal.models import activation_checkpointing
from frugal.models.objectives import CausalLM
from frugal.models.tiling import tiled_mlp
from tests.engine.engines import plan_here, running
from tests.engine.gradients import ROUNDINGS, SGD, ULP, Gradient, applied, relative_error, weights, with_bound
from tests.engine.small_models import ragged_samples, skip_net, tiny, tiny_gpt2, with_adapters


def loss_and_gradient(model: torch.nn.Module, samples: list[dict[str, list[int]]]) -> tuple[float, dict[str, Tensor]]:
    objective = CausalLM()
    model.zero_grad()
    loss = objective.loss_sum(model, objective.collate(samples))
    loss.backward()
    return loss.item(), {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def of_whole(family: str, samples: list[dict[str, list[int]]], dtype: torch.dtype) -> tuple[float, dict[str, Tensor]]:
    return loss_and_gradient(tiny("causal-lm", family).to(dtype), samples)


@pytest.mark.parametrize("mode", ["off", "full", "offloaded"])
@pytest.mark.parametrize(
    ("family", "frozen"), [("llama", ""), ("llama", "model.layers.0.mlp.gate_proj.weight"), ("gpt2", "")]
)
def test_loss_and_gradient_are_those_of_the_whole_mlp(family: str, frozen: str, mode: str) -> None:
    model, samples = tiny("causal-lm", family), ragged_samples(5)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    activation_checkpointing.apply(model, mode)
    tiled_mlp.apply(model)
    loss, gradient = loss_and_gradient(model, samples)
    (expected_loss, expected), bound = with_bound(of_whole, family, samples)
    expected.pop(frozen, None)
    assert loss == pytest.approx(expected_loss, rel=bound)
    assert gradient.keys() == expected.keys()
    assert relative_error(gradient, expected) < bound


def test_in_bf16_the_gradient_is_as_near_to_the_exact_one_as_that_of_the_whole() -> None:
    samples = ragged_samples(5)
    exact = loss_and_gradient(tiny("causal-lm", "llama").bfloat16().double(), samples)[1]
    model = tiny("causal-lm", "llama").bfloat16()
    whole = relative_error(loss_and_gradient(model, samples)[1], exact)
    tiled_mlp.apply(model)
    assert relative_error(loss_and_gradient(model, samples)[1], exact) < 1.2 * whole


def test_what_backward_needs_of_the_mlp_is_its_input() -> None:
    def saved_elements(model: torch.nn.Module) -> int:
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
            return tensor

        batch = CausalLM().collate(ragged_samples(4))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = model(batch["input_ids"]).logits
        del kept
        return sum(saved.values())

    model = tiny_gpt2()  # its MLP: input, 4 x width before and after the activation
    whole = saved_elements(model)
    tiled_mlp.apply(model)
    tokens = CausalLM().collate(ragged_samples(4))["input_ids"].numel()
    assert whole - saved_elements(model) >= 2 * 2 * 4 * 64 * tokens


def test_a_model_without_such_an_mlp_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        tiled_mlp.apply(tiny_gpt2(resid_pdrop=0.1))
    assert "GPT2Attention: transpose is not known to leave positions apart" in caught.value.because[0]
    assert "GPT2MLP: bernoulli_ draws random numbers, as a dropout does" in caught.value.because[0]
    assert str(caught.value).endswith("\n\nhint: plan with --mlp plain")
    with pytest.raises(RequestError, match="it has no list of layers with an MLP in each"):
        tiled_mlp.apply(torch.nn.Linear(4, 4))


def test_a_plain_module_is_tiled_too() -> None:
    model, objective = skip_net()
    batch = objective.example(6, 0)
    whole = objective.loss_sum(model, batch)
    tiled_mlp.apply(model)
    tiled = objective.loss_sum(model, batch)
    assert tiled.item() == pytest.approx(whole.item(), rel=2 * ROUNDINGS * ULP)


# On real ranks.


SMALL_BUCKETS = {
    "reduce_bucket_elements": 5_000, "prefetch_bucket_elements": 5_000, "max_live_elements": 6_000,
    "persistence_threshold_elements": 100,
}  # fmt: skip
MIXED = {"activation_checkpointing": "budget", "layer_modes": (("full", 1), ("off", 1))}
FULL = {"activation_checkpointing": "full"}


def adapted(lora: str | None = None) -> torch.nn.Module:
    """A small Llama; with adapters that do something, if asked."""
    return with_adapters(tiny("causal-lm", "llama"), lora)


def measured_gradient(zero_stage: int, strategy: dict[str, Any], lora: str | None = None) -> tuple[Gradient, int]:
    """Return what DeepSpeed applies of seven ragged samples, with tiled MLPs; the parameters still gathered. Runs on
    ranks."""
    model, request = adapted(lora), SGD | {"lora": None if lora is None else Lora.of(lora)}
    before = weights(model)
    with running(plan_here(zero_stage, 7, 2, request, mlp="tiled", **strategy), model) as engine:
        engine.train_step(ragged_samples(7))
        gradient = applied(engine, before)
        states = [(p.ds_persist, p.ds_status.name) for p in engine.module.parameters() if hasattr(p, "ds_status")]
        return gradient, sum(not stays and status == "AVAILABLE" for stays, status in states)


HIDDEN = "r=4,targets=gate_proj,up_proj,down_proj"  # the first MLP's input needs no gradient
HOW: list[tuple[int, dict[str, Any], str | None]] = [
    (2, FULL, None), (3, SMALL_BUCKETS | MIXED | {"sequence_parallel": 2}, None), (3, SMALL_BUCKETS, HIDDEN),
]  # fmt: skip
RARE: list[tuple[int, dict[str, Any], str | None]] = [
    (0, {}, None), (1, FULL, None), (2, {}, None), (3, SMALL_BUCKETS | MIXED, None), (3, {}, None),
    (3, SMALL_BUCKETS | {"sequence_parallel": 2}, None), (3, SMALL_BUCKETS | FULL, None),
    (3, FULL | {"sequence_parallel": 2}, None), (3, {"offload_optimizer": "cpu", "offload_parameters": "cpu"}, None),
    (3, SMALL_BUCKETS | MIXED | {"sequence_parallel": 2}, "r=4"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("zero_stage", "strategy", "lora"), [*HOW, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in RARE)]
)
def test_deepspeed_applies_the_gradient_of_plain_pytorch(
    zero_stage: int, strategy: dict[str, Any], lora: str | None, two_ranks: Ranks
) -> None:
    reference, bound = with_bound(lambda dtype: loss_and_gradient(adapted(lora).to(dtype), ragged_samples(7))[1])
    targets = CausalLM().count(CausalLM().collate(ragged_samples(7)))
    reference = {name: part / targets for name, part in reference.items()}
    for gradient, num_gathered in two_ranks.run(measured_gradient, zero_stage, strategy, lora):
        assert relative_error(gradient, reference) < bound
        assert num_gathered == 0
