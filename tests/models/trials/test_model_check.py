"""What a model's gradient depends on besides its samples is found by trying it; what is no training is refused."""

import copy
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.plans import plan_by_hand
from frugal.errors import RequestError
from frugal.models import batch_norm
from frugal.models.objectives import SummedLoss
from frugal.models.resolve import presets, resolve
from frugal.models.spec import OWN, ModelSpec
from frugal.models.trials import probe
from frugal.models.trials.model_check import check_model, trial
from frugal.models.trials.small_model import small_models
from frugal.planning.report import DRAWS, DROPOUT, PADDING_MATTERS, SPLIT_MATTERS
from tests.engine.gradients import relative_error
from tests.engine.small_models import TINY

pytestmark = pytest.mark.usefixtures("offline")

COMMON = ("gpt2", "bert-base", "t5-small", "transformer-base")
OF_ALL_KINDS = ("rwkv", "recurrent_gemma", "mistral", "gemma3_text", "mixtral", "bloom", "mpt", "jamba")
OTHERS = (*(name for name in presets() if name not in COMMON), *OF_ALL_KINDS)


@pytest.mark.parametrize(
    "name", [*COMMON, "mamba", "t5", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)]
)
def test_of_an_ordinary_model_there_is_nothing_to_say_but_dropout(name: str) -> None:
    assert set(check_model(resolve(name))) <= {DROPOUT}


# Later tokens


def test_a_model_that_sees_later_tokens_cannot_be_trained_to_predict_them() -> None:
    with pytest.raises(RequestError) as caught:
        check_model(resolve("bert-base", "causal-lm"))
    assert caught.value.what.endswith("as causal-lm: it sees the tokens that it is to predict")
    assert [re.sub(r"\d+ %", "N %", each) for each in caught.value.because] == [
        "later tokens change what it says of earlier ones, by N % of what they change at all",
        "padding alone changes the gradient by N %",
    ]
    assert "hint: use --task masked-lm, or --task sequence-classification, or an" in str(caught.value)
    with pytest.raises(RequestError, match="hint: use --task sequence-classification, or an objective"):
        check_model(resolve("xlnet", "causal-lm"))


def test_a_bidirectional_model_as_decoder_predicts_tokens_that_it_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "decoder.json").write_text(json.dumps({"model_type": "bert", **TINY["bert"], "is_decoder": True}))
    assert check_model(resolve("decoder.json", "causal-lm")) == ()


# The split


def test_experts_of_limited_capacity_are_named() -> None:
    _, note, dropout = check_model(resolve("nllb-moe"))  # the first is of LayerDrop
    assert dropout == DROPOUT
    assert note.startswith(
        f"{SPLIT_MATTERS}: in 2 NllbMoeTop2Router (the first is `model.encoder.layers.1.ffn.router`) "
        "samples of a micro-batch change each other; gradients of a small model of this kind differ by "
    )


class Centred(nn.Module):
    """Takes the mean over the samples of a micro-batch off, with nothing of BatchNorm in its name."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class Noisy(nn.Module):
    """Draws random numbers in every way that models do, and mixes no samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.dropout1d(x, 0.3), 0.5) + torch.randn_like(x) + torch.empty_like(x).uniform_(-1, 1)
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[:, 0]
        return x if torch.rand([]) < 0.3 else 2 * x * torch.bernoulli(torch.full_like(x, 0.9))


def network(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *between, nn.GELU(), nn.Linear(8, 1))


def of_factory(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], example: Mapping[str, Tensor]) -> ModelSpec:
    """Return what `resolve` makes of a factory that returns these."""
    objective = SummedLoss(loss, example=example)
    return ModelSpec(
        reference="own.py:model", task=OWN, max_positions=None, vocab_size=None,
        factory=lambda: (copy.deepcopy(model), objective), own_objective=objective,
    )  # fmt: skip


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().sum()


def alone(model: nn.Module) -> ModelSpec:
    """A factory's model, with a loss of each sample alone."""
    return of_factory(model, squares, {"x": torch.zeros(4)})


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), Centred()])
def test_what_mixes_the_samples_of_a_micro_batch_is_named(layer: nn.Module) -> None:
    (note,) = check_model(alone(network(layer)))
    kind = type(layer).__name__
    assert note.startswith(f"{SPLIT_MATTERS}: in {kind} `1` samples of a micro-batch change each other; ")


