"""Folders of runs as training writes them, without training: by its own log, plan and settings."""

import io
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.plans import plan_by_hand
from frugal.checkpoint import run_folder
from frugal.config.run_settings import RunSettings
from frugal.engine.evaluation import Evaluation
from frugal.engine.measure.run_gauge import PhasePeak
from frugal.engine.oom_limits import OutOfMemory, OutOfMemoryReport, recovery
from frugal.engine.reports import opening
from frugal.engine.reports.metrics import Log, PlannedMemory
from frugal.engine.train_step import StepResult
from frugal.planning.memory.timeline import BACKWARD, FORWARD, INITIALISATION, OPTIMIZER_STEP
from frugal.planning.plan import Plan
from frugal.report import after_run

MIB = 1 << 20
PLANNED = {INITIALISATION: 40 * MIB, FORWARD: 300 * MIB, BACKWARD: 400 * MIB, OPTIMIZER_STEP: 90 * MIB}
SHORTAGE = OutOfMemory((OutOfMemoryReport(1, 2 << 30, 0, 0, "backward", "here"),))


def plan(task: str = "causal-lm", **request: Any) -> Plan:
    made = plan_by_hand(world_size=2, global_batch=8, micro_batch=2, zero_stage=2, request={"model": "gpt2", **request})
    memory = replace(made.memory, activations=400 * MIB, total_bytes=400 * MIB, phase_peaks=PLANNED)
    return replace(made, model=replace(made.model, task=task), memory=memory, versions={"torch": "2.13.0"}).sealed()


def log_of(folder: Path, made: Plan, total_steps: int, first_step: int = 0) -> Log:
    return Log(
        folder, rank=0, planned=PlannedMemory(400 * MIB, (2, 64), PLANNED),
        total_steps=total_steps, first_step=first_step, console=Console(file=io.StringIO()),
    )  # fmt: skip


def result(step: int) -> StepResult:
    return StepResult(
        loss=4.0 / step + 0.001 * step, targets=1000 + step, samples=8, grad_norm=1.0 / step, learning_rate=1e-3 / step,
        tokens=1008, positions=1200 + 10 * step,
    )  # fmt: skip


def train(
    folder: Path,
    made: Plan,
    steps: range,
    *,
    total_steps: int = 12,
    is_ended: bool = True,
    recovers_in: int | None = None,
) -> Path:
    """Records of the steps in `steps`, with an evaluation and a checkpoint each fourth; resumed if they begin later."""
    folder.mkdir(parents=True, exist_ok=True)
    run_folder.record(made, RunSettings(out=folder, steps=total_steps, data=("text.jsonl",)))
    log = log_of(folder, made, total_steps, steps.start - 1)
    with log:
        log.start(**opening.record(made, (), is_resumed=steps.start > 1))
        for step in steps:
            if step == recovers_in:
                logging.getLogger("frugal").warning("out of memory: again", extra=recovery(SHORTAGE))
            log.step(step, result(step), seconds=0.5)
            time.sleep(0.003)  # records have milliseconds
            if step == 2:
                peaks = {name: PhasePeak(size + MIB, size + 9 * MIB) for name, size in PLANNED.items()}
                log.memory(2, 401 * MIB, largest=(2, 64), phases=peaks)
            if step % 4 == 0:
                peak = PhasePeak(150 * MIB, 500 * MIB)
                log.evaluation(step, Evaluation(loss=3.0 / step, targets=70, samples=7), seconds=0.1, peak=peak)
                log.checkpoint(step, 0.2, peak)
        if is_ended:
            log.ends("done")
        else:
            log._status = None  # it is killed here, and writes nothing more
    return folder


def interrupted(folder: Path) -> Path:
    """A run that recovers in step 6, is killed after step 10, and is started again from step 8."""
    began = time.time()
    train(folder, plan(), range(1, 11), is_ended=False, recovers_in=6)
    after_run.note_end(folder, began, "a rank was ended by SIGKILL")
    return train(folder, plan(), range(9, 13))
