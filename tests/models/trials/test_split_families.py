"""Losses and modules whose gradient depends on the split are found by running them; ordinary ones raise no alarm."""

import copy
import logging
import random
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.checkpoint import checkpoint

from bench.plans import plan_by_hand
from bench.ranks import Ranks
from frugal.engine.engine import initialize
from frugal.errors import RequestError
from frugal.models.objectives import SummedLoss
from frugal.models.resolve import resolve
from frugal.models.trials.model_check import check_model
from frugal.planning.report import DRAWN_PARTS, DRAWS, DROPOUT, LAYER_DROP, SPLIT_MATTERS
from tests.models.trials.test_model_check import of_factory

pytestmark = pytest.mark.usefixtures("offline")

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

PAIR = {"a": torch.zeros(6), "b": torch.zeros(6)}
TEXT = {"a": torch.zeros(5, dtype=torch.long), "b": torch.zeros(5, dtype=torch.long)}
LABELLED = {"a": torch.zeros(6), "y": torch.tensor(0)}
TAGGED = {"ids": torch.zeros(5, dtype=torch.long), "labels": torch.zeros(5, dtype=torch.long)}


def notes(model: nn.Module, loss: Loss, example: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return what a plan says of it."""
    return check_model(of_factory(model, loss, example))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8))


class Words(nn.Module):
    """Reads tokens."""

    def __init__(self, num_classes: int = 8, *, each: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.each = nn.Embedding(11, 8), nn.Linear(8, num_classes), each

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x if self.each else x.mean(1))


# Losses that compare samples


def both(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    return F.normalize(model(batch["a"]), dim=1), F.normalize(model(batch["b"]), dim=1)


def in_batch_negatives(model: nn.Module, batch: Batch) -> Tensor:
    a, b = both(model, batch)
    return F.cross_entropy(10 * a @ b.T, torch.arange(len(a)), reduction="sum")


def supervised_contrastive(model: nn.Module, batch: Batch) -> Tensor:
    z = F.normalize(model(batch["a"]), dim=1)
    alike = (batch["y"][:, None] == batch["y"][None]).float()
    return -(F.log_softmax(z @ z.T, dim=1) * alike / alike.sum(1, keepdim=True)).sum()


def barlow_twins(model: nn.Module, batch: Batch) -> Tensor:
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in both(model, batch))
    return (a.T @ b / len(a) - torch.eye(a.shape[1])).square().sum() * len(a)


def mixup(model: nn.Module, batch: Batch) -> Tensor:
    share = np.random.beta(0.4, 0.4)
    share, others = 0.5 + share / 4, torch.randperm(len(batch["a"]))
    return model(share * batch["a"] + (1 - share) * batch["a"][others]).square().sum()


def mean_of_the_batch(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["a"]).square().mean()


def mean_of_targets(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"]) * len(batch["ids"])


COMPARING: list[tuple[Callable[[], nn.Module], Loss, Mapping[str, Tensor]]] = [
    *((encoder, loss, PAIR) for loss in (in_batch_negatives, barlow_twins, mixup, mean_of_the_batch)),
    (encoder, supervised_contrastive, LABELLED), (Words, in_batch_negatives, TEXT),
    (lambda: Words(each=True), mean_of_targets, TAGGED),
]  # fmt: skip


@pytest.mark.parametrize(("make", "loss", "example"), COMPARING)
def test_a_loss_that_compares_samples_is_found(
    make: Callable[[], nn.Module], loss: Loss, example: Mapping[str, Tensor]
) -> None:
    cause = "in 2 Linear (the first is `0`) samples of a micro-batch change each other"  # its inputs are mixed before
    cause = cause if loss is mixup else "its loss is not a sum over samples"
    note, *others = notes(make(), loss, example)
    assert others == [DRAWS] * (loss is mixup)  # it draws whom a sample is mixed with
    assert note.startswith(f"{SPLIT_MATTERS}: {cause}; gradients of a small model of this kind differ by ")


# Modules that a forward changes


class Codebook(nn.Module):
    """VQ-VAE's, whose codes are moving averages (https://arxiv.org/abs/1711.00937, appendix A.1)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            self.codes.index_add_(0, nearest, 0.05 * (x - chosen))
        return x + 0.5 * (chosen.clone() - x).detach() + (x - chosen).square()


class Queue(nn.Module):
    """MoCo's negatives of earlier micro-batches (https://arxiv.org/abs/1911.05722), in a deque."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[Tensor] = deque([torch.randn(2, 8)], maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        out = (x @ torch.cat(list(self.queue)).T).logsumexp(1)
        self.queue.append(x[:2].detach())
        return out


class Centre(nn.Module):
    """DINO's (https://arxiv.org/abs/2104.14294), bound anew by each forward and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        out = F.softmax((x - self.centre) / 0.1, dim=1)
        self.centre = 0.9 * self.centre + 0.1 * x.detach().mean(0)
        return out


class Teacher(nn.Module):
    """A moving average of the weights, taken by each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.student.weight, 0.001)
        return self.student(x) - self.teacher(x)


class Average(Teacher):
    """One that nothing reads until training is over."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return self.student(x)


class Annealed(nn.Module):
    """A factor that grows with the number of forwards."""

    step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return x * min(1.0, self.step / 1000)


@pytest.mark.parametrize(
    ("layer", "cause"),
    [
        (spectral_norm(nn.Linear(8, 8)), "Linear `1`"),
        (parametrizations.spectral_norm(nn.Linear(8, 8)), "_SpectralNorm `1.parametrizations.weight.0`"),
        (nn.Sequential(nn.BatchNorm1d(8).eval(), spectral_norm(nn.Linear(8, 8))), "Linear `1.1`"),
        (Codebook(), "Codebook `1`"),
        (Queue(), "Queue `1`"),
        (Centre(), "Centre `1`"),
        (Teacher(), "Linear `1.teacher`"),
        (Average(), "Linear `1.teacher`"),
        (Annealed(), "Annealed `1`"),
    ],
)
def test_a_module_that_a_forward_changes_is_named(layer: nn.Module, cause: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), layer)
    before = copy.deepcopy(model.state_dict())
    said = notes(model, lambda model, batch: model(batch["a"]).square().sum(), PAIR)
    lasts = "parameters (it lasts at ZeRO-0 only, of frozen ones below ZeRO-3)"
    what = lasts if isinstance(layer, Average) else "what the next one computes"
    assert any(note.startswith(f"{SPLIT_MATTERS}: in {cause} a forward changes {what}") for note in said), said
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Which raise no alarm