class Bank(nn.Module):
    """Keeps what it has seen in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.ones(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        away: Tensor = hidden - self.seen.mean(0)
        self.seen.data = torch.cat([self.seen, hidden.detach()])
        return away


def test_a_buffer_that_grows_is_named_and_put_back() -> None:
    model = Bank()
    (note,) = check_model(alone(model))
    assert "in Bank a forward changes what the next one computes" in note
    with probe.restored(model):
        model(torch.randn(16, 4))
    assert model.seen.shape == (1, 4)


def test_where_only_samples_that_are_all_alike_run_batch_norm_is_still_named() -> None:
    def of_pixels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not ((batch["x"] == 0) | (batch["x"] == 1)).all():
            raise ValueError("pixels are 0 or 1")
        return squares(model, batch)

    notes = check_model(of_factory(network(nn.BatchNorm1d(8)), of_pixels, {"x": torch.zeros(4)}))
    assert any("BatchNorm1d `1`" in note for note in notes)


def test_random_numbers_of_any_kind_are_no_mixture_of_samples() -> None:
    assert DRAWS in (notes := check_model(alone(network(Noisy())))) and set(notes) <= {DROPOUT, DRAWS}
    assert DRAWS not in check_model(alone(network(nn.Dropout(0.5))))


class Functional(nn.Module):
    """Dropout without a module of its own."""

    def __init__(self, share: float, *, in_attention: bool = False) -> None:
        super().__init__()
        self.share, self.in_attention = share, in_attention

    def forward(self, x: Tensor) -> Tensor:
        if self.in_attention:
            share = self.share if self.training else 0.0
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=share)[:, 0]
        return F.dropout(x, p=self.share, training=self.training)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.Dropout(0.0), Functional(0.5), Functional(0.0),
        Functional(0.5, in_attention=True), Functional(0.0, in_attention=True),
    ],
)  # fmt: skip
def test_dropout_is_said_where_two_seeds_make_two_outputs(layer: nn.Module) -> None:
    model, x = network(layer), torch.randn(8, 4)

    def output(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(x)

    draws = not torch.equal(output(0), output(1))
    assert check_model(alone(model)) == ((DROPOUT,) if draws else ())


def test_a_remedy_is_named_where_it_was_tried_and_helps() -> None:
    spec = alone(network(nn.BatchNorm1d(8)))
    (note,) = check_model(spec)
    assert note.endswith("; with --batch-norm frozen, which uses running statistics, they do not")
    assert check_model(spec, "frozen") == ()
    (note,) = check_model(alone(network(nn.BatchNorm1d(8), Centred())))
    assert "frozen" not in note


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.LayerNorm(8), "--batch-norm frozen is for models with BatchNorm\n  because Sequential has none"),
        (nn.BatchNorm1d(8, track_running_stats=False), "--batch-norm frozen needs running statistics\n  because `1` "),
    ],
)
def test_what_cannot_be_frozen_is_refused(layer: nn.Module, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_model(alone(network(layer)), "frozen")
    assert str(caught.value).startswith(said)


def test_torchs_synchronised_batch_norm_is_refused_on_cpu_ranks() -> None:
    plan = plan_by_hand(world_size=2, global_batch=4, micro_batch=2, zero_stage=0)
    with pytest.raises(RequestError, match="SyncBatchNorm runs on GPUs alone\n  because `1` is one"):
        batch_norm.apply_planned(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), plan)


def test_the_size_is_that_of_fp64_gradients() -> None:
    model, x = network(nn.BatchNorm1d(8)), torch.randn(8, 4)

    def gradient(*batches: Tensor) -> dict[str, Tensor]:
        own = copy.deepcopy(model).double()
        for batch in batches:
            squares(own, {"x": batch.double()}).backward()
        return {name: parameter.grad for name, parameter in own.named_parameters()}

    whole, parts = gradient(x), gradient(*x.split(2))
    norms = [sum(float(g.square().sum()) for g in each.values()) for each in (whole, parts)]
    larger, other = (whole, parts) if norms[0] > norms[1] else (parts, whole)
    objective = SummedLoss(squares, example={"x": torch.zeros(4)})
    measured = probe.on_split(model, objective, {"x": x, "real": torch.ones(())})
    assert measured.difference == pytest.approx(relative_error(other, larger), rel=1e-4)  # digits of what is printed
    assert measured.difference > 0.1


def test_a_large_model_is_judged_by_its_modules() -> None:
    with torch.device("meta"):
        large = nn.Linear(8000, 8000)
        normed = nn.Sequential(nn.Linear(4, 8000), nn.BatchNorm1d(8000), large)
        dropping = nn.Sequential(large, nn.Dropout(0.1))
    (note,) = check_model(alone(normed))
    assert note == f"{SPLIT_MATTERS}: BatchNorm1d `1` normalise by statistics of the samples of a micro-batch"
    assert check_model(alone(dropping))[-1] == DROPOUT


# Padding


def test_a_model_without_a_mask_depends_on_padding() -> None:
    note, _ = check_model(resolve("fnet"))
    assert note.startswith(
        f"{PADDING_MATTERS}: that of a small model of this kind for samples of 32 and 17 tokens in one"
    )


def test_trying_a_model_does_not_change_it() -> None:
    spec, model = next(small_models(resolve("gpt2")))
    before = copy.deepcopy(model.state_dict())
    done = trial(model, spec.objective(), task=spec.task, vocab_size=256, max_positions=None)
    assert done.is_causal and not done.split and not done.padding
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class WithSpare(nn.Module):
    """A layer, and one that no sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """`(samples, 4)` to `(samples, 2)`."""
        return self.used(x)


def test_parameters_that_a_batch_does_not_use_are_named() -> None:
    assert check_model(alone(WithSpare())) == (
        "2 trained parameters (spare.weight, spare.bias) got no gradient from a batch of 8 samples: PyTorch and ZeRO-0 "
        "leave what a whole global batch does not use, ZeRO-1 to 3 continue its weight decay and momentum",
    )
