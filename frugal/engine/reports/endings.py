"""Ends of a run: its page, a last checkpoint when memory runs out, and losses or gradients that are not finite."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frugal.checkpoint.progress import Progress
from frugal.checkpoint.saving import Saver
from frugal.config.run_settings import METRICS, OnNan
from frugal.data.batches import GlobalBatch
from frugal.distributed import rank_logs
from frugal.engine.engine import Engine
from frugal.engine.reports.metrics import Log
from frugal.engine.train_step import StepResult
from frugal.errors import CheckpointError, NumbersError, OutOfMemoryError
from frugal.report import after_run

MOST_IN_A_ROW = 10  # batches left out; more are no accident of the data
_NAMED_SAMPLES = 8  # in a line for people


@contextmanager
def page_afterwards(out: Path, rank: int) -> Iterator[None]:
    """Have rank 0 write the page of the run in `out` after the `with` block, also if that fails."""
    try:
        yield
    finally:
        if rank == 0 and out.is_dir() and (why := after_run.write_page(out)) is not None:
            rank_logs.to_console(f"note: {after_run.PAGE} could not be written ({why}); `frugal report` makes it")


def saved_and_explained(
    error: OutOfMemoryError, engine: Engine, saver: Saver, now: Progress, *, is_saved: bool
) -> OutOfMemoryError:
    """Return the error with where the steps before it are saved, after saving them unless an update is half done.

    Collective. `is_saved`: the run is asked to save checkpoints.
    """
    newest = saver.newest()
    kept = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint"
    if engine.update.is_begun:
        kept = f"the weights are between two steps; {kept}"
    elif is_saved and now.step > 0:
        try:
            kept = f"step {now.step} is saved in {saver.save(now)}"
            saver.finish()
        except CheckpointError as failed:
            kept = f"{failed.what}, {kept}"
    return OutOfMemoryError(error.what, because=[*error.because, kept], hint=error.hint)


class FiniteCheck:
    """A check after each step that loss and gradient are finite, which ends the run or leaves the batch out.

    The engine has left weights and optimizer states as they were.
    """

    def __init__(self, on_nan: OnNan, log: Log, saver: Saver) -> None:
        self._skips = on_nan == "skip"
        self._log, self._saver = log, saver
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
        reason = "the gradient is not finite"
        if not math.isfinite(result.loss):
            reason = "the loss is NaN" if math.isnan(result.loss) else "the loss is infinite"
        continues = self._skips and self._in_a_row <= MOST_IN_A_ROW
        samples = batch.indices.tolist()
        self._log.left_out(step, reason, samples, is_going_on=continues)
        if continues:
            return
        newest = self._saver.newest()
        kept = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint yet"
        because = [
            f"its global batch is {describe_samples(samples)} of the training data, listed in {METRICS}",
            f"nothing was updated or saved since; {kept}",
        ]
        hint = "look at these samples, lower --learning-rate, or leave such batches out with --on-nan skip"
        if self._skips:
            because.insert(0, f"{MOST_IN_A_ROW} batches before it were left out, one after the other")
            hint = "the weights may be beyond repair: continue from an earlier checkpoint with a lower --learning-rate"
        raise NumbersError(f"{reason} in step {step}", because=because, hint=hint)


def describe_samples(indices: list[int]) -> str:
    """Return the first few of a batch's samples, in words."""
    first = ", ".join(map(str, indices[:_NAMED_SAMPLES]))
    return f"samples {first}" + (f", ... ({len(indices)} in all)" if len(indices) > _NAMED_SAMPLES else "")
