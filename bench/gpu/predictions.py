"""Predictions for each configuration of `bench/gpu/truth.py`, by a dry run on meta tensors."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from bench.gpu.configurations import Configuration, cluster
from frugal.config.hardware.cluster import Device
from frugal.dryrun.client import DryRunSource, likely_fullest, workers
from frugal.dryrun.compare import Figures, predicted
from frugal.dryrun.messages import DryRun
from frugal.errors import FrugalError
from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.timeline import MICRO_BATCHES, NotAffineError, Timeline

ALL_RANKS = 4  # of so many each is run; of more the first, whose part may be of one huge parameter, and
MOST_RANKS = 2  # so many of those that are likely to be the fullest
LARGEST_SHARE = 0.9  # of the device's memory, for the largest micro-batch
MOST_SAMPLES = 256  # of the largest micro-batch, so that its two steps stay short


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one configuration; bytes, and elements of parameters. `ranks`: those worth a run.

    `reserved_above_bytes`: what the allocator may reserve more in another order of samples.
    """

    configuration: Configuration
    figures: Figures | None = None
    reserved_above_bytes: int = 0
    expandable_reserved_bytes: int = 0
    expandable_capacity_bytes: int = 0
    parameters: int = 0
    trainable_parameters: int = 0
    largest_parameter: int = 0
    seconds: float = 0.0
    ranks: tuple[int, ...] = (0,)
    failure: str | None = None


def predict(chosen: list[Configuration], here: Device, folder: Path) -> Iterator[Prediction]:
    """Dry-run every configuration on its emulated card, or else `here`; a micro-batch of 0 becomes the largest that
    fits.
    """
    pool = workers()
    try:
        for each in chosen:
            start = time.perf_counter()
            try:
                found = _predict(each, each.device(here), folder, pool)
                yield msgspec.structs.replace(found, seconds=time.perf_counter() - start)
            except (FrugalError, RuntimeError) as error:  # a failure is a result
                yield Prediction(configuration=each, failure=str(error).strip().splitlines()[-1])
    finally:
        pool.close()


def _predict(asked: Configuration, here: Device, folder: Path, pool: Any) -> Prediction:
    with DryRunSource(asked.request(folder), cluster(here, asked.world_size), pool=pool) as source:
        facts = source.facts()
        strategy = asked.strategy(facts.trainable_parameters)
        steps = asked.accumulation_steps
        if asked.micro_batch == 0:
            pair = [source.dry_runs(strategy, size, steps)[0] for size in MICRO_BATCHES]
            asked = replace(asked, micro_batch=_largest([each.timeline for each in pair], here.memory_bytes))
        dry_runs = source.dry_runs(strategy, asked.micro_batch, steps)
    expandable = [_expandable(each, asked.micro_batch) for each in dry_runs]
    return Prediction(
        configuration=asked,
        figures=predicted(dry_runs, cluster(here, asked.world_size)),
        expandable_reserved_bytes=max(each.under().peak_reserved_bytes for each in expandable),
        expandable_capacity_bytes=max(each.smallest_capacity() for each in expandable),
        parameters=facts.parameters,
        trainable_parameters=facts.trainable_parameters,
        largest_parameter=facts.largest_parameter,
        ranks=_worth_running(asked, facts.trainable_sizes),
    )


def _expandable(dry_run: DryRun, micro_batch: int) -> Replays:
    """The replay with expandable segments."""
    timeline = dry_run.timeline
    return Replays(timeline.sizes(micro_batch), timeline.events, timeline.empties, expandable_segments=True)


def _worth_running(asked: Configuration, trainable_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Under ZeRO-1 and 2 ranks differ; see `likely_fullest`."""
    if asked.world_size == 1 or asked.zero_stage in (0, 3):
        return (0,)
    if asked.world_size <= ALL_RANKS:
        return tuple(range(asked.world_size))
    return tuple(sorted({0, *likely_fullest(trainable_sizes, asked.world_size, MOST_RANKS)}))


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
