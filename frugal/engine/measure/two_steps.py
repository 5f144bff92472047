"""Run two real optimizer steps and measure their memory, to compare it with the dry run.

`frugal measure` runs this on every rank: `python -m frugal.engine.measure.two_steps --plan P --out FILE`.
Gloo's threads release a collective's tensors shortly after it is done, so that a peak on CPU ranks would vary. Here
each collective is followed by a millisecond in which they do.
"""

import gc
import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from frugal import memory_watch
from frugal.config.hardware import local_host
from frugal.config.request import Task
from frugal.config.schema import parse
from frugal.deepspeed_adapter import collectives
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.distributed import env, first_failure, process_group
from frugal.distributed.exchange import gather
from frugal.engine.engine import initialize
from frugal.engine.measure.record import ModelDefinition, RankMeasurement, Trial, timeline_name
from frugal.engine.measure.run_gauge import NUM_STEPS, mark_phases
from frugal.errors import OutOfMemoryError, failure
from frugal.models.loading import placed
from frugal.models.objectives import Objective, SummedLoss
from frugal.models.resolve import resolve_request
from frugal.models.sequence_parallel import parts_of
from frugal.models.spec import ModelSpec
from frugal.planning.batch import BatchPlan
from frugal.planning.memory.timeline import Interval, Timeline, phase_peaks
from frugal.planning.plan import Plan

WARM_UP_ELEMENTS = 1_000

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
    """Return every phase of two optimizer steps on this rank, with synthetic samples of full length. Collective.

    `most_micro_steps`: 2 to do as a dry run does, since a third micro-step takes no more memory.
    """
    return watched(build, objective, plan, torch.device(device), most_micro_steps).intervals


@dataclass(frozen=True)
class Watched:
    """The memory of two optimizer steps: every phase, the GPU's fields of `RankMeasurement`, every storage."""

    intervals: list[Interval]
    of_gpu: dict[str, int]
    timeline: Timeline | None


def watched(
    build: Callable[[], nn.Module],
    objective: Objective,
    plan: Plan,
    device: torch.device,
    most_micro_steps: int | None,
    *,
    keeps_timeline: bool = False,
) -> Watched:
    """Run the steps of `trial` and return all that was measured. Collective."""
    parts = parts_of(objective, plan.strategy.sequence_parallel, env.rank())
    example = parts.example(plan.batch.largest_micro_batch, plan.request.seq_len)
    micro_steps = min(plan.batch.accumulation_steps, most_micro_steps or plan.batch.accumulation_steps)
    gc.freeze()  # a collection that visits all of transformers takes longer than a phase
    settled = settled_collectives() if device.type == "cpu" else nullcontext()
    with settled, memory_watch.gauge(device, keeps_timeline=keeps_timeline) as memory:

        def mark(phase: str) -> None:
            gc.collect()
            memory.mark(phase)

        engine = initialize(build(), plan, objective, is_tried=True)  # a trial takes memory of its own
        engine.objective = mark_phases(engine.deepspeed, parts, mark)
        for _ in range(NUM_STEPS):
            batches = [{name: tensor.clone() for name, tensor in example.items()} for _ in range(micro_steps)]
            engine.accumulate(batches, targets=1)
            del batches
            engine.deepspeed.step()
        gc.collect()
        intervals = memory.intervals
        of_gpu: dict[str, int] = {}
        if device.type == "cuda":  # before any memory is released
            of_gpu = {
                "reserved_bytes": max(memory.reserved_phases.values()),
                "outside_bytes": memory_watch.outside_bytes(device),
                "device_bytes": torch.cuda.mem_get_info(device)[1],
            }
        watching = Watched(intervals, of_gpu, memory.timeline if keeps_timeline else None)
    engine.destroy()
    del engine
    gc.collect()
    gc.unfreeze()
    return watching


