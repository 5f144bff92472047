"""Runs of `bench/gpu/truth.py` as records of `tests/measured`: what a GPU took is tested for ever without one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.configurations import cluster
from bench.gpu.report import Row
from frugal.config.hardware.cluster import Device
from frugal.dryrun.compare import Measurement
from frugal.engine.measure.record import Capped, Measured, RankMeasurement

MOST = 12
"""Records of one run, spread over the ZeRO stages: each costs the tests a dry run."""

LARGEST = 250_000_000
"""Parameters (elements) of a recorded model, so that its dry run takes a second or two."""


def records(rows: Sequence[Row], here: Device, head: Mapping[str, Any], folder: Path) -> list[Measurement]:
    """The measured rows of small models that are to be kept; `folder` is where their models were written."""
    small = [row for row in rows if row.measured and row.prediction.parameters <= LARGEST]
    stages = sorted({row.prediction.configuration.zero_stage for row in small})
    of_stage = {stage: [row for row in small if row.prediction.configuration.zero_stage == stage] for stage in stages}
    chosen: list[Row] = []
    while len(chosen) < MOST and any(of_stage.values()):
        chosen += [waiting.pop(0) for waiting in of_stage.values() if waiting][: MOST - len(chosen)]
    return [_record(row, row.prediction.configuration.device(here), head, folder) for row in chosen]


def _record(row: Row, here: Device, head: Mapping[str, Any], folder: Path) -> Measurement:
    configuration, figures, answer = row.prediction.configuration, row.prediction.figures, row.runs["free"].answer
    assert figures is not None and answer.model is not None
    plan = configuration.plan(folder, here, row.prediction.trainable_parameters)
    rank = RankMeasurement(
        phases=answer.phases,
        rss_before_bytes=answer.rss_before_bytes,
        rss_peak_bytes=answer.rss_peak_bytes,
        **answer.of_gpu,
    )
    capped = row.runs.get("capped")
    return Measurement(
        plan_digest=plan.digest,
        request=replace(plan.request, model=configuration.model),
        definition=answer.model,
        cluster=cluster(here, configuration.world_size),
        strategy=plan.strategy,
        batch=plan.batch,
        predicted=figures,
        measured=Measured.of([rank], here.kind),
        capped=None
        if capped is None or capped.cap_bytes is None
        else Capped(limit_bytes=capped.cap_bytes, survived=capped.answer.survived),
        device=head["device"],
        driver=head["driver"],
        versions=head["versions"],
        date=head["date"],
        command=head["command"],
    )
