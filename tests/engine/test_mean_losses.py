"""Modules whose forward returns a mean loss are trained on that of the whole global batch, or refused in words."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.ranks import Ranks
from frugal.errors import RequestError
from frugal.models.objectives import MeanLoss, SummedLoss
from frugal.models.resolve import resolve
from frugal.models.trials.model_check import check_model
from frugal.planning.report import SPLIT_MATTERS
from tests.engine.engines import gradient_of_step, plan_here
from tests.engine.gradients import SGD, Gradient, relative_error, with_bound
from tests.engine.mean_modules import REFUSED, draw_mean

IN_EVERY_RUN, NUMBER = range(8), 100


def stepped(seeds: range) -> list[Gradient]:
    """Return the gradients of one step for each seed. Runs on ranks."""
    found = []
    for seed in seeds:
        case = draw_mean(seed)
        objective = MeanLoss(example=case.samples[0])
        plan = plan_here(seed % 4, len(case.samples), 1 + seed % 3, SGD)
        found.append(gradient_of_step(plan, case.make(), case.samples, objective))
    return found


@pytest.mark.parametrize(
    "seeds", [IN_EVERY_RUN, pytest.param(range(len(IN_EVERY_RUN), NUMBER), marks=pytest.mark.exhaustive)]
)
def test_the_gradient_is_that_of_one_batch_in_plain_torch(seeds: range, two_ranks: Ranks) -> None:
    (ours, _) = two_ranks.run(stepped, seeds)
    for seed, gradient in zip(seeds, ours, strict=True):
        case = draw_mean(seed)
        exact, bound = with_bound(case.plain_gradient)
        assert relative_error(gradient, exact) <= bound, case.words


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_loss_is_refused_with_what_was_returned(kind: str) -> None:
    case = draw_mean(len(kind), {kind: REFUSED[kind]})
    objective = MeanLoss(example=case.samples[0])
    with pytest.raises(RequestError, match=r"forward returns (no loss to train by|several losses)") as caught:
        objective.loss_sum(case.make(), objective.collate(case.samples))
    is_cut = kind in ("a float", "no gradient", "the accuracy first")
    assert str(caught.value).count(".detach()") == (is_cut and kind != "the accuracy first")
    assert "hint: return" in str(caught.value)


class Tokens(nn.Module):
    """A language model; its loss is what `mean` makes of logits and labels."""

    def __init__(self, mean: Any) -> None:
        super().__init__()
        self.embedding, self.head, self.mean = nn.Embedding(20, 8), nn.Linear(8, 20), mean

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.mean(self.head(self.embedding(input_ids)).transpose(1, 2), labels)
        return loss


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[..., :-1], labels[:, 1:])


def leaving_out(seed: int) -> tuple[Any, str]:
    """A mean that leaves another value than -100 out, of all positions or all but the first, and the code of its
    count."""
    draw = random.Random(seed)
    value, begin = draw.choice((-1, 0, 7, 19)), draw.randrange(2)

    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            logits[..., : labels.shape[1] - begin], labels[:, begin:], ignore_index=value
        )

    return mean, f'(batch["labels"]{"[:, 1:]" * begin} != {value}).sum()'


def by_sample(logits: Tensor, labels: Tensor) -> Tensor:
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


EXAMPLE = {"input_ids": torch.zeros(8, dtype=torch.long), "labels": torch.zeros(8, dtype=torch.long)}


@pytest.mark.parametrize(
    ("mean", "count"),
    [
        (nn.functional.cross_entropy, None),
        (shifted, '(batch["labels"][:, 1:] != -100).sum()'),
        (by_sample, 'len(batch["labels"])'),
        *map(leaving_out, range(3)),
        *(pytest.param(*leaving_out(seed), marks=pytest.mark.exhaustive) for seed in range(3, 20)),
    ],
)
@pytest.mark.parametrize("length", [8, 1024])
def test_a_mean_over_other_targets_is_refused_with_the_count_that_is_right(
    length: int, mean: Any, count: str | None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count of the hint is taken as it is written, and accepted; also of samples where one target hardly counts."""
    example = {name: torch.zeros(length, dtype=torch.long) for name in EXAMPLE}
    monkeypatch.setattr("tests.engine.test_mean_losses.made", lambda: (Tokens(mean), example))
    spec = resolve("tests.engine.test_mean_losses:made")
    if count is None:
        assert check_model(spec) == (COUNTED.format("the entries of `labels` that are not -100"),)
        return
    with pytest.raises(RequestError) as caught:
        check_model(spec)
    assert str(caught.value).endswith(f"frugal.MeanLoss(example=..., count=lambda batch: {count})")
    right = MeanLoss(example=example, count=eval(f"lambda batch: {count}"))
    monkeypatch.setattr("tests.engine.test_mean_losses.made", lambda: (Tokens(mean), right))
    spec = resolve("tests.engine.test_mean_losses:made")
    assert check_model(spec) == (COUNTED.format("what its count says"),)


