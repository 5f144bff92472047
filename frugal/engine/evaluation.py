"""The mean loss on any number of samples, the same on any number of ranks, and a metric of the user's own.

What the random number generators would have drawn next is put back after it. `Best` compares the evaluations of a run,
by the loss or a metric, and stops it early.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

from frugal.checkpoint.progress import BestSoFar, Progress
from frugal.checkpoint.random_state import generator_states, restore_generators
from frugal.config.run_settings import BestMode, RunSettings
from frugal.data.batches import pin, prefetch, share
from frugal.engine.extensions.metric import Metric
from frugal.engine.oom_limits import OutOfMemory, recovery
from frugal.engine.oom_retry import abandon
from frugal.engine.train_step import Stepper
from frugal.errors import RequestError
from frugal.models import transformers_internals
from frugal.models.losses import predictions
from frugal.models.losses.predictions import Kept
from frugal.models.objectives import Sample

logger = logging.getLogger("frugal")


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over `targets` in `samples` samples, and what a metric of the user's own says of them, by name."""

    loss: float
    targets: int
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Return exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 709 else math.inf


def evaluate(engine: Stepper, samples: Sequence[Sample], metric: Metric | None = None) -> Evaluation:
    """Return the model's loss on `samples`, the same sequence on every rank. Collective; dropout is off meanwhile.

    The samples are cut into micro-batches like a global batch, under the same limits, so that a forward takes no more
    than one of training, which also keeps what backward needs. Where memory runs out on a rank all the same, all of it
    is run again in smaller ones. Every sample is in exactly one micro-batch; a rank whose own is empty
    runs the objective's dummy, because ZeRO-3 communicates in every forward. Sums and counts travel in fp64, so what
    differs from one process is the rounding of each micro-batch's own sum.

    Raises:
        RequestError: no sample, or no target in any of them; or the metric failed.
        OutOfMemoryError: a single sample is too large.
    """
    if len(samples) == 0:
        raise RequestError(
            "there is no sample to evaluate on", hint="give validation data, or a larger part of the data"
        )
    before = generator_states(engine.device)
    while True:
        engine.zero.remember()
        cut = share(samples, engine.adaptive_limits.evaluation, engine.group)
        outcome = engine.guard.attempt(partial(_evaluated, engine, samples, cut.places, metric))
        if not isinstance(outcome, OutOfMemory):
            break
        abandon(engine.zero)
        restore_generators(before, engine.device)
        message = engine.adaptive_limits.lower_evaluation(outcome, cut.largest)
        if engine.rank == 0:
            logger.warning(message, extra=recovery(outcome))
    engine.cache.after([])
    *sums_here, kept = outcome
    sums = torch.tensor(sums_here, dtype=torch.float64)
    dist.all_reduce(sums, group=engine.votes)
    loss_sum, num_targets = sums.tolist()
    if num_targets == 0:
        raise RequestError(
            "the validation data has no target",
            because=f"every label of its {len(samples)} samples is ignored",
        )
    metrics = {} if metric is None else metric.compute(kept, engine.votes)
    return Evaluation(loss=loss_sum / num_targets, targets=int(num_targets), samples=len(samples), metrics=metrics)


def _evaluated(
    engine: Stepper, samples: Sequence[Sample], shares: Sequence[Sequence[int]], metric: Metric | None
) -> tuple[float, int, dict[int, Kept]]:
    """Run this rank's micro-batches; return the summed loss, the targets, and what the metric needs. Collective."""
    loss = torch.zeros((), dtype=torch.float64, device=engine.device)
    targets = 0
    kept: dict[int, Kept] = {}
    was_training = engine.module.training
    engine.module.eval()
    owns = ([samples[place] for place in places] or [engine.objective.dummy()] for places in shares)
    collated = prefetch((pin(engine.objective.collate(own), engine.device) for own in owns), engine.device)
    try:
        keeping = predictions.kept(None if metric is None else metric.of_logits)
        without_caches = transformers_internals.without_caches(engine.module)
        with torch.no_grad(), without_caches, closing(collated), keeping as keeper:
            for places, batch in zip(shares, collated, strict=True):
                targets += engine.objective.count(batch)
                on_device = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
                loss += engine.objective.loss_sum(engine.deepspeed, on_device)
                if metric is not None and keeper is not None:
                    kept |= zip(places, metric.taken(keeper, len(places)), strict=True)
    finally:
        engine.module.train(was_training)
    return loss.item(), targets, kept


LOSS = "loss"


@dataclass(frozen=True)
class Criterion:
    """The number that selects the best checkpoint: the validation loss, or one of the metric's by its name.

    `name`: None is the first number of the metric.
    """

    name: str | None
    mode: BestMode

    @classmethod
    def of(cls, best: str | None, metric: str | None) -> "Criterion":
        """Return what --best and --metric ask for: by default the largest first number of the metric, or the loss."""
        name, _, mode = (best or (LOSS if metric is None else "")).partition(":")
        usual: BestMode = "min" if name == LOSS else "max"
        return cls(name or None, {"min": "min", "max": "max"}.get(mode, usual))  # type: ignore[arg-type]  # a mode

    def score(self, progress: Progress | Evaluation) -> float | None:
        """Return the number of an evaluation, negated if the largest is the best; None: not measured, or NaN.

        Raises:
            RequestError: the metric has no number of this name.
        """
        metrics = progress.metrics
        value = progress.loss if isinstance(progress, Evaluation) else progress.validation_loss
        if self.name is None:
            value = next(iter(metrics.values()), None)
        elif self.name != LOSS:
            if metrics and self.name not in metrics:
                raise RequestError(
                    f"--best {self.name} is nothing that was measured",
                    because=f"there is {', '.join([LOSS, *metrics])}",
                )
            value = metrics.get(self.name)
        if value is None or math.isnan(value):
            return None
        return value if self.mode == "min" else -value

    def __str__(self) -> str:
        return f"{self.mode} {self.name or 'metric'}"


class Best:
    """The best evaluation of a run so far, beginning with the one in a checkpoint, and how many have come since."""

    def __init__(self, settings: RunSettings, start: Progress) -> None:
        self.criterion = Criterion.of(settings.best, settings.metric)
        self._patience = settings.patience
        self.so_far = start.best if start.best is not None and start.best.by == str(self.criterion) else None

    def after(self, step: int, evaluation: Evaluation) -> bool:
        """Return whether the evaluation after `step` steps is the best so far. Raises as `Criterion.score`."""
        score, before, sign = self.criterion.score(evaluation), self.so_far, 1 if self.criterion.mode == "min" else -1
        if score is not None and (before is None or score < sign * before.value):
            self.so_far = BestSoFar(by=str(self.criterion), value=sign * score, step=step, num_since=0)
            return True
        if before is not None:
            self.so_far = replace(before, num_since=before.num_since + 1)
        return False

    @property
    def is_over(self) -> bool:
        """Return whether the last `patience` evaluations brought nothing better."""
        return self._patience is not None and self.so_far is not None and self.so_far.num_since >= self._patience

    @property
    def why_over(self) -> str:
        """The reason of an early stop, in words."""
        assert self.so_far is not None
        return (
            f"stopped early: no evaluation since step {self.so_far.step} had a better {self.criterion.name or 'metric'}"
            f" than {self.so_far.value:.4g} (--patience {self._patience})"
        )
