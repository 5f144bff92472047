"""The training loop: global batches, optimizer steps, evaluation, checkpoints, and the checks between them."""

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice

import torch

from frugal.config.run_settings import RunSettings
from frugal.errors import CheckpointError, OutOfMemoryError
from frugal.training.checkpoint.held_folder import HeldFolder
from frugal.training.checkpoint.progress import Progress
from frugal.training.checkpoint.saving import Saver
from frugal.training.data.batches import GlobalBatches, prefetch
from frugal.training.data.stream.samples import StreamBatches
from frugal.training.engine import Engine
from frugal.training.extensions.best import Best
from frugal.training.extensions.metric import Metric
from frugal.training.measure.first_steps import FirstStepsGauge
from frugal.training.objectives import Sample
from frugal.training.reports.finite_check import FiniteCheck
from frugal.training.reports.metrics import Log


def train(
    engine: Engine,
    batches: GlobalBatches | StreamBatches,
    validation: Sequence[Sample],
    settings: RunSettings,
    log: Log,
    *,
    start: Progress,
    total_steps: int,
    gauge: FirstStepsGauge | None = None,
    held: HeldFolder | None = None,
    metric: Metric | None = None,
    best: Best | None = None,
) -> Progress:
    """Train from `start` to `total_steps` optimizer steps, or `best` is over, or a rank is told to stop. Collective.

    A run that is told to stop, or is out of memory beyond recovery, saves a checkpoint first. So does one whose folder,
    `held`, is deleted: into a new one.

    The next global batch is collated while the engine works on the last; a step's time includes what it waits for it.
    The first step has no optimizer states before it, so memory is compared with the plan after the second.
    """
    now, held, best = start, held or HeldFolder(settings), best or Best(settings, start)
    to_come = islice(batches.iterate(start.position), total_steps - start.step)
    prepared = prefetch(((batch, engine.prepare(batch)) for batch in to_come), engine.device)
    saver = Saver(
        engine, settings.checkpoints, keep=settings.keep, in_background=settings.async_save, held=held, before=log.sync,
        score=best.criterion.score,
    )  # fmt: skip
    finite_check = FiniteCheck(settings, log, saver)
    try:
        with closing(prepared), saver:
            for step in range(start.step + 1, total_steps + 1):
                step_start = time.perf_counter()
                batch, cut = next(prepared)
                engine.wants_to_stop |= held.is_deleted
                result = engine.train_step(cut)
                _read_peaks(engine, log)
                log.step(step, result, time.perf_counter() - step_start)
                finite_check.after_step(step, result, batch)
                if gauge is not None and gauge.after_step(cut.largest) == 2:
                    lowered = engine.adaptive_limits.is_lowered
                    log.memory(step, gauge.stop(), is_lowered=lowered, largest=gauge.largest)
                now = replace(now, step=step, position=batch.end, validation_loss=None, metrics={})
                is_best = False
                if len(validation) and _is_due(step, settings.eval_every, total_steps):
                    evaluation = engine.evaluate(validation, metric)
                    _read_peaks(engine, log)
                    log.evaluation(step, evaluation)
                    is_best = best.after(step, evaluation) and settings.save_best_model
                    now = replace(now, validation_loss=evaluation.loss, metrics=evaluation.metrics, best=best.so_far)
                    engine.agree_to_stop()  # an evaluation may be long
                is_last = engine.is_to_stop or best.is_over
                if is_last or is_best or _is_due(step, settings.save_every, total_steps):
                    saver.save(now)
                if is_last:
                    break
    except OutOfMemoryError as error:
        raise _saved_and_explained(error, engine, saver, settings, now) from None
    return now


def _read_peaks(engine: Engine, log: Log) -> None:
    """Have the log say what this rank's GPU has taken at most by now."""
    if engine.device.type == "cuda":
        log.memory_bytes = torch.cuda.max_memory_allocated(engine.device)
        log.reserved_bytes = torch.cuda.max_memory_reserved(engine.device)


def _saved_and_explained(
    error: OutOfMemoryError, engine: Engine, saver: Saver, settings: RunSettings, now: Progress
) -> OutOfMemoryError:
    """The error with where the steps before it are saved; saves them now if no update is half done. Collective."""
    newest = saver.newest()
    kept = f"the last good checkpoint is {newest.name}" if newest else "there is no checkpoint"
    if engine.update.is_begun:
        kept = f"the weights are between two steps; {kept}"
    elif settings.save_every != 0 and now.step > 0:
        try:
            kept = f"step {now.step} is saved in {saver.save(now)}"
            saver.finish()
        except CheckpointError as failed:
            kept = f"{failed.what}, {kept}"
    return OutOfMemoryError(error.what, because=[*error.because, kept], hint=error.hint)


def num_steps(batches: GlobalBatches | StreamBatches, settings: RunSettings) -> int:
    """Optimizer steps of the run: as set, or until every sample was drawn `epochs` times."""
    settings.check_length()
    if settings.steps is not None:
        return settings.steps
    assert isinstance(batches, GlobalBatches), "a stream has no end"
    return batches.steps(settings.epochs or 1)


def _is_due(step: int, every: int | None, total_steps: int) -> bool:
    """Whether something done `every` so many steps, and at the end, is to be done now; 0: never, None: at the end."""
    if every == 0:
        return False
    return step == total_steps or (every is not None and step % every == 0)
