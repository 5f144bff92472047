"""Engines of tests, under plans by hand: what a function that runs on ranks begins with."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from bench.plans import plan_by_hand
from frugal.checkpoint import loading
from frugal.checkpoint.progress import Progress
from frugal.config.run_settings import RunSettings
from frugal.distributed import stop
from frugal.engine import loop
from frugal.engine.engine import Engine, initialize
from frugal.engine.reports.metrics import Log, PlannedMemory
from frugal.errors import FrugalError
from frugal.models.objectives import CausalLM, Objective
from frugal.planning.plan import Plan
from tests.engine.gradients import Gradient, applied, weights
from tests.engine.small_models import ragged_samples, tiny_gpt2


def plan_here(
    zero_stage: int = 2, global_batch: int = 8, micro_batch: Any = 2, request: Any = None, **strategy: Any
) -> Plan:
    """Return a plan for the ranks that there are."""
    return plan_by_hand(
        world_size=dist.get_world_size(), global_batch=global_batch, micro_batch=micro_batch, zero_stage=zero_stage,
        request=request, strategy=strategy,
    )  # fmt: skip


@contextmanager
def running(
    plan: Plan, model: nn.Module | None = None, objective: Objective | None = None, **how: Any
) -> Iterator[Engine]:
    """Yield an engine, of a tiny GPT-2 unless told, and destroy it at the end, also if all ranks refuse something.

    Another error ends the ranks.
    """
    engine = initialize(model or tiny_gpt2(), plan, objective or CausalLM(), **how)
    try:
        yield engine
    except FrugalError:
        engine.destroy()
        raise
    engine.destroy()
    del engine
    gc.collect()


def gradient_of_step(
    plan: Plan, model: nn.Module, samples: Sequence[Any], objective: Objective | None = None
) -> Gradient:
    """Return what a step of SGD has applied. Runs on ranks."""
    before = weights(model)
    with running(plan, model, objective) as engine:
        engine.train_step(samples)
        return applied(engine, before)


def losses_of(engine: Engine, first: int, last: int) -> list[float]:
    """Return the loss of each step from `first` to before `last`, each on ragged samples of its own."""
    number = engine.plan.batch.global_batch
    return [engine.train_step(ragged_samples(number, seed=step)).loss for step in range(first, last)]


def run_loop(
    engine: Engine, batches: Any, settings: RunSettings, *, evaluate: Any = None,
    begin: Callable[[Log, Progress], None] = lambda log, start: None,
) -> Progress:  # fmt: skip
    """Train as `frugal.engine.run` puts it together, from the last checkpoint where the settings ask for it."""
    settings.out.mkdir(parents=True, exist_ok=True)
    start = loading.load(engine, settings.checkpoints).progress if settings.resume else Progress(step=0)
    total = loop.num_steps(batches, settings)
    log = Log(settings.out, rank=engine.rank, planned=PlannedMemory(1), total_steps=total, first_step=start.step)
    with log, stop.heed_stop_signals():
        begin(log, start)
        return loop.train(engine, batches, settings, log, start=start, total_steps=total, evaluate=evaluate)
