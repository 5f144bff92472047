"""Whole runs that end early: a killed rank, fewer devices, a full disk. They go on from what was saved, exactly."""

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types
import pytest

from bench.runs import command, environment, frugal_train, prepared, records
from frugal.report.run import read_run
from tests.disks import small_disk

pytestmark = pytest.mark.exhaustive  # each starts several runs

RUN = ("--data", "text.jsonl", "--steps", 30, "--save-every", 5, "--validation-data", "10%")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without dropout, whose masks would depend on the ranks; text, and plans for one CPU rank and two."""
    return prepared(tmp_path_factory.mktemp("restarts"), 1, 2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


def losses(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in records(run) if record["event"] == "step"]


def run_and_kill(program: list[str], folder: Path, run: Path, after: int) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run whose rank 1 gets SIGKILL once `after` steps are logged."""
    with subprocess.Popen(
        program, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(losses(run)) < after:
            assert process.poll() is None and time.monotonic() < deadline, "the run never came so far"
            time.sleep(0.02)
        for child in psutil.Process(process.pid).children(recursive=True):
            if "--local_rank=1" in child.cmdline():
                child.send_signal(signal.SIGKILL)
        output, errors = process.communicate(timeout=200)
        return process.returncode, output, errors


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[tuple[int, float]]:
    """Losses of the run that nobody disturbs."""
    code, _, errors = frugal_train(folder, "--plan", "plan2.json", *RUN, "--out", "whole")
    assert (code, errors) == (0, "")
    return losses(folder / "whole")


def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint_and_nothing_else(
    folder: Path, whole: list[tuple[int, float]]
) -> None:
    supervised = command("--plan", "plan2.json", *RUN, "--out", "killed", "--max-restarts", 2)
    code, output, errors = run_and_kill(supervised, folder, folder / "killed", after=7)
    assert code == 0, output + errors
    line = r"restart 1 of 2: a rank was ended by SIGKILL after step \d+; resuming from step-0000(05|10|15|20|25|30)\n"
    assert re.fullmatch(line, errors), errors
    assert losses(folder / "killed") == whole
    events = read_run(folder / "killed").events
    assert [event.kind for event in events] == ["start", "failed", "restart", "done"]
    assert events[1].words == "a rank was ended by SIGKILL"
    assert (folder / "killed" / "report.html").exists()


ON_ONE = (
    "from frugal.cli import main; from frugal.launch import local; local.working_devices = lambda plan: [0]; main()"
)


def apart(run: list[tuple[int, float]], whole: list[tuple[int, float]]) -> float:
    """Return how far the losses of two runs are apart at most, relative."""
    assert [step for step, _ in run] == [step for step, _ in whole]
    return max(abs(loss / expected - 1) for (_, loss), (_, expected) in zip(run, whole, strict=True))


def test_elastic_goes_on_with_the_devices_that_are_left(folder: Path, whole: list[tuple[int, float]]) -> None:
    supervised = command("--plan", "plan2.json", *RUN, "--out", "elastic", "--max-restarts", 2, "--elastic")
    supervised[1:3] = ["-c", ON_ONE]
    code, output, errors = run_and_kill(supervised, folder, folder / "elastic", after=7)
    assert code == 0, output + errors
    assert errors.splitlines()[1] == "1 of 2 devices are left: planning again"
    assert "2 ranks -> 1 rank" in output
    code, _, errors = frugal_train(folder, "--plan", "plan1.json", *RUN, "--out", "one")
    assert (code, errors) == (0, "")
    # sums over one rank are rounded otherwise than over two, and how these samples amplify that no formula says
    bound = 4 * apart(losses(folder / "one"), whole)
    assert apart(losses(folder / "elastic"), whole) < bound < 0.01


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for few checkpoints."""
    with small_disk(tmp_path / "run", "1200k") as disk:
        yield disk


def test_a_full_disk_ends_the_command_with_6_and_it_goes_on_when_there_is_room(
    folder: Path, whole: list[tuple[int, float]], disk: Path
) -> None:
    code, output, errors = frugal_train(folder, "--plan", "plan2.json", *RUN, "--keep", 9, "--out", disk)
    assert code == 6, output + errors
    lines = errors.splitlines()
    latest = (disk / "checkpoints" / "latest").read_text().strip()
    assert lines[0].startswith(f"error: cannot write the checkpoint {disk}/checkpoints/step-0000")
    assert lines[-3:] == [
        f"  because the last good checkpoint is {latest}", "", f"hint: make room at {disk}, then continue with --resume"
    ]  # fmt: skip
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    code, _, errors = frugal_train(folder, "--resume", "--out", disk)
    assert (code, errors) == (0, "")
    assert losses(disk) == whole
