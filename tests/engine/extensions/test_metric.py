"""A metric of the user's own is what one process computes, for any number of ranks, task and loss."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.ranks import Ranks
from frugal.engine.engine import Engine
from frugal.engine.extensions.metric import Metric
from frugal.errors import RequestError
from frugal.models.losses import predictions
from frugal.models.objectives import SequenceClassification, SummedLoss
from frugal.planning.plan import Plan
from tests.engine.engines import plan_here, running
from tests.engine.gradients import with_bound
from tests.engine.small_models import SkipNet, points, ragged_samples, squared_error, tiny, tiny_gpt2

NUMBER = 23


def accuracy(predicted: list[np.ndarray], labels: list[np.ndarray]) -> float:
    """Changes where samples come in another order: the place of a sample is its weight."""
    weights = np.arange(1, len(labels) + 1)
    right = [(each == label).mean() if len(label) else 0 for each, label in zip(predicted, labels, strict=True)]
    return float((weights * right).sum() / weights.sum())


class Entropy:
    """Two numbers from whole distributions, of which a number a target is kept."""

    def of_logits(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """`(...)`: the entropy of each position."""
        return torch.distributions.Categorical(logits=logits.float()).entropy()

    def __call__(self, kept: list[np.ndarray], labels: list[np.ndarray]) -> dict[str, float]:
        return {"entropy": np.concatenate(kept).mean(), "first": float(kept[0][0])}


def classes() -> list[dict[str, Any]]:
    return [{"input_ids": each["input_ids"], "label": i % 3} for i, each in enumerate(ragged_samples(NUMBER))]


def plan(zero_stage: int = 2, loss: str = "plain") -> Plan:
    return plan_here(zero_stage, 16, tuple(range(3, 3 + dist.get_world_size())), loss=loss)


def evaluated(loss: str, zero_stage: int) -> dict[str, float]:
    """On as many samples as do not divide; runs on ranks."""
    with running(plan(zero_stage, loss)) as engine:
        of_both = [engine.evaluate(ragged_samples(NUMBER), metric).metrics for metric in (accuracy, Entropy())]
    return of_both[0] | of_both[1]


def evaluated_classes() -> dict[str, float]:
    """The same of a classifier; runs on ranks."""
    with running(plan(), tiny("sequence-classification", "bert"), SequenceClassification()) as engine:
        return engine.evaluate(classes(), accuracy).metrics


def by_hand(dtype: torch.dtype) -> tuple[float, float, float]:
    """Plain transformers in one process, every sample by itself: accuracy, mean entropy, the first one."""
    model = tiny_gpt2().to(dtype).eval()
    predicted, entropies, labels = [], [], []
    for sample in ragged_samples(NUMBER):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sample["input_ids"]])).logits[0, :-1]
        label = np.array(sample["labels"])[1:]
        predicted.append(logits.argmax(-1).numpy()[label != -100])
        entropies.append(torch.distributions.Categorical(logits=logits).entropy().numpy()[label != -100])
        labels.append(label[label != -100])
    flat = np.concatenate(entropies)
    return accuracy(predicted, labels), float(flat.mean()), float(flat[0])


@pytest.mark.parametrize(
    ("fixture", "zero_stage"),
    [
        ("three_ranks", 3),
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in (("one_rank", 0), ("two_ranks", 2))),
    ],
)
def test_predictions_are_those_of_plain_transformers_on_any_number_of_ranks(
    fixture: str, zero_stage: int, request: pytest.FixtureRequest
) -> None:
    (right, entropy, first), bound = with_bound(by_hand)
    assert 0 < right < 1
    ranks: Ranks = request.getfixturevalue(fixture)
    for loss in ("plain", "tiled"):
        for metrics in ranks.run(evaluated, loss, zero_stage):
            assert metrics == {
                "accuracy": pytest.approx(right), "entropy": pytest.approx(entropy, rel=bound),
                "first": pytest.approx(first, rel=bound),
            }  # fmt: skip


def test_classes_have_one_prediction_a_sample_and_ranks_change_nothing(one_rank: Ranks, two_ranks: Ranks) -> None:
    (alone,) = one_rank.run(evaluated_classes)
    assert 0 < alone["accuracy"] < 1
    assert two_ranks.run(evaluated_classes) == [alone] * 2


def fails(_predicted: list[np.ndarray], _labels: list[np.ndarray]) -> float:
    raise KeyError("f1")


def returns_text(_predicted: list[np.ndarray], _labels: list[np.ndarray]) -> str:
    return "good"


def refusals() -> list[str]:
    """Return what is said of metrics that do not work; runs on ranks."""
    said = []

    def refused(engine: Engine, samples: list[Any], metric: Any) -> None:
        with pytest.raises(RequestError) as raised:
            engine.evaluate(samples, metric)
        said.append(str(raised.value))

    with running(plan_here(0, 4)) as engine:
        refused(engine, ragged_samples(5), fails)
        refused(engine, ragged_samples(5), returns_text)
    with running(plan_here(0, 4), SkipNet(), SummedLoss(squared_error, example=points(1)[0])) as engine:
        refused(engine, points(5), accuracy)
    return said


def test_a_metric_that_does_not_work_is_named_on_all_ranks(two_ranks: Ranks) -> None:
    here = "tests.engine.extensions.test_metric"
    for said in two_ranks.run(refusals):
        assert said[0] == f"the metric {here}:fails failed\n  because KeyError: 'f1'"
        assert said[1].startswith(f"the metric {here}:returns_text failed\n  because it returned 'good'")
        assert said[2].startswith(f"the metric {here}:accuracy has nothing to be computed of\n")


def test_a_loss_of_your_own_shows_what_it_predicts() -> None:
    with predictions.kept(predictions.most_probable) as keeper:
        predictions.show(torch.tensor([[0.0, 1.0], [3.0, 2.0]]), torch.tensor([1, predictions.IGNORED]))
    assert keeper is not None
    (first, none) = Metric.of(accuracy).taken(keeper, 2)
    assert [each.tolist() for each in (*first, *none)] == [[1], [1], [], []]
    predictions.show(torch.zeros(1, 2), torch.zeros(1))  # nobody keeps it
