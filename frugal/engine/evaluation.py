"""The evaluations of a run: the best of them, by the loss or a metric, and early stopping because of it."""

import math
from dataclasses import dataclass, field, replace

from frugal.checkpoint.progress import BestSoFar, Progress
from frugal.config.run_settings import BestMode
from frugal.errors import refuse

LOSS = "loss"


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
            refuse(
                (
                    metrics and self.name not in metrics,
                    f"--best {self.name} is nothing that was measured",
                    f"there is {', '.join([LOSS, *metrics])}",
                    None,
                )
            )
            value = metrics.get(self.name)
        sign = 1 if self.mode == "min" else -1
        return None if value is None or math.isnan(value) else sign * value

    def __str__(self) -> str:
        return f"{self.mode} {self.name or 'metric'}"


class Best:
    """The best evaluation of a run so far, beginning with the one in a checkpoint, and how many have come since."""

    def __init__(self, criterion: Criterion, patience: int | None, start: BestSoFar | None = None) -> None:
        self.criterion, self._patience = criterion, patience
        self.so_far = start if start is not None and start.by == str(criterion) else None

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
