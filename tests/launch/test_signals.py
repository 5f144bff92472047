"""Whole runs, disturbed as shells, schedulers and crashed supervisors do it: what is saved, and how they end."""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest

from bench.runs import TINY, command, environment, prepared, records
from frugal.planning.plan import Plan

SLOW_MODEL = f"""
import time
from pathlib import Path
from frugal.models.objectives import CausalLM
from transformers import GPT2Config, GPT2LMHeadModel

class Slow(GPT2LMHeadModel):
    def forward(self, *arguments, **named):
        wait = Path("seconds")  # a micro-step; two are a step
        if wait.exists():
            time.sleep(float(wait.read_text()))
        return super().forward(*arguments, **named)

def model():
    return Slow(GPT2Config(**{TINY})), CausalLM()
"""
PATIENCE_SECONDS = 200
ENDLESS = ("--data", "text.jsonl", "--steps", 1_000_000, "--save-every", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose steps take as long as the file `seconds` says, text, and plans for one and two CPU ranks."""
    place = prepared(tmp_path_factory.mktemp("signals"), 1, 2)
    (place / "slow.py").write_text(SLOW_MODEL)
    for path in place.glob("plan*.json"):
        made = Plan.read(path)
        slow = replace(made, request=replace(made.request, model="slow.py:model"))
        path.write_bytes(slow.sealed().to_json())
    return place


@dataclass
class Run:
    """A run that would not end by itself, in its first steps."""

    process: subprocess.Popen[bytes]
    out: Path

    def family(self) -> list[psutil.Process]:
        """The command and all processes below it."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        return [each for each in self.family()[1:] if "frugal.engine.run" in each.cmdline()]

    def step(self) -> int:
        """How many are logged."""
        return max((record["step"] for record in records(self.out)), default=0)

    def come_to(self, step: int) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not (self.out / "metrics.jsonl").exists() or self.step() < step:
            assert self.process.poll() is None and time.monotonic() < end, "the run never came so far"
            time.sleep(0.05)

    def log(self) -> str:
        return (self.out / "logs" / "rank_0.log").read_text()

    def end(self) -> int:
        return self.process.wait(timeout=PATIENCE_SECONDS)

    def saved(self) -> int:
        return int((self.out / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))


def start(folder: Path, out: str, words: Sequence[str], *more: object, **how: Any) -> Run:
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | how
    process = subprocess.Popen(
        [*words, *map(str, (*ENDLESS, "--out", out, *more))], cwd=folder, env=environment(folder), **how
    )
    return Run(process, folder / out)


def signal_all(run: Run, number: signal.Signals) -> None:
    """As systemd, docker and scancel do it."""
    for each in run.family():
        each.send_signal(number)


def check_whole(run: Run) -> None:
    """Each step is logged once, and the last one is saved."""
    steps = [record["step"] for record in records(run.out) if record["event"] == "step"]
    assert steps == list(range(1, run.saved() + 1))
    with pytest.raises(ProcessLookupError):
        os.kill(run.process.pid, 0)


by_module = [sys.executable, "-m", "frugal.engine.run", "--plan", "plan1.json"]


@pytest.mark.parametrize(
    ("how", "number"),
    [
        ("command", signal.SIGHUP),
        *(
            pytest.param(how, number, marks=pytest.mark.exhaustive)
            for how, number in [
                ("command", signal.SIGTERM), ("command", signal.SIGUSR1), ("module", signal.SIGTERM),
                ("module", signal.SIGUSR1), ("module", signal.SIGHUP),
            ]
        ),
    ],
)  # fmt: skip
def test_a_single_rank_saves_its_step_and_ends_with_0(how: str, number: signal.Signals, folder: Path) -> None:
    words = command("--plan", "plan1.json") if how == "command" else by_module
    run = start(folder, f"one-{how}-{number.name}", words)
    run.come_to(2)
    run.process.send_signal(number)
    assert run.end() == 0
    check_whole(run)
    assert f"asked to stop by {number.name}: saving after this step, at most 600 s" in run.log()


@dataclass
class Ordeal:
    """What came of one run on two ranks that met with much."""

    run: Run
    steps: dict[str, int]
    codes: dict[str, int | None]


@pytest.fixture(scope="module")
def ordeal(folder: Path) -> Ordeal:
    """Started as `nohup` does, with a terminal that is closed; then SIGTERM to all of its processes."""
    ours, theirs = pty.openpty()

    def ignore_hangup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    run = start(folder, "ordeal", command("--plan", "plan2.json"), stdout=theirs, preexec_fn=ignore_hangup)
    os.close(theirs)
    run.come_to(2)
    steps, codes = {}, {}
    signal_all(run, signal.SIGHUP)
    os.close(ours)
    for name in ("hangup", "terminal closed"):
        steps[name] = run.step()
        run.come_to(steps[name] + 3)
        codes[name] = run.process.poll()
    signal_all(run, signal.SIGTERM)
    codes["SIGTERM to all"] = run.end()
    return Ordeal(run, steps, codes)


def test_nohup_is_respected_and_a_run_outlives_its_terminal(ordeal: Ordeal) -> None:
    assert ordeal.codes["hangup"] is None and ordeal.codes["terminal closed"] is None


def test_the_loss_of_the_terminal_is_noted_once_and_the_log_goes_on(ordeal: Ordeal) -> None:
    note = "standard output is gone (Input/output error): the run continues, and its output there is lost"
    lines = ordeal.run.log().splitlines()
    assert lines.count(note) == 1
    assert lines[-1] == (
        f"told to stop: step {ordeal.run.saved()} is saved in {ordeal.run.out}/checkpoints, continue with --resume"
    )


def test_sigterm_to_every_process_of_a_run_saves_its_step_and_ends_with_0(ordeal: Ordeal) -> None:
    assert ordeal.codes["SIGTERM to all"] == 0
    assert "asked to stop by SIGTERM: saving after this step, at most 600 s" in ordeal.run.log()
    check_whole(ordeal.run)
    assert ordeal.run.process.stderr is not None and ordeal.run.process.stderr.read() == b""


@pytest.mark.exhaustive  # two minutes
def test_a_step_of_75_seconds_is_waited_for(folder: Path) -> None:
    run = start(folder, "slow", command("--plan", "plan2.json"), "--set", "train.grace=300")
    run.come_to(2)
    (folder / "seconds").write_text("37.5")
    time.sleep(5)
    signal_all(run, signal.SIGTERM)
    try:
        began = time.monotonic()
        assert run.end() == 0
        assert time.monotonic() - began > 35
        check_whole(run)
    finally:
        (folder / "seconds").unlink()


@pytest.mark.parametrize("is_second", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_step_that_takes_longer_is_left_and_what_is_saved_is_said(is_second: bool, folder: Path) -> None:
    out = f"left-{is_second}"
    run = start(
        folder,
        out,
        command("--plan", "plan2.json"),
        "--set",
        f"train.grace={600 if is_second else 4}",
        "--save-every",
        2,
    )
    run.come_to(3)
    (folder / "seconds").write_text("400")
    time.sleep(2)
    try:
        run.process.send_signal(signal.SIGTERM)
        if is_second:
            time.sleep(6)
            run.process.send_signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
    finally:
        (folder / "seconds").unlink()
    assert run.process.stderr is not None
    because = "step under way was not waited for" if is_second else "step under way takes longer"
    assert run.process.stderr.read().decode() == (
        f"error: {'ended by a second SIGTERM' if is_second else 'not done within 4 s after SIGTERM'}\n"
        f"  because the {because}\n  because the last good checkpoint is step-{run.saved():06d}\n\n"
        "hint: continue from it with --resume; --set train.grace=SECONDS says how long a step and its checkpoint may "
        "take\n"
    )


def orphaned(run: Run) -> float:
    """Seconds until no rank is left, after the command was killed and nobody reaped it."""
    ranks = run.ranks()
    assert ranks
    run.process.kill()
    began = time.monotonic()
    dying = (
        psutil.STATUS_ZOMBIE,
        psutil.STATUS_RUNNING,
        psutil.STATUS_DISK_SLEEP,
    )  # its memory may still be written back
    assert psutil.Process(run.process.pid).status() in dying
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks):
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    took = time.monotonic() - began
    run.process.wait()
    return took


@pytest.mark.parametrize(
    "more", [(), pytest.param(("--max-restarts", 3), marks=pytest.mark.exhaustive)], ids=["command", "supervisor"]
)
def test_ranks_end_when_their_command_is_killed_and_nobody_reaps_it(more: tuple[object, ...], folder: Path) -> None:
    run = start(folder, f"orphaned-{len(more)}", command("--plan", "plan2.json"), *more)
    run.come_to(2)
    assert orphaned(run) < 10


@pytest.mark.exhaustive  # as the one above, in the midst of a step
def test_ranks_end_in_the_midst_of_a_long_step(folder: Path) -> None:
    run = start(folder, "orphaned-slow", command("--plan", "plan2.json"))
    run.come_to(2)
    (folder / "seconds").write_text("400")
    try:
        time.sleep(3)
        assert orphaned(run) < 10
    finally:
        (folder / "seconds").unlink()


@pytest.mark.exhaustive  # each starts a run
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_ranks_of_other_launchers_end_with_them(launcher: str, folder: Path) -> None:
    words = {
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m"],
        "deepspeed": [sys.executable, "-m", "deepspeed.launcher.launch", "--world_info", WORLD, "--module"],
    }[launcher]
    words[0] = shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or words[0]
    run = start(folder, launcher, [*words, "frugal.engine.run", "--plan", "plan2.json"])
    run.come_to(2)
    assert orphaned(run) < 10


WORLD = "eyJsb2NhbGhvc3QiOiBbMCwgMV19"  # {"localhost": [0, 1]}


@pytest.mark.exhaustive  # each starts a run
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("console", ["/dev/full", "head"])
def test_a_run_whose_output_cannot_be_written_comes_to_its_end(console: str, world_size: int, folder: Path) -> None:
    out = f"console-{Path(console).name}-{world_size}"
    words = command("--plan", f"plan{world_size}.json", "--data", "text.jsonl", "--steps", 30, "--out", out)
    pipe = "> /dev/full" if console == "/dev/full" else "| head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{' '.join(words)} {pipe}"], cwd=folder, env=environment(folder),
        capture_output=True, text=True, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [r["step"] for r in records(folder / out) if r["event"] == "step"] == list(range(1, 31))
    lines = (folder / out / "logs" / "rank_0.log").read_text().splitlines()
    assert sum(line.startswith("standard output is gone") for line in lines) == 1
    assert lines[-1] == f"model written to {folder / out}/model"
    assert sum(bool(re.match(r"step \d+/30  loss", line)) for line in lines) == 30


DRY_RUN = """
import sys, time
from frugal.dryrun.messages import WarmUp
from frugal.dryrun.pool import Pool
pool = Pool(1)
pool.tell(WarmUp(), 1)
while not pool._workers: time.sleep(0.01)
print(pool._workers[0]._process.pid, flush=True)
time.sleep(600)
"""


def test_a_dry_run_in_the_making_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    asking = subprocess.Popen([sys.executable, "-c", DRY_RUN], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    worker = psutil.Process(int(asking.stdout.readline()))
    time.sleep(0.5)
    asking.kill()  # and nobody reaps it
    began = time.monotonic()
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 10
        time.sleep(0.02)
    asking.wait()
