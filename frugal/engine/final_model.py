"""The end of a run: choose its final model, evaluate it on data kept for the end, and write it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frugal.checkpoint import loading, manifest, saving
from frugal.config.run_settings import RunSettings
from frugal.data.corpus import RunData, Subset
from frugal.data.stream.samples import SampleStream
from frugal.engine.engine import Engine
from frugal.engine.evaluation import evaluate
from frugal.engine.extensions.best import Best
from frugal.engine.extensions.metric import Metric
from frugal.engine.reports.metrics import Log


def finish(
    engine: Engine, settings: RunSettings, data: RunData, step: int, best: Best, log: Log,
    metric: Metric | None,
) -> None:  # fmt: skip
    """After step number `step`, the last: choose the weights, evaluate them, and write the model. Collective."""
    step = _load_best(engine, settings.checkpoints, best, log) if settings.save_best_model else step
    evaluate_at_the_end(engine, data, step, log, metric)
    folder = saving.save_model(engine, settings.out / "model", data.tokenizer, uses_cache=data.spec.uses_cache)
    log.say(f"model written to {folder}")


def _load_best(engine: Engine, checkpoints: Path, best: Best, log: Log) -> int:
    """Load the weights of the best of the checkpoints, and return its number of steps."""
    path = saving.best_of(manifest.checkpoints_in(checkpoints), best.criterion.score)
    loaded = loading.load(engine, checkpoints, only=None if path is None else path.name)
    log.say(f"the model is that of step {loaded.progress.step}, the best by {best.criterion.name or 'the metric'}")
    return loaded.progress.step


def evaluate_at_the_end(
    engine: Engine, data: RunData, total_steps: int, log: Log, metric: Metric | None = None
) -> None:
    """Evaluate the test data, and as many training samples as there were for validation."""
    if len(data.test) == 0:
        return
    known: Sequence[Any] = ()
    if not isinstance(data.training, SampleStream):  # which is read once
        known = Subset.drawn_from(data.training, len(data.validation) or len(data.test))
    for name, samples in (("train", known), ("test", data.test)):
        if len(samples) > 0:
            log.evaluation(total_steps, evaluate(engine, samples, metric), of=name)
