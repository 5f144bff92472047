"""The training loop: global batches, optimizer steps, evaluation, checkpoints, and the checks between them."""

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice

from frugal.checkpoint.progress import Progress
from frugal.checkpoint.saving import Saver
from frugal.config.run_settings import METRICS, RunSettings
from frugal.data.batches import GlobalBatch, GlobalBatches, prefetch
from frugal.data.stream.samples import StreamBatches
from frugal.engine.engine import Engine
from frugal.engine.evaluation import Best, Criterion, Evaluation
from frugal.engine.measure.run_gauge import CHECKPOINT, EVALUATION, RunGauge
from frugal.engine.reports.metrics import Log
from frugal.errors import CheckpointError, NumbersError, OutOfMemoryError

MOST_IN_A_ROW = 10  # batches left out; more are no accident of the data
_NAMED_SAMPLES = 8  # in a line for people


def train(
    engine: Engine,
    batches: GlobalBatches | StreamBatches,
    settings: RunSettings,
    log: Log,
    *,
    start: Progress,
    total_steps: int,
    evaluate: Callable[[], Evaluation] | None = None,
    gauge: RunGauge | None = None,
) -> Progress:
    """Train from `start` to `total_steps` optimizer steps, or until no evaluation is better, or a rank is told to stop.

    Collective. `evaluate` is called every `settings.eval_every` steps, `log.published` after each checkpoint. A run
    that is told to stop, or is out of memory beyond recovery, saves a checkpoint first. One whose folder is deleted or
    moved ends with an error.

    The next global batch is collated while the engine works on the last; a step's time includes what it waits for it.
    The first step has no optimizer states before it, so memory is compared with the plan after the second.
    """
    best = Best(Criterion.of(settings.best, settings.metric), settings.patience, start.best)
    now, gauge = start, gauge or RunGauge(engine)
    to_come = islice(batches.iterate(start.position), total_steps - start.step)
    prepared = prefetch(((batch, engine.prepare(batch)) for batch in to_come), engine.device)
    saver = Saver(
        engine, settings.checkpoints, keep=settings.keep, in_background=settings.async_save, before=log.sync,
        published=log.published, score=best.criterion.score,
    )  # fmt: skip
    num_left_out = 0  # batches in a row whose loss or gradient was not finite
    try:
        with closing(prepared), saver:
            for step in range(start.step + 1, total_steps + 1):
                began = time.perf_counter()
                batch, cut = next(prepared)
                engine.wants_to_stop |= log.is_folder_gone
                result = engine.train_step(cut)
                log.takes(gauge.so_far)
                log.step(step, result, time.perf_counter() - began)
                num_left_out = 0 if result.is_finite else num_left_out + 1
                if num_left_out:
                    _leave_out(step, batch, result.loss, num_left_out, settings, log, saver)
                measured_bytes = gauge.after_step(cut.largest)
                if measured_bytes is not None:
                    log.memory(
                        step, measured_bytes, is_lowered=engine.adaptive_limits.is_lowered, largest=gauge.largest,
                        phases=gauge.phases, is_resumed=start.step > 0,
                    )  # fmt: skip
                now = replace(now, step=step, position=batch.end, validation_loss=None, metrics={})
                is_best = False
                if evaluate is not None and _is_due(step, settings.eval_every, total_steps):
                    began = time.perf_counter()
                    with gauge.during(EVALUATION):
                        evaluation = evaluate()
                    log.takes(gauge.so_far)
                    log.evaluation(step, evaluation, seconds=time.perf_counter() - began, peak=gauge.last)
                    is_best = best.after(step, evaluation) and settings.save_best_model
                    now = replace(now, validation_loss=evaluation.loss, metrics=evaluation.metrics, best=best.so_far)
                    engine.agree_to_stop()  # an evaluation may be long
                is_last = engine.is_to_stop or best.is_over
                if is_last or is_best or _is_due(step, settings.save_every, total_steps):
                    began = time.perf_counter()
                    with gauge.during(CHECKPOINT):
                        saver.save(now)
                    log.checkpoint(step, time.perf_counter() - began, gauge.last)
                if is_last:
                    break
    except OutOfMemoryError as error:
        kept = _save_after(engine, saver, now, is_saved=settings.save_every != 0)
        raise OutOfMemoryError(error.what, because=[*error.because, kept], hint=error.hint) from None
    return now


def _leave_out(
    step: int, batch: GlobalBatch, loss: float, number: int, settings: RunSettings, log: Log, saver: Saver
) -> None:
    """Record that step number `step` left weights and optimizer states as they were, as the `number`-th in a row.

    Raises:
        NumbersError: the run is to stop for that.
    """
    reason = "the gradient is not finite"
    if not math.isfinite(loss):
        reason = "the loss is NaN" if math.isnan(loss) else "the loss is infinite"
    is_skipped = settings.on_nan == "skip"
    continues = is_skipped and number <= MOST_IN_A_ROW
    samples = batch.indices.tolist()
    log.left_out(step, reason, samples, is_going_on=continues)
    if continues:
        return
    named = ", ".join(map(str, samples[:_NAMED_SAMPLES]))
    more = f", ... ({len(samples)} in all)" if len(samples) > _NAMED_SAMPLES else ""
    because = [
        f"its global batch is samples {named}{more} of the training data, listed in {METRICS}",
        f"nothing was updated or saved since; {_last_good(saver)}",
    ]
    hint = "look at these samples, lower --learning-rate, or leave such batches out with --on-nan skip"
    if is_skipped:
        because.insert(0, f"{MOST_IN_A_ROW} batches before it were left out, one after the other")
        hint = "the weights may be beyond repair: continue from an earlier checkpoint with a lower --learning-rate"
    raise NumbersError(f"{reason} in step {step}", because=because, hint=hint)


def _save_after(engine: Engine, saver: Saver, now: Progress, *, is_saved: bool) -> str:
    """Save what was done before memory ran out, unless an update is half done; return where it is. Collective.

    `is_saved`: the run is asked to save checkpoints.
    """
    kept = _last_good(saver)
    if engine.update.is_begun:
        return f"the weights are between two steps; {kept}"
    if not is_saved or now.step == 0:
        return kept
    try:
        kept = f"step {now.step} is saved in {saver.save(now)}"
        saver.finish()
    except CheckpointError as failed:
        return f"{failed.what}, {_last_good(saver)}"
    return kept


def _last_good(saver: Saver) -> str:
    newest = saver.newest()
    return f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint"


def num_steps(batches: GlobalBatches | StreamBatches, settings: RunSettings) -> int:
    """Return the optimizer steps of the run: as set, or until every sample was drawn `epochs` times."""
    settings.check_length()
    if settings.steps is not None:
        return settings.steps
    assert isinstance(batches, GlobalBatches), "a stream has no end"
    return batches.steps(settings.epochs or 1)


def _is_due(step: int, every: int | None, total_steps: int) -> bool:
    """Return whether an action is due now that is done `every` N steps and at the end; 0: never, None: at the end."""
    return every != 0 and (step == total_steps or (every is not None and step % every == 0))
