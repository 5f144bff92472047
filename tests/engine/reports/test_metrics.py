"""Output of a run for people, and for programs."""

import io
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.runs import records
from frugal.engine.evaluation import Evaluation
from frugal.engine.reports.metrics import Log, PlannedMemory
from frugal.engine.train_step import StepResult
from frugal.errors import CheckpointError
from tests.disks import small_disk

MIB = 1 << 20
PLANNED = PlannedMemory(400 * MIB)


def result(loss: float = 2.5, targets: int = 1000, tokens: int | None = None) -> StepResult:
    return StepResult(loss=loss, targets=targets, samples=8, grad_norm=0.5, learning_rate=3e-4, tokens=tokens)


def logged(folder: Path, total_steps: int = 9, planned: PlannedMemory = PLANNED, **how: Any) -> tuple[Log, io.StringIO]:
    written = io.StringIO()
    console = Console(file=written, highlight=False, soft_wrap=True, width=120)
    return Log(folder, rank=0, planned=planned, total_steps=total_steps, console=console, **how), written


def log_steps(log: Log, *steps: int) -> None:
    for step in steps:
        log.step(step, result(), 0.1)


LESS = " for 8 x 256 tokens; largest micro-batch so far 8 x 40: measured"
LOWERED = "memory ran out, and micro-batches are smaller than planned"


@pytest.mark.parametrize(
    ("measured", "how", "said"),
    [
        (24, {"largest": (8, 40)}, f"{LESS} 24.0 MiB"),
        (440, {"largest": (8, 40)}, f"{LESS} 440.0 MiB (+10.0 %)"),
        (24, {"largest": (50, 41)}, ", measured 24.0 MiB (-94.0 %)"),
        (24, {}, ", measured 24.0 MiB (-94.0 %; the plan is for batches of full-length samples)"),
        (300, {"is_lowered": True}, f", measured 300.0 MiB (-25.0 %; {LOWERED})"),
    ],
)
def test_memory_is_compared_with_the_plan_where_it_is_of_the_same_work(
    measured: int, how: dict[str, Any], said: str, tmp_path: Path
) -> None:
    log, written = logged(tmp_path, planned=PlannedMemory(400 * MIB, (8, 256)))
    with log:
        log.memory(2, measured * MIB, **how)
    assert written.getvalue() == f"memory: planned 400.0 MiB{said}\n"
    (record,) = records(tmp_path)
    assert record["planned_micro_batch"] == [8, 256]
    assert record["largest_micro_batch"] == (list(how["largest"]) if "largest" in how else None)


def test_what_people_and_programs_read(tmp_path: Path) -> None:
    log, written = logged(tmp_path, 3)
    with log:
        log.step(1, result(), 0.5)
        log.step(2, result(loss=float("nan")), 1.5)
        log.memory(2, 396 * MIB)
        log.evaluation(2, Evaluation(loss=1.0, targets=70, samples=7))
    assert written.getvalue().splitlines() == [
        "step 1/3  loss 2.5000  1.0 s left  2,000 target tokens/s  memory 400.0 MiB  lr 3.00e-04",
        "step 2/3  loss nan  1.0 s left  1,000 target tokens/s  memory 400.0 MiB  lr 3.00e-04",
        "memory: planned 400.0 MiB, measured 396.0 MiB (-1.0 %)",
        "step 2/3  validation loss 1.0000  perplexity 2.72  (7 samples)",
    ]
    first, second, memory, evaluation = records(tmp_path)
    assert first.pop("time") > 1e9
    assert first == {
        "event": "step", "step": 1, "loss": 2.5, "targets": 1000, "samples": 8, "learning_rate": 3e-4,
        "grad_norm": 0.5, "tokens_per_second": 2000.0, "tokens": None, "positions": None,
        "memory_bytes": None, "reserved_bytes": None,
    }  # fmt: skip
    assert second["loss"] is None
    assert (memory["planned_bytes"], memory["measured_bytes"]) == (400 * MIB, 396 * MIB)
    assert (evaluation["event"], evaluation["perplexity"]) == ("evaluation", pytest.approx(2.718282))


def test_of_one_target_a_sample_there_is_no_perplexity_to_read(tmp_path: Path) -> None:
    log, written = logged(tmp_path, 3)
    with log:
        log.evaluation(2, Evaluation(loss=45.0, targets=7, samples=7))
    assert written.getvalue() == "step 2/3  validation loss 45.0000  (7 samples)\n"


def test_a_long_run_prints_few_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    log, written = logged(tmp_path, 1000)
    with log:
        log_steps(log, *range(1, 1001))
    lines = written.getvalue().splitlines()
    assert len(lines) == 41
    assert (lines[0][:9], lines[-1][:14]) == ("step 1/10", "step 1000/1000")
    assert len(records(tmp_path)) == 1000


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Log(tmp_path, rank=1, planned=PLANNED, total_steps=1) as log:
        log.step(1, result(), 0.5)
        log.memory(1, 1)
        log.evaluation(1, Evaluation(loss=1.0, targets=1, samples=1))
        log.say("nothing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("torn", [b'{"event": "st', b"[1]\n", b'{"step": "x"}\n', b"\xff\n", b"[" * 100_000 + b"\n"])
def test_a_resumed_run_drops_what_is_no_record_and_records_of_steps_that_are_done_again(
    torn: bytes, tmp_path: Path
) -> None:
    log, _ = logged(tmp_path)
    with log:
        log_steps(log, 1, 2, 3)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)  # killed while writing
    log, _ = logged(tmp_path, first_step=2)
    with log:
        log_steps(log, 3)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_a_log_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere/metrics.jsonl: No such file or directory") as raised:
        logged(tmp_path / "nowhere")
    assert "hint: see to it that it can be written, then continue with --resume" in str(raised.value)


def fill(disk: Path) -> None:
    with pytest.raises(OSError, match="No space left"), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))


def test_records_wait_for_room_on_a_full_disk_and_each_comes_once(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        log, written = logged(disk)
        with log:
            log_steps(log, 1)
            fill(disk)
            log_steps(log, *range(2, 60))  # a page is there already
            said = written.getvalue()
            assert said.count("cannot write metrics.jsonl, it is kept for the next checkpoint: ") == 1
            assert f"No space left on device (0.0 MiB of 0.1 MiB are free at {disk}); make room at {disk}" in said
            with pytest.raises(OSError, match="No space left"):
                log.sync()
            subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
            log.sync()
        assert [record["step"] for record in records(disk)] == [*range(1, 60)]


def test_a_resume_on_a_full_disk_loses_no_record(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        log, _ = logged(disk)
        with log:
            log_steps(log, 1, 2, 3)
        before = (disk / "metrics.jsonl").read_bytes()
        fill(disk)
        with pytest.raises(CheckpointError, match="No space left on device"):
            logged(disk, first_step=2)
        assert (disk / "metrics.jsonl").read_bytes() == before
        assert {path.name for path in disk.iterdir()} == {"metrics.jsonl", "filler"}
        log, _ = logged(disk, first_step=3)  # nothing is to be dropped, so nothing is written
        with log:
            pass


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    log, written = logged(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, usual[1]))
    try:
        with log:
            log_steps(log, 1, 2)
            with pytest.raises(OSError, match="File too large"):
                log.sync()
            assert "raise the limit on the size of a file (`ulimit -f`)" in written.getvalue()
            assert [record["step"] for record in records(tmp_path)] == [1], "and no part of the next"
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [record["step"] for record in records(tmp_path)] == [1, 2]
