"""`metrics.jsonl` while other programs are at it."""

import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.runs import records
from frugal.config.run_settings import METRICS
from frugal.engine.reports.metrics import Records
from frugal.errors import FrugalError
from frugal.launch import restart
from frugal.report.records import MOST_RECORDS, read_history

MIB = 1 << 20


def record(step: int, event: str = "step") -> bytes:
    values = {"event": event, "step": step, "loss": 2.5, "time": 1_700_000_000.0 + step / 4, "why": "x" * 200}
    return json.dumps(values).encode() + b"\n"


def steps_of(folder: Path) -> list[int]:
    return [each["step"] for each in records(folder)]


def edit_with_sed(path: Path) -> None:
    subprocess.run(["sed", "-i", "s/2.5/2.25/", str(path)], check=True)


def put_back_a_copy_of_two_steps(path: Path) -> None:
    copy = path.with_name("copy")
    copy.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    copy.rename(path)


@pytest.mark.parametrize(
    ("replace", "steps"),
    [(edit_with_sed, [*range(1, 9)]), (put_back_a_copy_of_two_steps, [1, 2, 5, 6, 7, 8]), (Path.unlink, [5, 6, 7, 8])],
)
def test_later_records_are_in_the_file_that_has_the_name(
    replace: Callable[[Path], None], steps: list[int], tmp_path: Path
) -> None:
    path = tmp_path / METRICS
    metrics = Records(path, 0)
    for step in range(1, 9):
        metrics.add(record(step))
        if step == 4:
            replace(path)
    metrics.sync()
    assert steps_of(tmp_path) == steps


@pytest.mark.parametrize("kept_bytes", [0, 300])
def test_a_file_that_is_cut_in_place_gets_all_later_records_on_lines_of_their_own(
    kept_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / METRICS
    metrics = Records(path, 0)
    for step in (1, 2, 3):
        metrics.add(record(step))
    os.truncate(path, kept_bytes)
    for step in (4, 5):
        metrics.add(record(step))
    metrics.close(in_error=False)
    readable = [json.loads(line)["step"] for line in path.read_bytes().splitlines() if line.endswith(b"}")]
    assert readable == ([4, 5] if kept_bytes == 0 else [1, 4, 5])


def of_no_use(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


NO_FILES = pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, of_no_use], ids=["a pipe", "a folder", "a link"])


@NO_FILES
def test_nobody_waits_for_what_is_no_file_which_is_renamed_and_the_run_goes_on(
    make: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / METRICS
    make(path)
    assert restart.judge(-9, None, tmp_path).step == 0
    with pytest.raises(FrugalError, match="cannot read the records of"):
        read_history(tmp_path)
    metrics = Records(path, 0)  # at a start or a resume
    metrics.add(record(1))
    path.unlink()
    make(path)
    metrics.add(record(2))
    metrics.close(in_error=False)
    assert steps_of(tmp_path)[-1] == 2
    assert not (tmp_path / "elsewhere").exists()
    assert len(list(tmp_path.glob(f"{METRICS}.kept*"))) == 2, "what was there is kept"
    assert caplog.text.count(f"and was moved to {METRICS}.kept") == 2


def test_lines_that_are_no_records_are_left_out_at_a_resume_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / METRICS
    path.write_bytes(b"\x00\xff" * 50 + b"\n[1]\n" + record(1) + b"7\n\n" + record(2)[:-20])
    metrics = Records(path, 1)
    metrics.close(in_error=False)
    assert steps_of(tmp_path) == [1]
    assert f"{path}: 3 lines of it cannot be read as records, and are left out" in caplog.text


@pytest.mark.parametrize("content", [b"[1]\n7\nnull\n", b"\x00\xff\xfe\n" * 9, b"[" * 300_000 + b"\n"])
def test_a_supervisor_that_cannot_read_the_records_counts_from_the_checkpoint(content: bytes, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(content)
    assert restart.judge(-9, None, tmp_path).step == 0


def in_memory_of(num_bytes: int, work: Callable[[], object]) -> int:
    """Do this in a forked process that may take so many bytes more; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + num_bytes, now + num_bytes))
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("size", "memory"),
    [(100 * MIB, 64 * MIB), pytest.param(1024 * MIB, 512 * MIB, marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_one_endless_line_takes_no_memory(size: int, memory: int, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_bytes(record(1))
    os.truncate(tmp_path / METRICS, size)  # zeros, which take no room on the disk
    with (tmp_path / METRICS).open("ab") as file:
        file.write(b"\n" + record(2))

    def work() -> None:
        history = read_history(tmp_path)
        assert [each.step for each in history.steps] == [1, 2] and history.num_broken == 1
        assert restart.judge(-9, None, tmp_path).step == 2
        Records(tmp_path / METRICS, 1).close(in_error=False)
        assert steps_of(tmp_path) == [1]

    assert in_memory_of(memory, work) == 0


@pytest.mark.exhaustive  # 40 s: a GiB of records
def test_a_gib_of_records_is_read_in_bounded_memory_and_the_report_says_what_it_leaves_out(tmp_path: Path) -> None:
    number, size = 0, 0
    with (tmp_path / METRICS).open("wb") as file:
        while size < 1024 * MIB:
            number += 1
            size += file.write(record(number) + (record(number, "evaluation") if number % 4 == 0 else b""))

    def work() -> None:
        history = read_history(tmp_path)
        assert history.steps[0].step == 1 and history.steps[-1].step == number
        assert len(history.steps) <= MOST_RECORDS + 1 and len(history.others) == MOST_RECORDS
        assert history.num_left_out == number + number // 4 - len(history.steps) - len(history.others)
        metrics = Records(tmp_path / METRICS, number - 1)
        assert metrics.dropped_steps == 1
        metrics.close(in_error=False)

    assert in_memory_of(512 * MIB, work) == 0
