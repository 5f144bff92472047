"""The best checkpoint by loss or metric, and a run that ends when nothing gets better."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.ranks import Ranks
from bench.runs import records
from frugal.checkpoint import loading, saving
from frugal.checkpoint.progress import Progress
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches
from frugal.engine.evaluation import Best, Criterion, Evaluation
from frugal.errors import RequestError
from tests.engine.engines import plan_here, run_loop, running
from tests.engine.small_models import ragged_samples

SAMPLES = ragged_samples(20)


def measured(value: float, **metrics: float) -> Evaluation:
    return Evaluation(loss=value, targets=1, samples=1, metrics=metrics)


def best_of(settings: RunSettings, progress: Progress) -> Best:
    return Best(Criterion.of(settings.best, settings.metric), settings.patience, progress.best)


def test_the_best_is_the_smallest_loss_or_the_largest_of_a_metric_or_what_was_asked() -> None:
    start = Progress(step=0)
    by_loss = best_of(RunSettings(), start)
    improved = [by_loss.after(step, measured(loss)) for step, loss in enumerate([3.0, 2.0, 2.0, float("nan")])]
    assert improved == [True, True, False, False]
    settings = RunSettings(metric="m.py:scores")
    for asked in (settings, replace(settings, best="error:min")):
        by_metric = best_of(asked, start)
        improved = [
            by_metric.after(step, measured(1.0, f1=f1, error=1 - f1)) for step, f1 in enumerate([0.2, 0.1, 0.3])
        ]
        assert improved == [True, False, True]
    with pytest.raises(RequestError, match="--best recall is nothing that was measured\n  because there is loss, f1"):
        best_of(replace(settings, best="recall"), start).after(1, measured(1.0, f1=0.5))


def test_patience_counts_on_after_a_resume_unless_another_number_is_asked_for() -> None:
    settings = RunSettings(patience=2, eval_every=1)
    best = best_of(settings, Progress(step=0))
    for step, loss in enumerate([3.0, 2.0, 2.5], 1):
        best.after(step, measured(loss))
    assert not best.is_over
    resumed = best_of(settings, Progress(step=3, best=best.so_far))
    resumed.after(4, measured(2.1))
    assert resumed.is_over
    assert resumed.why_over == "stopped early: no evaluation since step 2 had a better loss than 2 (--patience 2)"
    other = best_of(replace(settings, metric="m.py:f1"), Progress(step=3, best=best.so_far))
    assert other.after(4, measured(2.1, f1=0.0))


def worse_after_two(_predicted: list[np.ndarray], _labels: list[np.ndarray]) -> float:
    """A metric that is at its best in the second evaluation, whatever the model."""
    worse_after_two.calls += 1  # type: ignore[attr-defined]  # on the function, as it is called again
    return {1: 0.5, 2: 0.9}.get(worse_after_two.calls, 0.9 - worse_after_two.calls / 100)  # type: ignore[attr-defined]


def train(folder: Path, **changes: Any) -> tuple[list[str], int, list[float], float]:
    """A run that ends early; checkpoints, steps done, its losses, the loss of its best checkpoint. Runs on ranks."""
    worse_after_two.calls = 0  # type: ignore[attr-defined]
    asked = {"steps": 9, "eval_every": 1, "out": folder, "keep": 1, "metric": "m.py:f1", "patience": 3, **changes}
    settings = RunSettings(**asked)
    with running(plan_here(2, 6, 2, {"learning_rate": 1e-2})) as engine:
        evaluate = partial(engine.evaluate, SAMPLES[:5], worse_after_two)
        done = run_loop(engine, GlobalBatches(SAMPLES, global_batch=6), settings, evaluate=evaluate)
        checkpoints = sorted((folder / "checkpoints").glob("step-*"))
        path = saving.best_of(checkpoints, best_of(settings, done).criterion.score)
        loading.load(engine, folder / "checkpoints", only=path.name if path else None)
        loss = engine.evaluate(SAMPLES[:5]).loss
    losses = [record["loss"] for record in records(folder) if record["event"] == "evaluation"]
    return [path.name for path in checkpoints], done.step, losses, loss


def test_a_run_that_gets_no_better_ends_and_its_best_weights_are_kept_and_found_again(
    tmp_path: Path, two_ranks: Ranks
) -> None:
    names, last, losses, of_best = two_ranks.run(train, tmp_path, best="worse_after_two")[0]
    assert last == 5, "the best is after step 2, and patience is 3"
    assert names == ["step-000002", "step-000005"]
    assert of_best == losses[1], "the same weights, in the same order"
    assert min(losses) < losses[1], "the loss would have chosen another"
    evaluations = [record for record in records(tmp_path) if record["event"] == "evaluation"]
    assert [record["metrics"]["worse_after_two"] for record in evaluations[:3]] == [0.5, 0.9, 0.87]
