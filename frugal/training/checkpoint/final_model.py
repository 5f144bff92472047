"""The end of a run: what its final model is, what it makes of data kept for the end, and where it is written."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from frugal.training.checkpoint import loading, manifest, saving
from frugal.training.data.corpus import Subset
from frugal.training.data.stream.samples import SampleStream
from frugal.training.losses.evaluation import evaluate

if TYPE_CHECKING:
    from frugal.training.checkpoint.held_folder import HeldFolder
    from frugal.training.data.corpus import RunData
    from frugal.training.engine import Engine
    from frugal.training.extensions.best import Best
    from frugal.training.extensions.metric import Metric
    from frugal.training.reports.metrics import Log


def finish(
    engine: "Engine", held: "HeldFolder", data: "RunData", step: int, best: "Best", log: "Log",
    metric: "Metric | None",
) -> None:  # fmt: skip
    """After step number `step`, the last: choose the weights, evaluate them, and write the model. Collective."""
    step = load_best(engine, held, best, log) if held.settings.save_best_model else step
    evaluate_at_the_end(engine, data, step, log, metric)
    log.say(f"model written to {save(engine, held, data)}")


def load_best(engine: "Engine", held: "HeldFolder", best: "Best", log: "Log") -> int:
    """Go back to the weights of the best checkpoint, which become the final model; the steps that it had."""
    folder = held.settings.checkpoints
    path = saving.best_of(manifest.checkpoints_in(folder), best.criterion.score)
    loaded = loading.load(engine, folder, only=None if path is None else path.name)
    log.say(f"the model is that of step {loaded.progress.step}, the best by {best.criterion.name or 'the metric'}")
    return loaded.progress.step


def evaluate_at_the_end(
    engine: "Engine", data: "RunData", total_steps: int, log: "Log", metric: "Metric | None" = None
) -> None:
    """What it makes of data kept for the end, and of as many samples that it knows as it was validated with."""
    if len(data.test) > 0:
        known: Sequence[Any] = ()
        if not isinstance(data.training, SampleStream):  # which is read once
            known = Subset.drawn_from(data.training, len(data.validation) or len(data.test))
        for name, samples in (("train", known), ("test", data.test)):
            if len(samples) == 0:
                continue
            log.evaluation(total_steps, evaluate(engine, samples, metric), of=name)


def save(engine: "Engine", held: "HeldFolder", data: "RunData") -> Path:
    """Where the trained model is; in a folder that was deleted, it is not."""
    if not held.follow(engine.votes):
        held.replace(saving.beside(held.settings.out))
    return saving.save_model(engine, held.settings.out / "model", data.tokenizer, uses_cache=data.spec.uses_cache)
