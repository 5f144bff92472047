"""The training loop, top to bottom."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import islice

import torch

from frugal.training import checkpoint
from frugal.training.batches import GlobalBatches
from frugal.training.checkpoint import Progress
from frugal.training.engine import Engine
from frugal.training.evaluate import evaluate
from frugal.training.log import Log
from frugal.training.loss import Sample
from frugal.training.measure import Gauge
from frugal.training.prefetch import ahead
from frugal.training.settings import Settings


class Watch:
    """A gauge that is taken off once it has seen everything a plan counts."""

    def __init__(self, gauge: Gauge, stack: ExitStack) -> None:
        self._gauge = gauge
        self._stack = stack

    def take_off(self) -> int:
        """The peak so far, bytes; from here on nothing is measured."""
        peak = self._gauge.peak_bytes
        self._stack.close()
        return peak


def train(
    engine: Engine,
    batches: GlobalBatches,
    validation: Sequence[Sample],
    settings: Settings,
    log: Log,
    *,
    start: Progress,
    total_steps: int,
    watch: Watch | None = None,
) -> Progress:
    """Train from `start` until `total_steps` optimizer steps are done, or a rank is told to stop. Collective.

    What was done so far when it is told to is in a checkpoint.

    The next global batch is collated while the engine works on the last; a step's time includes what it waits for it.
    The first step has no optimizer states before it, so memory is compared with the plan after the second.
    """
    now = start
    to_come = islice(batches.iterate(start.position), total_steps - start.step)
    prepared = ahead(((batch.end, engine.prepare(batch)) for batch in to_come), engine.device)
    with closing(prepared):
        for step in range(start.step + 1, total_steps + 1):
            began = time.perf_counter()
            end, batch = next(prepared)
            result = engine.train_step(batch)
            if engine.device.type == "cuda":
                log.memory_bytes = torch.cuda.max_memory_allocated(engine.device)
            log.step(step, result, time.perf_counter() - began)
            if watch is not None and step == start.step + 2:
                log.memory(step, watch.take_off())
            now = replace(now, step=step, position=end, validation_loss=None)
            if len(validation) and _is_due(step, settings.eval_every, total_steps):
                evaluation = evaluate(engine, validation)
                log.evaluation(step, evaluation)
                now = replace(now, validation_loss=evaluation.loss)
            if engine.is_to_stop or _is_due(step, settings.save_every, total_steps):
                checkpoint.save(engine, settings.checkpoints, now, keep=settings.keep)
            if engine.is_to_stop:
                break
    return now


def steps_of(batches: GlobalBatches, settings: Settings) -> int:
    """Optimizer steps of the whole run: as asked, or until every sample was drawn `epochs` times."""
    if settings.steps is not None:
        return settings.steps
    return batches.steps(settings.epochs or 1)


def _is_due(step: int, every: int | None, total_steps: int) -> bool:
    """Whether something done `every` so many steps, and at the end, is to be done now; 0: never, None: at the end."""
    if every == 0:
        return False
    return step == total_steps or (every is not None and step % every == 0)
