"""A few optimizer steps for real, measured: what a rehearsal is held against.

As a program it is what `frugal measure` runs on every rank: `python -m frugal.training.trial --plan P --out FILE`.
Gloo's threads let go of a collective's tensors a moment after it is done, which would make a peak on CPU ranks a
matter of luck. Here each collective is followed by a millisecond in which they do.
"""

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import deepspeed.comm.comm as deepspeed_comm
import msgspec
import torch
import torch.distributed as dist
from torch import nn

from frugal.errors import OutOfMemoryError
from frugal.planning.plan import Plan
from frugal.training import failure, group, run
from frugal.training.engine import DTYPES, initialize
from frugal.training.loss import Objective
from frugal.training.measure import Interval, gauge, mark_phases
from frugal.training.models import resolve

NUM_STEPS = 2  # as many as are rehearsed: optimizer states come to be in the first

_BACKEND = ("all_gather_function", "reduce_scatter_function")
_TORCH = ("broadcast", "all_reduce", "all_gather", "reduce", "reduce_scatter", "_all_gather_base")
_SECONDS = 0.001


def trial(
    build: Callable[[], nn.Module],
    objective: Objective,
    plan: Plan,
    device: torch.device | str = "cpu",
    *,
    most_micro_steps: int | None = None,
) -> list[Interval]:
    """Every phase of two optimizer steps on this rank, with synthetic samples of full length. Collective.

    A rehearsal does no more than two micro-steps, since a third takes no more memory; `most_micro_steps` says so here.
    """
    device = torch.device(device)
    example = objective.example(plan.batch.largest_cell, plan.request.seq_len)
    micro_steps = min(plan.batch.accumulation_steps, most_micro_steps or plan.batch.accumulation_steps)
    gc.freeze()  # going through all of transformers takes longer than a phase
    with settled_collectives() if device.type == "cpu" else nullcontext(), gauge(device) as found:

        def mark(phase: str) -> None:
            gc.collect()
            found.mark(phase)

        engine = initialize(build(), plan, objective)
        mark_phases(engine, mark)
        for _ in range(NUM_STEPS):
            batches = [{name: tensor.clone() for name, tensor in example.items()} for _ in range(micro_steps)]
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


def phase_peaks(intervals: Sequence[Interval]) -> dict[str, int]:
    """The peak of each phase, bytes."""
    peaks: dict[str, int] = {}
    for interval in intervals:
        peaks[interval.phase] = max(peaks.get(interval.phase, 0), interval.peak_bytes)
    return peaks


def measure(plan: Plan) -> list[dict[str, int]]:
    """The peak of each phase, of every rank. Collective over the ranks that a launcher has started.

    Raises:
        OutOfMemoryError: the device is too small.
    """
    device = run.join(plan)
    spec = resolve(plan.request.model, plan.request.task)
    dtype = DTYPES[plan.request.precision]
    try:
        intervals = trial(lambda: spec.build(dtype=dtype), spec.objective(), plan, device, most_micro_steps=2)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError("out of memory while measuring", because=str(error).splitlines()[0]) from None
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, phase_peaks(intervals))
    return found


@click.command("trial")
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), required=True, help="plan.json.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Where rank 0 writes what was measured.")
@click.option("--local_rank", "--local-rank", "_local_rank", type=int, hidden=True)  # DeepSpeed's launcher adds it
def command(plan_path: Path, out: Path, _local_rank: int | None) -> None:
    """Measure two optimizer steps, on one rank of a launcher."""
    found = measure(Plan.read(plan_path))
    if dist.get_rank() == 0:
        out.write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """The rank's whole life."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings about ranks that are gone
    group.end_with_starter()
    try:
        command(sys.argv[1:], standalone_mode=False)
    except BaseException as error:  # whatever it is, the other ranks must not wait for this one
        failure.end(error)


if __name__ == "__main__":
    main()
