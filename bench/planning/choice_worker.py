"""`python -m bench.planning.choice_worker --jobs FILE --out FILE`: each rank trains with every plan, timed.

The plans of a job take turns, a few optimizer steps each, so that whatever else the machine does meets all of them;
those near the fastest take more. Each turn makes its engine anew, because several engines in one process change each
other: ZeRO-3 replaces functions of torch. A step is timed from a barrier to a barrier. At last the first plan and the
fastest other take turns once more: who seems the fastest of many is partly so by chance.
"""

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist

from frugal.config.schema import parse
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.distributed import first_failure, process_group
from frugal.distributed.exchange import from_rank_0
from frugal.engine.engine import Engine, initialize
from frugal.models.objectives import Batch
from frugal.models.resolve import resolve
from frugal.models.spec import ModelSpec
from frugal.planning.plan import Plan

TURNS, STEPS, FAR = 3, 2, 1.5
MORE_TURNS, NEAR = 4, 1.1
AGAIN = 10

Again = Literal["no", "too", "only"]


class Job(msgspec.Struct, frozen=True):
    """One case: the text of `plan.json` of each strategy.

    `again`: whether the first and the fastest other also take turns at the end, or all plans only these.
    """

    name: str
    plans: tuple[str, ...]
    again: Again = "no"


class Timed(msgspec.Struct, frozen=True):
    """The result of a job: seconds of every timed step of every plan.

    `again`: number of a plan -> seconds of its best step in each turn at the end, all in the same turns.
    """

    name: str
    seconds: tuple[tuple[float, ...], ...]
    again: dict[int, tuple[float, ...]] = {}


def timed(plans: Sequence[Plan], turns: int = TURNS, steps: int = STEPS) -> list[list[float]]:
    """Seconds of the optimizer steps of each plan, all of one model. Collective.

    Every plan has its first turn. What took half as long again as the fastest so far is not asked again, and behind
    `turns` only what took at most a tenth longer.
    """
    device = process_group.use_device(plans[0].cluster.devices[0].kind)
    spec = resolve(plans[0].request.model, plans[0].request.task)
    seconds: list[list[float]] = [[] for _ in plans]
    for turn in range(turns + (MORE_TURNS if turns > 1 else 0)):
        best = from_rank_0([min(found, default=0.0) for found in seconds], list[float])  # all leave out the same
        for plan, found, before in zip(plans, seconds, best, strict=True):
            if before <= (FAR if turn < turns else NEAR) * min(best):
                found += _turn(spec, plan, device, steps)
    return seconds


def timed_again(plans: Sequence[Plan], numbers: Sequence[int], num_turns: int = AGAIN) -> dict[int, tuple[float, ...]]:
    """`Timed.again` of these. Collective."""
    device = process_group.use_device(plans[0].cluster.devices[0].kind)
    spec = resolve(plans[0].request.model, plans[0].request.task)
    turns = [{number: min(_turn(spec, plans[number], device, STEPS)) for number in numbers} for _ in range(num_turns)]
    return {number: tuple(turn[number] for turn in turns) for number in numbers} if len(numbers) > 1 else {}


def _measured(job: Job) -> Timed:
    plans = [Plan.from_json(text.encode()) for text in job.plans]
    if job.again == "only":
        return Timed(job.name, (), again=timed_again(plans, range(len(plans))))
    seconds = timed(plans)
    if job.again == "no":
        return Timed(job.name, tuple(map(tuple, seconds)))
    fastest_other = min(range(1, len(plans)), key=lambda number: min(seconds[number]), default=0)
    numbers = sorted({0, fastest_other})
    return Timed(job.name, tuple(map(tuple, seconds)), timed_again(plans, from_rank_0(numbers, list[int])))


def _turn(spec: ModelSpec, plan: Plan, device: torch.device, steps: int) -> list[float]:
    """One step that does not count, and then some that do."""
    torch.manual_seed(0)
    objective = spec.objective()
    engine = initialize(spec.build(dtype=DTYPES[plan.request.precision]), plan, objective)
    sizes = plan.batch.sizes[dist.get_rank()]
    batches = [
        _random(objective.example(size, plan.request.seq_len) if size else objective.collate([objective.dummy()]))
        for size in sizes
    ]
    found = [_step(engine, batches, device) for _ in range(1 + steps)][1:]
    engine.destroy()
    del engine
    gc.collect()
    return found


def _random(batch: Batch) -> Batch:
    """Other tokens than padding: experts would all get the same."""
    return {name: torch.randint(2, 500, value.shape) if name == "input_ids" else value for name, value in batch.items()}


def _step(engine: Engine, batches: list[Batch], device: torch.device) -> float:
    gc.collect()
    _wait(device)
    start = time.perf_counter()
    engine.accumulate(batches, targets=1000)
    engine.deepspeed.step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def command(words: Sequence[str]) -> None:
    """Time every plan of every job. `--jobs`: a list of them as JSON. `--out`: where rank 0 writes one line a job."""
    given = parse(words, {"jobs": Path, "out": Path}, needed=["jobs", "out"])
    jobs = msgspec.json.decode(given["jobs"].read_bytes(), type=tuple[Job, ...])
    # Once: ranks that meet a second time find what they said of themselves, and of another plan, the first time.
    process_group.join(Plan.from_json(jobs[0].plans[0].encode()))
    for job in jobs:
        found = _measured(job)
        if dist.get_rank() == 0:
            with given["out"].open("ab") as file:
                file.write(msgspec.json.encode(found) + b"\n")
            sys.stderr.write(f"{job.name}: {len(job.plans)} strategies timed\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    first_failure.run_command(command)
