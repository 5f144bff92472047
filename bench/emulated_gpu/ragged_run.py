"""`python -m bench.emulated_gpu.ragged_run`: one run of `bench.emulated_gpu.ragged`, on its process's emulated card.

A `Run` comes in as JSON, an `Answer` goes out. What `frugal train` does is done as there: weights are made on the host
and sent, batches are cut and collated by a thread, and the training loop evaluates and saves.
"""

import os
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.gpu.worker import Answer, _is_clean
from frugal.planning.length_bucketing import DrawnRun
from frugal.planning.plan import Plan

STEPS, EVALUATE_EVERY, SAVE_EVERY, VALIDATION_SAMPLES = 8, 3, 4, 24
SHORTEST, SHORT_SHARE, SPREAD = 8, 6, 1.0
"""Tokens of the shortest sample; the median is 1/6 of the longest; standard deviation of the logarithm."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run in a process of its own: `plan.json`, ranks that run one after the other, what the allocator may take."""

    plan: str
    seed: int
    ranks: tuple[int, ...]
    folder: str
    cap_bytes: int | None = None
    keeps_requests: bool = False


class Samples(list[Any]):
    """Samples, with the tokens of each (of pairs on the longer side)."""

    def __init__(self, task: str, number: int, seq_len: int, generator: random.Random, *, packed: bool) -> None:
        super().__init__(_sample(task, seq_len, generator, packed=packed) for _ in range(number))
        self.lengths = np.array([max(len(each["input_ids"]), len(each.get("labels", ()))) for each in self])


def _sample(task: str, seq_len: int, generator: random.Random, *, packed: bool) -> dict[str, Any]:
    """Tokens as texts of natural lengths have them; a pack is of as many documents as fit."""
    documents = [_length(seq_len, generator)]
    while packed and (following := _length(seq_len, generator)) <= seq_len - sum(documents):
        documents.append(following)
    tokens = [generator.randrange(5, 256) for _ in range(sum(documents))]
    if packed:
        return {"input_ids": tokens, "documents": documents}
    if task == "causal-lm":
        return {"input_ids": tokens}
    return {"input_ids": tokens, "labels": tokens if task == "masked-lm" else tokens[: generator.randint(4, seq_len)]}


def _length(seq_len: int, generator: random.Random) -> int:
    return max(SHORTEST, min(seq_len, round(seq_len / SHORT_SHARE * generator.lognormvariate(0, SPREAD))))


def samples(plan: Plan, seed: int) -> tuple[Samples, Samples]:
    """Return what the run trains on and is evaluated on."""
    generator, task, packed = random.Random(seed), str(plan.model.task), bool(plan.request.pack)
    number, seq_len = STEPS * plan.request.batch_samples, plan.request.seq_len
    training = Samples(task, number, seq_len, generator, packed=packed)
    return training, Samples(task, VALIDATION_SAMPLES, seq_len, generator, packed=packed)


def shapes(plan: Plan, seed: int) -> DrawnRun:
    """The micro-batches of the run: samples, and the tokens that each is padded to; dummies are of two tokens."""
    from frugal.data.batches import GlobalBatches, MicroBatchLimits, share

    run: DrawnRun = []
    batches = GlobalBatches(samples(plan, seed)[0], global_batch=plan.request.batch_samples).iterate()
    for _, batch in zip(range(STEPS), batches, strict=False):
        assert batch.lengths is not None
        of_ranks = [
            [
                (len(places), int(max(batch.lengths[place] for place in places))) if places else (1, 2)
                for places in share(batch, MicroBatchLimits.of(plan), rank, plan.batch).places
            ]
            for rank in range(plan.batch.world_size)
        ]
        run.append(list(zip(*of_ranks, strict=True)))
    return run


