"""A loss or a gradient that is not a number: which batch it came from, and whether the run goes on."""

import math

from frugal.errors import NumbersError
from frugal.training import manifest
from frugal.training.batches import GlobalBatch
from frugal.training.engine import StepResult
from frugal.training.log import Log
from frugal.training.settings import METRICS, Settings

MOST_IN_A_ROW = 10  # batches left out; more are no accident of the data
_SHOWN = 8  # of the samples, in a line for people


class Numbers:
    """Looks at every step of a run. The engine has left weights and optimizer states alone where it finds something."""

    def __init__(self, settings: Settings, log: Log) -> None:
        self._settings = settings
        self._log = log
        self._in_a_row = 0

    def after(self, step: int, result: StepResult, batch: GlobalBatch) -> None:
        """Step number `step` was done on `batch`.

        Raises:
            NumbersError: its numbers are not finite, and the run is to stop for that.
        """
        if result.is_finite:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        found = _found(result.loss)
        self._log.left_out(step, found, batch.indices.tolist(), is_going_on=self._goes_on)
        if not self._goes_on:
            raise self._error(step, found, batch)

    @property
    def _goes_on(self) -> bool:
        return self._settings.on_nan == "skip" and self._in_a_row <= MOST_IN_A_ROW

    def _error(self, step: int, found: str, batch: GlobalBatch) -> NumbersError:
        newest = manifest.newest(self._settings.checkpoints)
        kept = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
        because = [
            f"its global batch is {shown(batch.indices.tolist())} of the training data, listed in {METRICS}",
            f"nothing was updated or saved since; {kept}",
        ]
        if self._settings.on_nan == "skip":
            because.insert(0, f"{MOST_IN_A_ROW} batches before it were left out, one after the other")
            hint = "the weights may be beyond repair: continue from an earlier checkpoint with a lower --learning-rate"
        else:
            hint = "look at these samples, lower --learning-rate, or leave such batches out with --on-nan skip"
        return NumbersError(f"{found} in step {step}", because=because, hint=hint)


def shown(indices: list[int]) -> str:
    """The first few of a batch's samples, in words."""
    first = ", ".join(map(str, indices[:_SHOWN]))
    return f"samples {first}" + (f", ... ({len(indices)} in all)" if len(indices) > _SHOWN else "")


def _found(loss: float) -> str:
    if math.isnan(loss):
        return "the loss is NaN"
    return "the loss is infinite" if math.isinf(loss) else "the gradient is not finite"
