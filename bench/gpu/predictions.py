"""What `bench/gpu/truth.py` expects of each configuration, by a dry run on meta tensors."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu.configurations import Configuration, cluster, device
from frugal.config.cluster import DeviceKind
from frugal.dryrun.client import DryRunSource, workers
from frugal.dryrun.compare import predicted
from frugal.dryrun.figures import Figures
from frugal.errors import FrugalError
from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.timeline import MICRO_BATCHES, NotAffineError, Timeline

LARGEST_SHARE = 0.9  # of the device's memory, for the largest micro-batch
MOST_SAMPLES = 256  # of the largest micro-batch, so that its two steps stay short


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one configuration; bytes, and elements of parameters."""

    configuration: Configuration
    figures: Figures | None = None
    expandable_reserved_bytes: int = 0
    parameters: int = 0
    trainable_parameters: int = 0
    largest_parameter: int = 0
    seconds: float = 0.0
    failure: str | None = None


def predict(chosen: list[Configuration], kind: DeviceKind, memory_bytes: int, folder: Path) -> Iterator[Prediction]:
    """Dry-run every configuration; a micro-batch of 0 becomes the largest that fits."""
    here = device(kind, memory_bytes, 0)
    pool = workers()
    try:
        for each in chosen:
            start = time.perf_counter()
            try:
                found = _predict(each, here, folder, pool)
                yield msgspec.structs.replace(found, seconds=time.perf_counter() - start)
            except (FrugalError, RuntimeError) as error:  # a failure is a result
                yield Prediction(configuration=each, failure=str(error).strip().splitlines()[-1])
    finally:
        pool.close()


def _predict(asked: Configuration, here: Any, folder: Path, pool: Any) -> Prediction:
    with DryRunSource(asked.request(folder), cluster(here), pool=pool) as source:
        facts = source.facts()
        strategy = asked.strategy(facts.trainable_parameters)
        steps = asked.accumulation_steps
        if asked.micro_batch == 0:
            pair = [source.dry_runs(strategy, size, steps)[0] for size in MICRO_BATCHES]
            asked = replace(asked, micro_batch=_largest([each.timeline for each in pair], here.memory_bytes))
        dry_runs = source.dry_runs(strategy, asked.micro_batch, steps)
    timeline = dry_runs[0].timeline
    stream = timeline.sizes(asked.micro_batch), timeline.events, timeline.empties
    return Prediction(
        configuration=asked,
        figures=predicted(dry_runs, cluster(here)),
        expandable_reserved_bytes=Replays(*stream, expandable_segments=True).under().peak_reserved_bytes,
        parameters=facts.parameters,
        trainable_parameters=facts.trainable_parameters,
        largest_parameter=facts.largest_parameter,
    )


def _largest(pair: list[Timeline], memory_bytes: int) -> int:
    """Samples of the largest micro-batch whose step fits into most of the memory."""
    try:
        timeline = Timeline.fit(pair[0], pair[1], MICRO_BATCHES)
    except NotAffineError:
        return 3
    low, high = 1, MOST_SAMPLES
    while low < high:
        middle = (low + high + 1) // 2
        stream = timeline.sizes(middle), timeline.events, timeline.empties
        if Replays(*stream).smallest_capacity() <= LARGEST_SHARE * memory_bytes:
            low = middle
        else:
            high = middle - 1
    return low
