"""When a run is at its best, by the loss or a metric on the validation samples, and when it is over because of that."""

import math
from dataclasses import dataclass

from frugal.config.run_settings import BestMode, RunSettings
from frugal.errors import RequestError
from frugal.training.checkpoint.progress import BestSoFar, Progress
from frugal.training.losses.evaluation import Evaluation

LOSS = "loss"


@dataclass(frozen=True)
class Criterion:
    """What the best checkpoint is chosen by: the validation loss, or a number of the metric by its name.

    `name`: None is the first number of the metric.
    """

    name: str | None
    mode: BestMode

    @classmethod
    def of(cls, settings: RunSettings) -> "Criterion":
        """As the settings say: usually the largest first number of the metric, without one the smallest loss."""
        name, _, mode = (settings.best or (LOSS if settings.metric is None else "")).partition(":")
        usual: BestMode = "min" if name == LOSS else "max"
        return cls(name or None, {"min": "min", "max": "max"}.get(mode, usual))  # type: ignore[arg-type]  # a mode

    def value(self, loss: float | None, metrics: dict[str, float]) -> float | None:
        """The number that it looks at; None: it was not measured, or is NaN.

        Raises:
            RequestError: the metric has no number of this name.
        """
        if self.name == LOSS:
            value = loss
        elif self.name is None:
            value = next(iter(metrics.values()), None)
        elif metrics and self.name not in metrics:
            raise RequestError(
                f"--best {self.name} is nothing that was measured",
                because=f"there is {', '.join([LOSS, *metrics])}",
            )
        else:
            value = metrics.get(self.name)
        return None if value is None or math.isnan(value) else value

    def score(self, progress: Progress) -> float | None:
        """Of a checkpoint's weights, the smaller the better; None: not measured."""
        value = self.value(progress.validation_loss, progress.metrics)
        return value if value is None or self.mode == "min" else -value

    def is_better(self, value: float, than: float) -> bool:
        """Whether one number is better than another."""
        return value < than if self.mode == "min" else value > than

    def __str__(self) -> str:
        return f"{self.mode} {self.name or 'metric'}"


class Best:
    """The best evaluation of a run so far, and how many have come since; goes on with what a checkpoint kept."""

    def __init__(self, settings: RunSettings, start: Progress) -> None:
        self.criterion = Criterion.of(settings)
        self._patience = settings.patience
        self.so_far = start.best if start.best is not None and start.best.by == str(self.criterion) else None

    def after(self, step: int, evaluation: Evaluation) -> bool:
        """Whether the evaluation after `step` steps is the best so far. Raises as `Criterion.value`."""
        value, before = self.criterion.value(evaluation.loss, evaluation.metrics), self.so_far
        if value is not None and (before is None or self.criterion.is_better(value, before.value)):
            self.so_far = BestSoFar(by=str(self.criterion), value=value, step=step, num_since=0)
            return True
        if before is not None:
            self.so_far = BestSoFar(by=before.by, value=before.value, step=before.step, num_since=before.num_since + 1)
        return False

    @property
    def is_over(self) -> bool:
        """Whether as many evaluations as there is patience for have brought nothing better."""
        return self._patience is not None and self.so_far is not None and self.so_far.num_since >= self._patience

    @property
    def why_over(self) -> str:
        """In words."""
        assert self.so_far is not None
        return (
            f"stopped early: no evaluation since step {self.so_far.step} had a better {self.criterion.name or 'metric'}"
            f" than {self.so_far.value:.4g} (--patience {self._patience})"
        )
