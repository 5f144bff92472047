"""Whether a run goes on after a step whose loss or gradient is not finite, and what it says of that."""

import math

from frugal.config.run_settings import METRICS, RunSettings
from frugal.errors import NumbersError
from frugal.training.checkpoint.saving import Saver
from frugal.training.data.batches import GlobalBatch
from frugal.training.reports.metrics import Log
from frugal.training.train_step import StepResult

MOST_IN_A_ROW = 10  # batches left out; more are no accident of the data
_NAMED_SAMPLES = 8  # in a line for people


class FiniteCheck:
    """Whether a run goes on after a step whose loss or gradient is not finite, and from which samples that came.

    The engine has left weights and optimizer states of such a step as they were.
    """

    def __init__(self, settings: RunSettings, log: Log, saver: Saver) -> None:
        self._settings = settings
        self._log = log
        self._saver = saver
        self._in_a_row = 0

    def after_step(self, step: int, result: StepResult, batch: GlobalBatch) -> None:
        """Check the result of step number `step` on `batch`.

        Raises:
            NumbersError: its numbers are not finite, and the run is to stop for that.
        """
        if result.is_finite:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        reason = _reason(result.loss)
        self._log.left_out(step, reason, batch.indices.tolist(), is_going_on=self._goes_on)
        if not self._goes_on:
            raise self._error(step, reason, batch)

    @property
    def _goes_on(self) -> bool:
        return self._settings.on_nan == "skip" and self._in_a_row <= MOST_IN_A_ROW

    def _error(self, step: int, reason: str, batch: GlobalBatch) -> NumbersError:
        newest = self._saver.newest()
        kept = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
        because = [
            f"its global batch is {samples_in_words(batch.indices.tolist())} of the training data, listed in {METRICS}",
            f"nothing was updated or saved since; {kept}",
        ]
        if self._settings.on_nan == "skip":
            because.insert(0, f"{MOST_IN_A_ROW} batches before it were left out, one after the other")
            hint = "the weights may be beyond repair: continue from an earlier checkpoint with a lower --learning-rate"
        else:
            hint = "look at these samples, lower --learning-rate, or leave such batches out with --on-nan skip"
        return NumbersError(f"{reason} in step {step}", because=because, hint=hint)


def samples_in_words(indices: list[int]) -> str:
    """The first few of a batch's samples, in words."""
    first = ", ".join(map(str, indices[:_NAMED_SAMPLES]))
    return f"samples {first}" + (f", ... ({len(indices)} in all)" if len(indices) > _NAMED_SAMPLES else "")


def _reason(loss: float) -> str:
    """What of a step is not finite."""
    if math.isnan(loss):
        return "the loss is NaN"
    return "the loss is infinite" if math.isinf(loss) else "the gradient is not finite"
