"""The training loop: global batches, optimizer steps, evaluation, checkpoints, and the checks between them."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import islice

from frugal.checkpoint.progress import Progress
from frugal.checkpoint.saving import Saver
from frugal.config.run_settings import RunSettings
from frugal.data.batches import GlobalBatches, prefetch
from frugal.data.stream.samples import StreamBatches
from frugal.engine.engine import Engine
from frugal.engine.evaluation import Evaluation
from frugal.engine.extensions.best import Best
from frugal.engine.measure.run_gauge import CHECKPOINT, EVALUATION, RunGauge
from frugal.engine.reports.endings import FiniteCheck, saved_and_explained
from frugal.engine.reports.metrics import Log
from frugal.errors import OutOfMemoryError


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
    now, best, gauge = start, Best(settings, start), gauge or RunGauge(engine)
    to_come = islice(batches.iterate(start.position), total_steps - start.step)
    prepared = prefetch(((batch, engine.prepare(batch)) for batch in to_come), engine.device)
    saver = Saver(
        engine, settings.checkpoints, keep=settings.keep, in_background=settings.async_save, before=log.sync,
        published=log.published, score=best.criterion.score,
    )  # fmt: skip
    finite_check = FiniteCheck(settings.on_nan, log, saver)
    try:
        with closing(prepared), saver:
            for step in range(start.step + 1, total_steps + 1):
                step_start = time.perf_counter()
                batch, cut = next(prepared)
                engine.wants_to_stop |= log.is_folder_gone
                result = engine.train_step(cut)
                log.takes(gauge.so_far)
                log.step(step, result, time.perf_counter() - step_start)
                finite_check.after_step(step, result, batch)
                if gauge.after_step(cut.largest):
                    _tell_memory(step, gauge, log, engine, start)
                now = replace(now, step=step, position=batch.end, validation_loss=None, metrics={})
                is_best = False
                if evaluate is not None and _is_due(step, settings.eval_every, total_steps):
                    evaluation = _evaluated(evaluate, step, gauge, log)
                    is_best = best.after(step, evaluation) and settings.save_best_model
                    now = replace(now, validation_loss=evaluation.loss, metrics=evaluation.metrics, best=best.so_far)
                    engine.agree_to_stop()  # an evaluation may be long
                is_last = engine.is_to_stop or best.is_over
                if is_last or is_best or _is_due(step, settings.save_every, total_steps):
                    _save(saver, now, gauge, log)
                if is_last:
                    break
    except OutOfMemoryError as error:
        raise saved_and_explained(error, engine, saver, now, is_saved=settings.save_every != 0) from None
    return now


def _tell_memory(step: int, gauge: RunGauge, log: Log, engine: Engine, start: Progress) -> None:
    """Log the memory of the first steps beside the planned one."""
    log.memory(
        step, gauge.stop(), is_lowered=engine.adaptive_limits.is_lowered, largest=gauge.largest, phases=gauge.phases,
        is_resumed=start.step > 0,
    )  # fmt: skip


def _evaluated(evaluate: Callable[[], Evaluation], step: int, gauge: RunGauge, log: Log) -> Evaluation:
    """Return the evaluation after `step` steps, which is logged. Collective."""
    began = time.perf_counter()
    with gauge.during(EVALUATION):
        evaluation = evaluate()
    log.takes(gauge.so_far)
    log.evaluation(step, evaluation, seconds=time.perf_counter() - began, peak=gauge.last)
    return evaluation


def _save(saver: Saver, now: Progress, gauge: RunGauge, log: Log) -> None:
    """Save a checkpoint of `now`, and log how long training waited for it. Collective."""
    began = time.perf_counter()
    with gauge.during(CHECKPOINT):
        saver.save(now)
    log.checkpoint(now.step, time.perf_counter() - began, gauge.last)


def num_steps(batches: GlobalBatches | StreamBatches, settings: RunSettings) -> int:
    """Return the optimizer steps of the run: as set, or until every sample was drawn `epochs` times."""
    settings.check_length()
    if settings.steps is not None:
        return settings.steps
    assert isinstance(batches, GlobalBatches), "a stream has no end"
    return batches.steps(settings.epochs or 1)


def _is_due(step: int, every: int | None, total_steps: int) -> bool:
    """Return whether an action is due now that is done `every` N steps and at the end; 0: never, None: at the end."""
    if every == 0:
        return False
    return step == total_steps or (every is not None and step % every == 0)