class Kept(nn.Module):
    """Keeps numbers that no later forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.mean, self.calls, self.last = 0.9 * self.mean + x.detach().mean(0), self.calls + 1, x
        return x


def squares(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["a"]).square().sum()


def diffusion(model: nn.Module, batch: Batch) -> Tensor:
    """Noise at times that are drawn for each sample (https://arxiv.org/abs/2006.11239)."""
    times = torch.randint(0, 100, (len(batch["a"]), 1)) / 100
    noise = torch.randn_like(batch["a"])
    return (model((1 - times) * batch["a"] + times * noise)[:, :6] - noise).square().sum()


def variational(model: nn.Module, batch: Batch) -> Tensor:
    mean, log_variance = model(batch["a"]).chunk(2, dim=1)
    drawn = mean + torch.distributions.Normal(0.0, 1.0).sample(mean.shape) * (log_variance / 2).exp()
    return drawn.square().sum() + 0.5 * (mean.square() + log_variance.exp() - log_variance).sum()


def cosine(model: nn.Module, batch: Batch) -> Tensor:
    return (1 - F.cosine_similarity(*both(model, batch))).sum()


def classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["a"]), batch["y"], label_smoothing=0.1) * len(batch["y"])


def next_words(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], reduction="sum")


def bernoulli_paths(model: nn.Module, batch: Batch) -> Tensor:
    kept = batch["a"].new_empty(len(batch["a"]), 1).bernoulli_(0.8)
    return (model(batch["a"]) * kept / 0.8).square().sum()


def test_a_loss_that_random_samples_do_not_move_is_not_said_to_be_fine() -> None:
    def far_apart(model: nn.Module, batch: Batch) -> Tensor:
        return F.relu(1e-6 - F.pdist(model(batch["a"]))).square().sum() + 0 * model(batch["a"]).sum()

    (note,) = notes(encoder(), far_apart, PAIR)
    assert note.endswith("a small one fails: RuntimeError: the loss of random samples has no gradient")


ORDINARY: list[tuple[Callable[[], nn.Module], Loss, Mapping[str, Tensor]]] = [
    *((encoder, loss, PAIR) for loss in (squares, diffusion, variational, cosine, bernoulli_paths)),
    (encoder, classes, LABELLED),
    (lambda: Words(each=True), next_words, TAGGED),
    (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.ReLU()), squares, PAIR),
    (lambda: parametrizations.orthogonal(nn.Linear(6, 8)), squares, PAIR),
    (lambda: nn.Sequential(nn.Linear(6, 8), Kept()), squares, PAIR),
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.LayerNorm(8)), squares, PAIR),
]


@pytest.mark.parametrize(("make", "loss", "example"), ORDINARY)
def test_a_loss_of_each_sample_alone_raises_no_alarm(
    make: Callable[[], nn.Module], loss: Loss, example: Mapping[str, Tensor]
) -> None:
    assert set(notes(make(), loss, example)) <= {DROPOUT, DRAWS}


# Parameters that are left out at random