class Masked(nn.Module):
    """Its loss is a mean over the positions that a mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (self.layer(x).square()[..., 0] * mask).sum() / mask.sum().clamp(min=1)


class Weighted(nn.Module):
    """Classes weigh differently in its loss, which is a mean over their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x), y, weight=torch.tensor([1.0, 5.0], device=x.device))


class Contrastive(Weighted):
    """Compares the samples of a micro-batch with each other, though they have classes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        codes = self.layer(x)
        return nn.functional.cross_entropy(codes @ codes.T, torch.arange(len(x), device=x.device)) + 0 * y.sum()


class Decoder(Weighted):
    """Compares its outputs with numbers from 0 to 1; `reduction` says how they are added up."""

    reduction = "mean"

    def forward(self, x: Tensor) -> Tensor:
        own = nn.functional.binary_cross_entropy
        return own(self.layer(x).sigmoid().repeat(1, 2), x, reduction=self.reduction)


class SummedDecoder(Decoder):
    reduction = "sum"


class Speech(Weighted):
    """Aligns texts with sounds. The largest example has all classes, positions and times."""

    def forward(self, x: Tensor, text: Tensor, text_length: Tensor) -> Tensor:
        logits = self.layer(x)[None].expand(6, -1, -1).log_softmax(-1)
        return nn.functional.ctc_loss(logits, text, torch.full_like(text_length, 6), text_length, zero_infinity=True)


class TwoTasks(Weighted):
    """Adds the means of two losses, each over the samples that have its label."""

    def forward(self, x: Tensor, y: Tensor, size: Tensor) -> Tensor:
        codes, known = self.layer(x), ~size.isnan()
        error = (codes[:, 0] - size.nan_to_num()).square() * known
        return nn.functional.cross_entropy(codes, y) + error.sum() / known.sum().clamp(min=1)


class Regions(Weighted):
    """Leaves out what is of no region, under a name that is none of labels."""

    def forward(self, x: Tensor, region: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.layer(x).transpose(1, 2), region, ignore_index=255)


class Rooted(Weighted):
    """Takes the root of a mean, beside a mean of each sample that weighs more."""

    def forward(self, x: Tensor) -> Tensor:
        codes = self.layer(x)
        return codes.tanh().mean() + 0.1 * codes.square().mean().sqrt()


class LastOfEach(Weighted):
    """Reads each sample up to where its marks end."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        last = mask.long().sum(1) - 1
        return self.layer(x)[torch.arange(len(x)), last].square().mean()


class Forces(Weighted):
    """Learns the slope of its output."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.layer(x).sigmoid().sum(), x, create_graph=True)
        return slope.square().mean()


class Ragged(Weighted):
    """Takes the mean of each sample over what is no padding; without `marks`, over padding, too."""

    def forward(self, x: Tensor, marks: Tensor | None = None) -> Tensor:
        shown = torch.ones_like(x[..., 0]) if marks is None else marks
        return ((self.layer(x).square().sum(2) * shown).sum(1) / shown.sum(1)).mean()


def padded(samples: list[Any]) -> dict[str, Tensor]:
    x = nn.utils.rnn.pad_sequence([sample["x"] for sample in samples], batch_first=True, padding_value=1.0)
    return {"x": x}


def padded_and_marked(samples: list[Any]) -> dict[str, Tensor]:
    marks = nn.utils.rnn.pad_sequence([torch.ones(len(sample["x"])) for sample in samples], batch_first=True)
    return {**padded(samples), "marks": marks}


def joined(samples: list[Any]) -> dict[str, Tensor]:
    """All rows of all samples one below the other, and of which sample each is."""
    numbers = [torch.full((len(sample["x"]),), number) for number, sample in enumerate(samples)]
    return {"x": torch.cat([sample["x"] for sample in samples]), "of": torch.cat(numbers)}


class Joined(Weighted):
    """Adds up each sample's rows."""

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        added = torch.zeros(int(of.max()) + 1, 2).index_add(0, of, self.layer(x))
        return added.sigmoid().sum(1).mean()


def of_ragged(collate: Any) -> MeanLoss:
    return MeanLoss(example={"x": torch.zeros(6, 4)}, collate=collate, count=lambda batch: len(batch["x"]))


