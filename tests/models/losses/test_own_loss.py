"""What a model adds to the cross entropy is trained with it, tiled or not, and padding is left out of it."""

from typing import Any

import pytest
import torch

from frugal.errors import RequestError
from frugal.models import tiled_loss
from frugal.models.objectives import CausalLM
from frugal.models.spec import ModelSpec
from frugal.models.trials.model_check import check_model
from tests.engine.gradients import bound_by, in_dtype, relative_error

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5,
}  # fmt: skip
SAMPLES = [{"input_ids": list(range(5, 5 + length))} for length in (9, 4, 6)]


def mixtral(**changes: Any) -> ModelSpec:
    import transformers

    config = transformers.AutoConfig.for_model("mixtral", **TINY | changes)
    return ModelSpec(reference="mixtral", task="causal-lm", max_positions=64, vocab_size=64, config=config)


def trained(model: Any, objective: Any) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    batch = objective.collate(SAMPLES)
    loss = objective.loss_sum(model, batch)
    loss.backward()
    return loss.item() / objective.count(batch), model.model.layers[0].mlp.gate.weight.grad.clone()


def test_the_loss_of_routers_is_the_models_own_without_padding() -> None:
    spec = mixtral(output_router_logits=True)
    model, objective = spec.build(dtype=torch.float32).eval(), spec.objective()
    batch = objective.collate(SAMPLES)
    theirs = model(input_ids=batch["input_ids"], attention_mask=batch["real"], labels=batch["labels"])
    theirs.loss.backward()
    gradient = model.model.layers[0].mlp.gate.weight.grad.clone() * objective.count(batch)
    loss, ours = trained(model, objective)
    exact = trained(in_dtype(model, torch.float64), objective)
    bound = 2 * bound_by((theirs.loss.item(), {"gate": gradient}), (exact[0], {"gate": exact[1]}))
    assert loss == pytest.approx(theirs.loss.item(), rel=bound)
    assert relative_error({"gate": ours.double()}, {"gate": gradient}) < bound
    assert loss > trained(model, CausalLM())[0] + 0.4  # the cross entropy alone
    tiled_loss.apply(model)
    tiled, same = trained(model, objective)
    assert tiled == pytest.approx(loss, rel=bound)
    assert relative_error({"gate": same.double()}, {"gate": ours}) < bound


def test_a_dummy_adds_nothing_and_a_plan_says_what_routers_add() -> None:
    spec = mixtral(output_router_logits=True)
    model, objective = spec.build(dtype=torch.float32), spec.objective()
    loss = objective.loss_sum(model, objective.collate([objective.dummy()]))
    loss.backward()
    assert loss.item() == 0
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)
    assert any("its routers add" in note for note in check_model(spec))
    assert check_model(mixtral()) == ()


def test_a_loss_computed_in_the_forward_cannot_be_tiled() -> None:
    import transformers

    config = transformers.AutoConfig.for_model(
        "switch_transformers", vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2,
        num_heads=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=2, output_router_logits=True,
    )  # fmt: skip
    spec = ModelSpec(reference="switch", task="seq2seq", max_positions=None, vocab_size=64, config=config)
    model, objective = spec.build(dtype=torch.float32), spec.objective()
    tiled_loss.apply(model)
    with pytest.raises(RequestError, match="it computes its own loss inside its forward, from whole logits"):
        objective.loss_sum(model, objective.collate([{"input_ids": [5, 6], "labels": [7, 1]}]))