class Skips(nn.Module):
    """Leaves a layer out if `draw` says so."""

    def __init__(self, draw: Callable[[], bool]) -> None:
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(6, 6), nn.Linear(6, 6), draw

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.draw() else self.second(x)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: bool(torch.rand([]) < 0.05),
        lambda: bool(torch.bernoulli(torch.tensor(0.1))),
        lambda: int(torch.randint(0, 3, ())) == 0,
        lambda: random.random() < 0.05,
        lambda: random.uniform(0, 1) < 0.05,
        lambda: bool(np.random.random() < 0.05),
        lambda: bool(np.random.uniform(0, 1) < 0.05),
        lambda: bool(np.random.rand() > 0.95),
    ],
)
def test_layers_that_are_left_out_at_random_are_named(draw: Callable[[], bool]) -> None:
    (note,) = notes(Skips(draw), squares, PAIR)
    assert note.startswith(f"{DRAWN_PARTS}: each rank leaves out `second.weight` and 1 more or not in each micro-batch")


def test_layers_that_are_left_out_by_the_data_are_not_drawn() -> None:
    model = Skips(lambda: False)
    model.draw = lambda: bool(model.second.weight.sum() < -100)
    assert notes(model, squares, PAIR) == ()


class Twice(nn.Module):
    """Uses a layer twice, recomputed."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.layer, self.use_reentrant = nn.Linear(6, 6), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.use_reentrant)
        return x


def test_a_layer_that_is_recomputed_twice_in_the_reentrant_way_is_refused_under_stages_that_cannot() -> None:
    spec = of_factory(Twice(use_reentrant=True), squares, PAIR)
    with pytest.raises(RequestError) as caught:
        check_model(spec)
    assert caught.value.what == "own.py:model cannot be trained under ZeRO-2 or 3"
    assert "the gradient of `layer.weight` arrives more than once in a backward" in caught.value.because[0]
    assert str(caught.value).endswith("hint: checkpoint(..., use_reentrant=False), or --zero-stage 1 --precision fp32")
    assert check_model(spec, has_low_stage=True) == ()
    assert notes(Twice(use_reentrant=False), squares, PAIR) == ()


@pytest.mark.parametrize("name", ["m2m_100", pytest.param("nllb-moe", marks=pytest.mark.exhaustive)])
def test_layer_drop_is_off_and_said(name: str) -> None:
    spec = resolve(name)
    assert spec.config.encoder_layerdrop == spec.config.decoder_layerdrop == 0
    said, had = check_model(spec), "encoder_layerdrop 0.05 and decoder_layerdrop 0.05"
    assert f"{LAYER_DROP}: {had} set to 0, because ranks would leave out different layers" in said
    assert not any(note.startswith(DRAWN_PARTS) for note in said)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["opt", "bart", "mbart", "marian", "pegasus", "blenderbot", "m2m_100", "plbart"])
def test_layer_drop_of_any_model_of_transformers_is_off(name: str) -> None:
    config = resolve(name).config
    settings = [setting for setting in vars(config) if "layerdrop" in setting]
    for setting in settings:
        setattr(config, setting, 0.2)
    from frugal.models.resolve import _from_config

    try:
        spec = _from_config(name, config, None)
    except RequestError as error:
        pytest.fail(str(error))
    assert {setting for setting, _ in spec.layer_drop} == set(settings) and settings
    assert not any(note.startswith(DRAWN_PARTS) for note in check_model(spec))


# From Python, under a plan for another task


def normalised() -> nn.Module:
    return nn.Sequential(encoder(), nn.BatchNorm1d(8))


def said_by_initialize(make: Callable[[], nn.Module], loss: Loss) -> list[str]:
    """Runs on ranks."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # a list is enough
    logging.getLogger("frugal").addHandler(handler)
    try:
        plan = plan_by_hand(world_size=1, global_batch=4, micro_batch=2, zero_stage=2)
        initialize(make(), plan, SummedLoss(loss, example=PAIR)).destroy()
    except RequestError as error:
        said.append(str(error))
    finally:
        logging.getLogger("frugal").removeHandler(handler)
    return said


def recomputed_twice() -> nn.Module:
    return Twice(use_reentrant=True)


def test_an_objective_of_ones_own_under_a_plan_for_another_task_is_tried(one_rank: Ranks) -> None:
    ((note,),) = one_rank.run(said_by_initialize, encoder, in_batch_negatives)
    assert note.startswith(f"{SPLIT_MATTERS}: its loss is not a sum over samples; ")
    assert one_rank.run(said_by_initialize, encoder, cosine) == [[]]
    ((of_norms,),) = one_rank.run(said_by_initialize, normalised, squares)
    assert of_norms.startswith(f"{SPLIT_MATTERS}: 1 BatchNorm modules take statistics")
    ((refusal,),) = one_rank.run(said_by_initialize, recomputed_twice, squares)
    assert refusal.startswith("Twice cannot be trained under ZeRO-2 or 3\n")
