"""What a model's gradient depends on besides its samples is found by trying it; what is no training is refused."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.errors import RequestError
from frugal.models.objectives import SummedLoss
from frugal.models.resolve import presets, resolve
from frugal.models.spec import OWN, ModelSpec
from frugal.models.trials import probe
from frugal.models.trials.model_check import check_model, trial
from frugal.models.trials.small_model import small_models
from frugal.planning.report import DROPOUT, PADDING_MATTERS, SPLIT_MATTERS
from tests.engine.gradients import relative_error
from tests.engine.small_models import TINY

pytestmark = pytest.mark.usefixtures("offline")

OTHERS = [name for name in presets() if name not in ("gpt2", "bert-base", "t5-small", "transformer-base")]


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        "bert-base",
        "t5-small",
        "transformer-base",
        "mamba",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in OTHERS),
    ],
)
def test_of_an_ordinary_model_there_is_nothing_to_say_but_dropout(name: str) -> None:
    assert set(check_model(resolve(name))) <= {DROPOUT}


# Later tokens


def test_a_model_that_sees_later_tokens_cannot_be_trained_to_predict_them() -> None:
    with pytest.raises(RequestError) as caught:
        check_model(resolve("bert-base", "causal-lm"))
    assert re.sub(r"\d+ %", "N %", str(caught.value)) == (
        "bert-base cannot be trained as causal-lm: it sees the tokens that it is to predict\n"
        "  because later tokens change what it says of earlier ones, by N % of what they change at all\n"
        "  because padding alone changes the gradient by N %\n"
        "\n"
        "hint: use --task masked-lm, or --task sequence-classification, or "
        "an objective of your own, see docs/tutorials/own-model.md"
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("xlnet", "use --task sequence-classification, or an objective"),
    ],
)
def test_the_refusal_names_the_tasks_that_fit(name: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_model(resolve(name, "causal-lm"))
    assert hint in str(caught.value)


def test_a_bidirectional_model_as_decoder_predicts_tokens_that_it_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "decoder.json").write_text(json.dumps({"model_type": "bert", **TINY["bert"], "is_decoder": True}))
    assert check_model(resolve("decoder.json", "causal-lm")) == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["rwkv", "recurrent_gemma", "mistral", "gemma3_text", "mixtral", "bloom", "mpt", "jamba"]
)
def test_causal_models_of_all_kinds_pass(name: str) -> None:
    assert set(check_model(resolve(name))) <= {DROPOUT}


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


def of_factory(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> ModelSpec:
    """What `resolve` makes of a factory that returns this."""
    objective = SummedLoss(loss, example={"x": torch.zeros(4)})
    return ModelSpec(
        reference="own.py:model", task=OWN, max_positions=None, vocab_size=None,
        factory=lambda: (copy.deepcopy(model), objective), own_objective=objective,
    )  # fmt: skip


def squares(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().sum()


def contrasts(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Every sample against all others."""
    out = model(batch["x"])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)), reduction="sum")


@pytest.mark.parametrize(
    ("layer", "loss", "cause"),
    [
        (nn.BatchNorm1d(8), squares, "in BatchNorm1d `1` samples of a micro-batch change each other"),
        (Centred(), squares, "in Centred `1` samples of a micro-batch change each other"),
        (nn.Identity(), contrasts, "its loss is not a sum over samples"),
    ],
)
def test_what_mixes_the_samples_of_a_micro_batch_is_named(layer: nn.Module, loss: Any, cause: str) -> None:
    (note,) = check_model(of_factory(network(layer), loss))
    assert note.startswith(f"{SPLIT_MATTERS}: {cause}; ")


@pytest.mark.parametrize("layer", [nn.LayerNorm(8), nn.Dropout(0.5), Noisy()])
def test_what_does_not_is_not(layer: nn.Module) -> None:
    assert set(check_model(of_factory(network(layer), squares))) <= {DROPOUT}


class Functional(nn.Module):
    """Dropout without a module of its own."""

    def __init__(self, share: float, *, always: bool = False, in_attention: bool = False) -> None:
        super().__init__()
        self.share, self.always, self.in_attention = share, always, in_attention

    def forward(self, x: Tensor) -> Tensor:
        if self.in_attention:
            share = self.share if self.training else 0.0
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=share)[:, 0]
        return F.dropout(x, p=self.share, training=self.training or self.always)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5), nn.Dropout(0.0), nn.Dropout1d(0.5), nn.AlphaDropout(0.5),
        Functional(0.5), Functional(0.0), Functional(0.5, in_attention=True), Functional(0.0, in_attention=True),
    ],
)  # fmt: skip
def test_dropout_is_said_where_two_seeds_make_two_outputs(layer: nn.Module) -> None:
    model, x = network(layer), torch.randn(8, 4)

    def output(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(x)

    draws = not torch.equal(output(0), output(1))
    assert check_model(of_factory(model, squares)) == ((DROPOUT,) if draws else ())


def test_dropout_of_a_large_model_is_known_by_its_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8000, 8000), nn.Dropout(0.1))
    assert check_model(of_factory(model, squares))[-1] == DROPOUT


def test_a_remedy_is_named_where_it_was_tried_and_helps() -> None:
    spec = of_factory(network(nn.BatchNorm1d(8)), squares)
    (note,) = check_model(spec)
    assert note.endswith("; with --batch-norm frozen, which uses running statistics, they do not")
    assert check_model(spec, "frozen") == ()
    (note,) = check_model(spec, "sync")
    assert note.endswith("; --batch-norm sync takes them over all ranks, so that only the micro-steps matter")
    (note,) = check_model(of_factory(network(nn.BatchNorm1d(8), Centred()), squares))
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
        check_model(of_factory(network(layer), squares), "frozen")
    assert str(caught.value).startswith(said)


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
    assert measured.difference == pytest.approx(
        relative_error(other, larger), rel=1e-4
    )  # digits enough: it is printed with two
    assert measured.difference > 0.1


def test_a_large_model_is_judged_by_its_modules() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8000), nn.BatchNorm1d(8000), nn.Linear(8000, 8000))
    (note,) = check_model(of_factory(model, squares))
    assert note == (f"{SPLIT_MATTERS}: BatchNorm1d `1` normalise by statistics of the samples of a micro-batch")


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
    assert check_model(of_factory(WithSpare(), squares)) == (
        "2 trained parameters (spare.weight, spare.bias) got no gradient from a batch of 8 samples: PyTorch and ZeRO-0 "
        "leave what a whole global batch does not use, ZeRO-1 to 3 continue its weight decay and momentum",
    )