def of_ranks(run: Run) -> Answer:
    """The most of any rank; not survived where memory ran out on one, even if it went on in smaller micro-batches."""
    from bench.emulated_gpu.twins import alone
    from frugal.errors import OutOfMemoryError

    plan = Plan.read(Path(run.plan))
    start = time.monotonic()
    phases: dict[str, int] = {}
    of_gpu = {"reserved_bytes": 0, "device_bytes": 0}
    requests: list[str] = []
    for rank in run.ranks:
        with alone(rank, plan.batch.world_size) if plan.batch.world_size > 1 else nullcontext():
            try:
                recoveries, peaks, gpu, needed = _rank(plan, run, rank)
            except OutOfMemoryError:
                recoveries, peaks, gpu, needed = 1, {}, {}, 0
        is_clean = _is_clean("cuda")
        if recoveries:
            return Answer(survived=False, seconds=time.monotonic() - start)
        phases = {name: max(size, phases.get(name, 0)) for name, size in peaks.items()}
        of_gpu = {name: max(size, gpu[name]) for name, size in of_gpu.items()}
        requests.append(str(needed))
        if not is_clean and rank != run.ranks[-1]:
            return Answer(failure=f"rank {rank} left memory behind", clean=False)
    return Answer(phases=phases, of_gpu=of_gpu, requests=tuple(requests), seconds=time.monotonic() - start)


def _rank(plan: Plan, run: Run, rank: int) -> tuple[int, dict[str, int], dict[str, int], int]:
    """Times that memory ran out, peaks by phase and of segments, and what the requests need; as `frugal train` runs."""
    import torch

    from bench.gpu.streams import Stream, recording
    from frugal.checkpoint.progress import Progress
    from frugal.config.run_settings import RunSettings
    from frugal.data.batches import GlobalBatches
    from frugal.distributed import process_group
    from frugal.engine import loop
    from frugal.engine.engine import initialize
    from frugal.engine.measure.run_gauge import CHECKPOINT, EVALUATION, RunGauge
    from frugal.engine.reports.metrics import Log, PlannedMemory
    from frugal.models.loading import placed
    from frugal.models.resolve import resolve_request

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction((run.cap_bytes or total) / total, device)
    process_group.form()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    folder = Path(run.folder) / f"run-{os.getpid()}-{rank}"
    settings = RunSettings(out=folder, steps=STEPS, eval_every=EVALUATE_EVERY, save_every=SAVE_EVERY, keep=1)
    for step in range(0, STEPS + 1, SAVE_EVERY) if rank else ():  # which rank 0 would make
        (settings.checkpoints / f"step-{step:06d}.tmp").mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    training, validation = samples(plan, run.seed)
    spec = resolve_request(plan.request)
    peaks: dict[str, int] = {}

    class Gauge(RunGauge):
        """Keeps the most of each phase."""

        def during(self, phase: str) -> Any:
            peaks["step"] = max(peaks.get("step", 0), torch.cuda.max_memory_allocated(device))
            return super().during(phase)

    with recording() if run.keeps_requests else nullcontext() as requests:
        model = placed.build(spec, plan, device, seed=0)
        objective = spec.objective(pack=bool(plan.request.pack), document_tokens=plan.request.document_tokens)
        engine = initialize(model, plan, objective)
        del model
        gauge = Gauge(engine)

        def evaluated() -> Any:
            found = engine.evaluate(validation)
            peaks[EVALUATION] = max(peaks.get(EVALUATION, 0), torch.cuda.max_memory_allocated(device))
            return found

        log = Log(folder, rank=rank, planned=PlannedMemory(plan.memory.live_bytes), total_steps=STEPS)
        log.published = lambda: peaks.update({CHECKPOINT: torch.cuda.max_memory_allocated(device)})
        with log:
            loop.train(
                engine, GlobalBatches(training, global_batch=plan.request.batch_samples), settings, log,
                start=Progress(step=0), total_steps=STEPS, evaluate=evaluated, gauge=gauge,
            )  # fmt: skip
    allocated, reserved = gauge.so_far.allocated_bytes or 0, gauge.so_far.reserved_bytes or 0
    peaks["step"] = max(allocated if allocated > max(peaks.values()) else 0, peaks["step"])
    recoveries = engine.num_recoveries + (engine.adaptive_limits.learnt() is not None)
    engine.destroy()
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    needed = 0
    if requests is not None:
        fields = {name: value for name, value in vars(requests).items() if name != "is_whole"}
        stream = Stream(
            name="", device="", is_emulated=True, versions={}, date="", command="",
            allocated_bytes=peaks, reserved_bytes=reserved, **fields,
        )  # fmt: skip
        needed = stream.replays().smallest_capacity(tolerance=0.001)
    return recoveries, peaks, {"reserved_bytes": reserved, "device_bytes": total}, needed


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    out.write(msgspec.json.encode(of_ranks(msgspec.json.decode(sys.argv[1], type=Run))) + b"\n")
    out.flush()
    os._exit(0)