def of_joined() -> MeanLoss:
    return MeanLoss(example={"x": torch.zeros(6, 4)}, collate=joined, count=lambda batch: batch["of"].max() + 1)


X = torch.zeros(4)
ONES = torch.ones(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("module", "example", "count"),
    [
        (Masked, {"x": torch.zeros(4), "mask": True}, 'hint: {}(batch["mask"] != 0).sum())'),
        (Masked, {"x": torch.zeros(6, 4), "mask": torch.ones(6, dtype=torch.bool)}, '{}(batch["mask"] != 0).sum())'),
        (Masked, {"x": torch.zeros(6, 4), "mask": torch.ones(6, dtype=torch.long)}, '{}(batch["mask"] != 0).sum())'),
        (Weighted, {"x": X, "y": 0}, SPLIT_MATTERS),
        (Contrastive, {"x": X, "y": 0}, SPLIT_MATTERS),
        (Decoder, {"x": X}, None),
        (SummedDecoder, {"x": X}, "hint: return their mean: divide it by the number of samples in forward"),
        (TwoTasks, {"x": X, "y": 0, "size": 0.0}, f"where samples lack `y` or `size` (-100 or NaN), {SPLIT_MATTERS}"),
        (
            Regions,
            {"x": torch.zeros(6, 4), "region": torch.zeros(6, dtype=torch.long)},
            '{}(batch["region"] != 255).sum())',
        ),
        (Rooted, {"x": torch.zeros(400, 4)}, SPLIT_MATTERS),
        (LastOfEach, {"x": torch.zeros(6, 4), "mask": torch.ones(6)}, None),
        (Forces, {"x": X}, None),
        (Ragged, of_ragged(padded_and_marked), None),
        (Ragged, of_ragged(padded), SPLIT_MATTERS),
        (Joined, of_joined(), None),
        (Speech, {"x": X, "text": ONES, "text_length": 3}, None),
    ],
)
def test_what_a_mean_is_over_is_found_for_marks_classes_fractions_and_lengths(
    module: Any, example: Any, count: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.engine.test_mean_losses.made", lambda: (module(), example))
    spec = resolve("tests.engine.test_mean_losses:made")
    if count is None or SPLIT_MATTERS in count:
        said = [note.split(":")[0] for note in check_model(spec)[1:]]
        assert said == [count] * (count is not None)
        return
    with pytest.raises(RequestError) as caught:
        check_model(spec)
    assert str(caught.value).endswith(count.format("return module, frugal.MeanLoss(example=..., count=lambda batch: "))


COUNTED = "the loss is what forward returns, taken as a mean over {}"


def made() -> Any:
    """Replaced by each test."""


WRONG_SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "a missing value": ({"x": [0.0] * 3, "t": 1}, "a sample has no `y`\n  because it has x, t, and the example x, y"),
    "a fraction for a class": ({"x": [0.0] * 3, "y": 0.5}, "`y` of a sample is torch.float32 of shape ()"),
    "a list for a number": ({"x": [0.0] * 3, "y": [1]}, "`y` of a sample is torch.int64 of shape (1,)"),
    "words": ({"x": [0.0] * 3, "y": "one"}, "`y` of a sample is no tensor"),
    "another length": ({"x": [0.0] * 2, "y": 1}, "samples cannot be put into one batch"),
}


@pytest.mark.parametrize("kind", WRONG_SAMPLES)
@pytest.mark.parametrize("objective", [SummedLoss, MeanLoss])
def test_samples_unlike_the_example_are_refused(kind: str, objective: Any) -> None:
    sample, said = WRONG_SAMPLES[kind]
    made = objective(lambda model, batch: model(batch["x"]).mean(), example={"x": torch.zeros(3), "y": 0})
    with pytest.raises(RequestError) as caught:
        made.collate([{"x": torch.zeros(3), "y": 2}, sample])
    assert str(caught.value).startswith(said) and "\nhint: " in str(caught.value)


def test_samples_take_the_types_of_the_example_and_nothing_else_goes_along() -> None:
    made = MeanLoss(example={"x": torch.zeros(2, dtype=torch.float16), "y": 0})
    batch = made.collate([{"name": "clip", "y": True, "x": [1, 2]}, ([0.5, 0.25], 7)])
    assert {name: value.tolist() for name, value in batch.items()} == {
        "x": [[1.0, 2.0], [0.5, 0.25]], "y": [1, 7], "real": 1.0,
    }  # fmt: skip
    assert (batch["x"].dtype, batch["y"].dtype) == (torch.float16, torch.int64)
