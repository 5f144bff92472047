"""What models do to their logits after the head is done to each slice of the tiled loss, exactly; or refused."""

import types
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from bench.ranks import Ranks
from frugal.errors import RequestError
from frugal.models import tiled_loss, transformers_internals
from frugal.models.objectives import CausalLM, Objective, Seq2Seq
from tests.engine.engines import gradient_of_step, plan_here
from tests.engine.gradients import SGD, Gradient, bound_by, in_dtype, relative_error, with_bound
from tests.engine.small_models import TINY, VOCABULARY, ragged_samples, tiny

DECODER = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2,
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
    "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {  # so that the end is no detail: caps near the logits, scales far from one
    "gemma2": {"final_logit_softcapping": 0.5},
    "gemma3_text": {"final_logit_softcapping": 0.5},
    "cohere": {"logit_scale": 7.0, "tie_word_embeddings": True},
    "cohere2": {"logit_scale": 7.0},
    "granite": {"logits_scaling": 0.1, "tie_word_embeddings": False},
    "granitemoe": {"logits_scaling": 0.1, "num_local_experts": 4},
    "nanochat": {"final_logit_softcapping": 0.5},
}


def small(family: str) -> nn.Module:
    if family in TINY:
        made = tiny("seq2seq" if family in ("marian", "t5") else "causal-lm", family)
        if family == "marian":
            nn.init.normal_(made.final_logits_bias)  # zeros say nothing
        return made
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[family].from_dict(DECODER | CHANGES[family])
    return transformers.AutoModelForCausalLM.from_config(config)


def goal(family: str) -> Objective:
    return Seq2Seq(0, start_id=0) if family in ("marian", "t5") else CausalLM()


def loss_and_gradient(model: nn.Module, loss: Tensor) -> tuple[float, Gradient]:
    model.zero_grad()
    loss.backward()
    made = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), made


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.float32) for family in (*CHANGES, "marian")),
        *((family, torch.bfloat16) for family in ("gemma2", "granite")),
    ],
)
def test_loss_and_gradient_are_those_of_the_models_own_loss(family: str, dtype: torch.dtype) -> None:
    transformers_internals.always_use()
    model, objective = small(family).to(dtype), goal(family)
    (sample,) = ragged_samples(1, shortest=40, longest=61)
    batch = objective.collate([sample])

    def plain(of: torch.dtype) -> tuple[nn.Module, Tensor]:
        whole = in_dtype(model, of)
        own = whole(**{name: value for name, value in batch.items() if name != "decoder_input_ids"}).loss
        return whole, own * objective.count(batch)

    theirs, exact = loss_and_gradient(*plain(dtype)), loss_and_gradient(*plain(torch.float64))
    tiled_loss.apply(model)
    ours = loss_and_gradient(model, objective.loss_sum(model, batch))
    bound = 2 * bound_by(theirs, exact)  # neither is exact
    with torch.no_grad():
        assert objective.loss_sum(model, batch).item() == pytest.approx(theirs[0], rel=bound), "in an evaluation"
    assert ours[0] == pytest.approx(theirs[0], rel=bound)
    assert ours[1].keys() == theirs[1].keys()
    assert relative_error(ours[1], theirs[1]) < bound


def test_a_model_that_leaves_its_logits_alone_has_no_end() -> None:
    assert [tiled_loss.logits_end(small(family)) is None for family in ("gpt2", "t5", "marian")] == [True, True, False]


def test_a_forward_put_over_the_models_own_changes_nothing() -> None:
    for family in ("gpt2", "gemma2"):
        model = small(family)
        run = partial(lambda own, _, **inputs: own(**inputs), model.forward)
        model.forward = types.MethodType(run, model)  # as TRL's SFTTrainer does
        assert (tiled_loss.logits_end(model) is None) == (family == "gpt2")


class Ending(nn.Module):
    """A Gemma-2 whose logits pass one thing more."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = small("gemma2"), kind
        self.config = self.inner.config
        self.scale = nn.Parameter(torch.ones(VOCABULARY))

    def get_output_embeddings(self) -> nn.Module:
        """Of the Gemma-2."""
        return self.inner.get_output_embeddings()

    def forward(self, **inputs: Any) -> Any:
        """As the Gemma-2's."""
        outputs = self.inner(**inputs)
        match self.kind:
            case "softmax":
                outputs.logits = outputs.logits.softmax(-1)
            case "in place":
                outputs.logits = outputs.logits.mul_(2)
            case "chance":
                outputs.logits = torch.bernoulli(outputs.logits.sigmoid())
            case "parameter":
                outputs.logits = outputs.logits * self.scale
        return outputs


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("softmax", "_softmax is not elementwise"),
        ("in place", "mul_ changes them in place"),
        ("chance", "bernoulli draws random numbers, as a dropout does"),
        ("parameter", "mul takes a tensor that is no buffer of the model"),
    ],
)
def test_what_is_not_the_same_for_each_logit_is_refused(kind: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        tiled_loss.apply(Ending(kind))
    assert (caught.value.what, *caught.value.because) == (
        "Ending cannot take the tiled loss", f"it changes its logits after the output head: {why}"
    )  # fmt: skip
    assert str(caught.value).endswith("hint: plan with the plain loss")


class Hidden(Ending):
    """Asks for more than meta tensors know before its logits, so that its end cannot be observed."""

    def forward(self, **inputs: Any) -> Any:
        """As the Gemma-2's, which is enough."""
        assert inputs["input_ids"].tolist()
        return self.inner(**inputs)


def test_an_end_that_cannot_be_observed_is_refused_when_it_shows() -> None:
    model, objective = Hidden(""), goal("gemma2")
    tiled_loss.apply(model)
    with pytest.raises(RequestError, match="it changes its logits after the output head"):
        objective.loss_sum(model, objective.collate(ragged_samples(1)))


# On real ranks.

FAMILY_OF_STAGE = {0: "cohere", 1: "granite", 2: "gemma2", 3: "gemma2"}


def measured_gradient(zero_stage: int) -> Gradient:
    """Return what DeepSpeed applies of seven ragged samples, with the tiled loss. Runs on ranks."""
    plan = plan_here(zero_stage, 7, 2, SGD, loss="tiled")
    return gradient_of_step(plan, small(FAMILY_OF_STAGE[zero_stage]), ragged_samples(7))


def gradient_of_plain_pytorch(zero_stage: int, dtype: torch.dtype) -> Gradient:
    """Return the gradient of the same samples in one batch, with the plain loss."""
    model, objective = small(FAMILY_OF_STAGE[zero_stage]).to(dtype), CausalLM()
    batch = objective.collate(ragged_samples(7))
    return loss_and_gradient(model, objective.loss_sum(model, batch) / objective.count(batch))[1]


@pytest.mark.parametrize(
    "zero_stage", [3, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in FAMILY_OF_STAGE if stage != 3)]
)
def test_deepspeed_applies_the_gradient_of_plain_pytorch(zero_stage: int, two_ranks: Ranks) -> None:
    reference, bound = with_bound(gradient_of_plain_pytorch, zero_stage)
    for gradient in two_ranks.run(measured_gradient, zero_stage):
        assert relative_error(gradient, reference) < bound