@contextmanager
def settled_collectives() -> Iterator[None]:
    """Wait after each collective until gloo's threads have released its tensors."""

    def settle(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if work is not None:
            work.wait()
        time.sleep(_SECONDS)
        return work

    with ExitStack() as stack:
        for owner, names in ((collectives.backend(), collectives.DIRECT), (dist, _TORCH)):
            for name in names:
                stack.enter_context(patch.object(owner, name, partial(settle, getattr(owner, name))))
        yield


def measure(plan: Plan, cap_bytes: int | None = None, timelines: Path | None = None) -> Trial:
    """Measure two steps on every rank. Collective over the ranks that a launcher has started.

    `cap_bytes`: a limit for the caching allocator, GPUs only. `timelines`: a folder for the timeline of each rank, see
    `timeline_name`.

    Raises:
        OutOfMemoryError: the device or the cap is too small.
    """
    device = process_group.join(plan)
    spec = resolve_request(plan.request)
    spec.build(dtype=DTYPES[plan.request.precision], device="meta")  # imports what is not the model's memory
    if cap_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.mem_get_info(device)[1], device)
    if device.type == "cpu":
        _load_libraries(plan, device)
    gc.collect()
    before = local_host.forget_peak_rss()
    objective = spec.objective(pack=bool(plan.request.pack), document_tokens=plan.request.document_tokens)
    with failure("out of memory while measuring", torch.OutOfMemoryError, raises=OutOfMemoryError):
        watching = watched(
            lambda: placed.build(spec, plan, device, seed=0), objective, plan, device, 2,
            keeps_timeline=timelines is not None,
        )  # fmt: skip
    if timelines is not None:
        (timelines / timeline_name(dist.get_rank())).write_bytes(msgspec.json.encode(watching.timeline))
    measurement = RankMeasurement(
        phases=phase_peaks(watching.intervals),
        rss_before_bytes=before,
        rss_peak_bytes=local_host.peak_rss(),
        **watching.of_gpu,
    )
    ranks = gather(measurement, RankMeasurement)
    return Trial(
        ranks=tuple(ranks),
        model=definition(spec),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else local_host.cpu_name(),
        driver=local_host.cuda_driver() if device.type == "cuda" else "",
    )


def _load_libraries(plan: Plan, device: torch.device) -> None:
    """Train one small layer for two steps: torch and DeepSpeed load some 70 MiB a rank, which is not the model's.

    On CPU ranks only: a GPU's first steps are to be those of the plan.
    """
    small = replace(
        plan.strategy,
        activation_checkpointing="off",
        loss="plain",
        sequence_parallel=1,
        offload_optimizer="none",
        offload_parameters="none",
        reduce_bucket_elements=WARM_UP_ELEMENTS,
        prefetch_bucket_elements=WARM_UP_ELEMENTS,
    )
    world_size, dtype = plan.batch.world_size, DTYPES[plan.request.precision]
    batch = BatchPlan.of(world_size, (1,) * world_size)
    objective = SummedLoss(
        lambda model, batch: model(batch["x"]).square().sum(), example={"x": torch.ones(8, dtype=dtype)}
    )
    layer = nn.Linear(8, 8, dtype=dtype)
    watched(
        lambda: layer,
        objective,
        replace(plan, request=replace(plan.request, lora=None, quantize=None), strategy=small, batch=batch),
        device,
        1,
    )


def definition(spec: ModelSpec) -> ModelDefinition:
    """Return a definition that rebuilds the model without the files it came from."""
    task = cast(Task, spec.task) if spec.own_objective is None else None
    if spec.factory is None:
        return ModelDefinition(task=task, config=json.loads(spec.config.to_json_string(use_diff=False)))
    source = inspect.getsourcefile(spec.factory)
    return ModelDefinition(
        task=task,
        source=None if source is None else Path(source).read_text(encoding="utf-8"),
        factory=spec.reference.rpartition(":")[2],
    )


def command(words: Sequence[str]) -> None:
    """Measure two optimizer steps, on one rank of a launcher.

    `--plan`: plan.json. `--out`: the file in which rank 0 writes the measurements. `--cap`: a limit for the caching
    allocator, bytes. `--timelines`: a folder for the timelines of all ranks.
    """
    given = parse(words, {"plan": Path, "out": Path, "cap": int, "timelines": Path}, needed=["plan", "out"])
    measured = measure(Plan.read(given["plan"]), given.get("cap"), given.get("timelines"))
    if dist.get_rank() == 0:
        given["out"].write_bytes(msgspec.json.encode(measured))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    first_failure.run_command(command)
