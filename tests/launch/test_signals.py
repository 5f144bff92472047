"""Whole runs, disturbed as shells, schedulers and crashed supervisors do it: what is saved, and how they end."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest

from bench.runs import TINY, command, environment, prepared, records
from frugal.planning.plan import Plan
from tests import forked

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
        """Return how many are logged."""
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
    start = forked.popen if words[:2] == [sys.executable, "-m"] and "frugal" in words[2] else subprocess.Popen
    process = start([*words, *map(str, (*ENDLESS, "--out", out, *more))], cwd=folder, env=environment(folder), **how)
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


@pytest.mark.exhaustive  # two ranks do the same below
@pytest.mark.parametrize(
    ("how", "number"),
    [("command", signal.SIGHUP), ("command", signal.SIGUSR1), ("module", signal.SIGTERM), ("module", signal.SIGHUP)],
)
def test_a_single_rank_saves_its_step_and_ends_with_0(how: str, number: signal.Signals, folder: Path) -> None:
    words = command("--plan", "plan1.json") if how == "command" else by_module
    run = start(folder, f"one-{how}-{number.name}", words)
    run.come_to(2)
    run.process.send_signal(number)
    assert run.end() == 0
    check_whole(run)
    assert f"asked to stop by {number.name}: saving after this step, at most 600 s" in run.log()


def test_a_run_outlives_its_terminal_and_saves_its_step_when_all_processes_are_asked_to_stop(folder: Path) -> None:
    """Started as `nohup` does, with a terminal that is closed; then SIGTERM to all of its processes."""
    ours, theirs = pty.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run = start(folder, "ordeal", command("--plan", "plan2.json"), stdout=theirs)
    signal.signal(signal.SIGHUP, before)
    os.close(theirs)
    run.come_to(2)
    signal_all(run, signal.SIGHUP)
    os.close(ours)
    run.come_to(run.step() + 3)
    assert run.process.poll() is None
    signal_all(run, signal.SIGTERM)
    assert run.end() == 0
    lines = run.log().splitlines()
    note = "standard output is gone (Input/output error): the run continues, and its output there is lost"
    assert lines.count(note) == 1
    assert "asked to stop by SIGTERM: saving after this step, at most 600 s" in run.log()
    assert lines[-1] == f"told to stop: step {run.saved()} is saved in {run.out}/checkpoints, continue with --resume"
    check_whole(run)
    assert run.process.stderr is not None and run.process.stderr.read() == b""


@pytest.mark.exhaustive  # each starts a run; tests/distributed/test_stop.py leaves a long operation either way
@pytest.mark.parametrize("is_second", [False, True])
def test_a_step_that_takes_longer_is_left_and_what_is_saved_is_said(is_second: bool, folder: Path) -> None:
    grace = f"train.grace={600 if is_second else 4}"
    run = start(folder, f"left-{is_second}", command("--plan", "plan2.json"), "--set", grace, "--save-every", 2)
    run.come_to(3)
    with long_steps(folder):
        run.process.send_signal(signal.SIGTERM)
        if is_second:
            time.sleep(6)
            run.process.send_signal(signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM
    assert run.process.stderr is not None
    said = run.process.stderr.read().decode()
    assert said.startswith(
        "error: ended by a second SIGTERM\n  because the step under way was not waited for\n" if is_second
        else "error: not done within 4 s after SIGTERM\n  because the step under way takes longer\n"
    )  # fmt: skip
    assert f"  because the last good checkpoint is step-{run.saved():06d}\n" in said
    assert "hint: continue from it with --resume; --set train.grace=SECONDS" in said


@contextmanager
def long_steps(folder: Path) -> Iterator[None]:
    """Have every step take minutes, from one on that is under way."""
    (folder / "seconds").write_text("400")
    time.sleep(2)
    try:
        yield
    finally:
        (folder / "seconds").unlink()


def orphaned(run: Run) -> float:
    """Seconds until no rank is left, after the command was killed and nobody reaped it."""
    ranks = run.ranks()
    assert ranks
    run.process.kill()
    began = time.monotonic()
    dying = (psutil.STATUS_ZOMBIE, psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)  # its memory may be written back
    assert psutil.Process(run.process.pid).status() in dying
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ranks):
        assert time.monotonic() - began < 60
        time.sleep(0.02)
    took = time.monotonic() - began
    run.process.wait()
    return took


@pytest.mark.exhaustive  # each starts a run; tests/distributed/test_stop.py has a process with a parent
@pytest.mark.parametrize(("more", "is_in_step"), [((), False), ((), True), (("--max-restarts", 3), False)])
def test_ranks_end_when_their_command_is_killed_and_nobody_reaps_it(
    more: tuple[object, ...], is_in_step: bool, folder: Path
) -> None:
    run = start(folder, f"orphaned-{len(more)}-{is_in_step}", command("--plan", "plan2.json"), *more)
    run.come_to(2)
    with long_steps(folder) if is_in_step else nullcontext():
        assert orphaned(run) < 10


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


DRY_RUN = """
import threading, time
from frugal.config.request import Request
from frugal.dryrun.messages import AskFacts
from frugal.dryrun.pool import Pool
pool = Pool(1)
threading.Thread(target=pool.ask, args=([AskFacts(Request(model="gpt2"))],), daemon=True).start()
while len(pool._processes) < 2: time.sleep(0.01)
server, worker = pool._processes
print(server.process.pid, worker.pid, flush=True)
time.sleep(600)
"""


def test_a_dry_run_in_the_making_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    asking = subprocess.Popen([sys.executable, "-c", DRY_RUN], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in asking.stdout.readline().split()]
    asking.kill()  # and nobody reaps it
    began = time.monotonic()
    while any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
        assert time.monotonic() - began < 10
        time.sleep(0.02)
    asking.wait()
