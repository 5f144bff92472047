"""A few optimizer steps for real, measured: what a rehearsal is held against.

Gloo's threads let go of a collective's tensors a moment after it is done, which would make a peak on CPU ranks a
matter of luck. Here each collective is followed by a millisecond in which they do.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import deepspeed.comm.comm as deepspeed_comm
import torch
import torch.distributed as dist
from torch import nn

from frugal.planning.plan import Plan
from frugal.training.engine import initialize
from frugal.training.loss import Objective
from frugal.training.measure import Interval, gauge, mark_phases

NUM_STEPS = 2  # as many as are rehearsed: optimizer states come to be in the first

_BACKEND = ("all_gather_function", "reduce_scatter_function")
_TORCH = ("broadcast", "all_reduce", "all_gather", "reduce", "reduce_scatter", "_all_gather_base")
_SECONDS = 0.001


def trial(
    build: Callable[[], nn.Module], objective: Objective, plan: Plan, device: torch.device | str = "cpu"
) -> list[Interval]:
    """Every phase of two optimizer steps on this rank, with synthetic samples of full length. Collective."""
    device = torch.device(device)
    example = objective.example(plan.batch.largest_cell, plan.request.seq_len)
    gc.freeze()  # going through all of transformers takes longer than a phase
    with settled_collectives() if device.type == "cpu" else nullcontext(), gauge(device) as found:

        def mark(phase: str) -> None:
            gc.collect()
            found.mark(phase)

        engine = initialize(build(), plan, objective)
        mark_phases(engine, mark)
        for _ in range(NUM_STEPS):
            batches = [{name: tensor.clone() for name, tensor in example.items()} for _ in plan.batch.cells[0]]
            engine.accumulate(batches, targets=1)
            del batches
            engine.deepspeed.step()
        gc.collect()
        intervals = found.intervals
    engine.destroy()
    del engine
    gc.collect()
    gc.unfreeze()
    return intervals


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Wait after each collective until gloo's threads have let go of its tensors."""
    backend = deepspeed_comm.cdb
    with ExitStack() as stack:
        for owner, names in ((backend, _BACKEND), (dist, _TORCH)):
            for name in names:
                stack.enter_context(patch.object(owner, name, _settled(getattr(owner, name))))
        yield


def _settled(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if work is not None:
            work.wait()
        time.sleep(_SECONDS)
        return work

    return call
