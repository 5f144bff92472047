"""The cost of a fault: `frugal train` on one or two CPU ranks, interrupted in each way that ends runs.

    python -m bench.reliability.faults

A small GPT-2 trains 40 steps with a checkpoint every 5. For each fault: seconds until the command has ended, its exit
code, and the steps that are done again because the last checkpoint is older. Then the run is resumed, and its losses
are held against those of a run that nobody disturbed: they have to be equal to the last bit, each step exactly once.
A fault that a run is to outlive has no seconds; its losses are compared as they are.
Results go to `bench/results/faults-cpu.json`; a table is printed.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types

from bench.environment import environment
from bench.goals import report_goals

RESULTS = Path(__file__).parents[1] / "results" / "faults-cpu.json"
MODEL = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 260, "n_positions": 128}
STEPS, SAVE_EVERY, FAULT_AFTER = 40, 5, 12
FLAGS = (
    "--model", "config.json", "--mem", "2G", "--precision", "fp32", "--seq-len", "128", "--global-batch", "16",
    "--data", "text.jsonl", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--validation-data", "10%",
)  # fmt: skip
PATIENCE_SECONDS = 300
SMALL_DISK = "64m"
FILLER = "of-another-program"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one fault.

    Attributes:
        fault: in words.
        seconds: from the fault until the command and all of its ranks had ended; None: the run went on to its end.
        exit_code: of the command, as shells say it.
        message: what it said at the end.
        steps_done: by the run that was disturbed.
        steps_saved: that of its newest checkpoint that is whole.
        is_exact: whether the resumed run's losses are the undisturbed run's, bit for bit.
    """

    fault: str
    seconds: float | None
    exit_code: int
    message: str
    steps_done: int
    steps_saved: int
    is_exact: bool


class Run:
    """One `frugal train` in a folder of its own. `ignored`: a signal that it ignores from its start on."""

    def __init__(
        self, folder: Path, out: Path, *more: str, ranks: int = 2, ignored: signal.Signals | None = None
    ) -> None:
        self.folder, self.out = folder, out
        command = [
            sys.executable,
            "-m",
            "frugal",
            "train",
            *FLAGS,
            "--device",
            "cpu",
            "--gpus",
            str(ranks),
            "--out",
            str(out),
            *more,
        ]
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=None if ignored is None else lambda: signal.signal(ignored, signal.SIG_IGN),
        )  # fmt: skip

    def wait_for(self, is_there: Callable[[], bool]) -> None:
        """Return when something is so; the command may not end before."""
        began = time.monotonic()
        while not is_there():
            if self.process.poll() is not None or time.monotonic() - began > PATIENCE_SECONDS:
                raise RuntimeError(f"the run never came so far:\n{self.process.communicate()[0]}")
            time.sleep(0.002)

    def ranks(self) -> list[psutil.Process]:
        """The processes of its ranks, in order."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [(word, child) for child in children for word in child.cmdline() if word.startswith("--local_rank=")]
        return [child for _, child in sorted(found, key=lambda each: each[0])]

    def end(self) -> tuple[int, str]:
        """Exit code and output. A command that has ended is not reaped before all who hold its output have."""
        output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        code = self.process.returncode
        return (code if code >= 0 else 128 - code), output


def losses(out: Path) -> dict[int, float]:
    """The loss of each step; every step once."""
    found: dict[int, float] = {}
    for line in (out / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line) if line.endswith("}") else {}
        if record.get("event") == "step":
            assert record["step"] not in found, f"step {record['step']} was logged twice"
            found[record["step"]] = record["loss"]
    return found


def is_after(run: Run, step: int) -> Callable[[], bool]:
    """Return whether a run has logged so many steps."""
    return lambda: (run.out / "metrics.jsonl").exists() and len(losses(run.out)) >= step


def told(number: signal.Signals, rank: int | None) -> Callable[[Run], float]:
    """A signal to one rank, or to the command itself; when."""

    def disturb(run: Run) -> float:
        run.wait_for(is_after(run, FAULT_AFTER))
        target = run.process if rank is None else run.ranks()[rank]
        target.send_signal(number)
        return time.monotonic()

    return disturb


def told_all(number: signal.Signals) -> Callable[[Run], float]:
    """A signal to every process of the run, as systemd, docker and scancel send it; when."""

    def disturb(run: Run) -> float:
        run.wait_for(is_after(run, FAULT_AFTER))
        own = psutil.Process(run.process.pid)
        for process in (own, *own.children(recursive=True)):
            process.send_signal(number)
        return time.monotonic()

    return disturb


def leave(run: Run) -> float:
    """Nobody reads any more what the run prints."""
    run.wait_for(is_after(run, FAULT_AFTER))
    assert run.process.stdout is not None
    run.process.stdout.close()
    return time.monotonic()


def in_a_save(run: Run) -> float:
    """SIGKILL to rank 1 while the third checkpoint is being written."""
    run.wait_for(is_after(run, 1))
    rank = run.ranks()[1]
    aside = run.out / "checkpoints" / f"step-{3 * SAVE_EVERY:06d}.tmp"
    run.wait_for(aside.exists)
    rank.send_signal(signal.SIGKILL)
    return time.monotonic()


def fill(run: Run) -> float:
    """Another program takes what is left of the run's disk."""
    run.wait_for(is_after(run, FAULT_AFTER))
    fill_disk(run)
    return time.monotonic()


def fill_disk(run: Run) -> None:
    """Leave nothing of it."""
    with contextlib.suppress(OSError), (run.out / FILLER).open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 9))


def fill_and_kill(run: Run) -> float:
    """Another program takes what is left of the disk of a run that was killed, so that there is no room to resume."""
    run.wait_for(is_after(run, FAULT_AFTER))
    run.ranks()[1].send_signal(signal.SIGKILL)
    run.end()
    fill_disk(run)
    run.process = Run(run.folder, run.out, "--resume").process
    return time.monotonic()


def move(run: Run) -> float:
    """Rename the run's folder, where the run is resumed."""
    run.wait_for(is_after(run, FAULT_AFTER))
    run.out = run.out.rename(run.out.with_name(f"{run.out.name}-moved"))
    return time.monotonic()


def tear(run: Run) -> float:
    """A rank is killed, and the last record of the metrics is half a line."""
    at = told(signal.SIGKILL, 0)(run)
    run.process.wait()
    metrics = run.out / "metrics.jsonl"
    os.truncate(metrics, metrics.stat().st_size - 40)
    return at


def truncated(out: Path) -> list[Path]:
    """Copies of a run's folder, in each another file of the newest checkpoint cut to half."""
    copies = []
    newest = Path("checkpoints") / (out / "checkpoints" / "latest").read_text().strip()
    for name in sorted(path.name for path in (out / newest).iterdir()):
        copies.append(out.with_name(f"{out.name}-{name}"))
        shutil.copytree(out, copies[-1])
        file = copies[-1] / newest / name
        os.truncate(file, file.stat().st_size // 2)
    return copies


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of a run: `disturb` causes it and returns when. `ignored`: a signal that the run ignores.

    `is_outlived`: the run is to go on to its end.
    """

    disturb: Callable[[Run], float]
    ranks: int = 2
    ignored: signal.Signals | None = None
    is_outlived: bool = False


def disturbed(folder: Path, whole: dict[int, float], name: str, fault: Fault) -> Outcome:
    """A run, the fault, and the run that continues it."""
    out = folder / re.sub(r"\W+", "-", name)
    small = name in ON_SMALL_DISKS
    if small:
        out.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "tmpfs", str(out)], check=True)
    try:
        run = Run(folder, out, ranks=fault.ranks, ignored=fault.ignored)
        at = fault.disturb(run)
        code, output = run.end()
        seconds = time.monotonic() - at
        if small and code == 0:
            raise RuntimeError(f"{SMALL_DISK} were enough")
        out_now = run.out
        done = max(losses(out_now))
        if small:
            (out / FILLER).unlink()
        if fault.is_outlived:
            continued = [(done, losses(out_now))]
        else:
            continued = [
                resumed(folder, each, fault.ranks) for each in (truncated(out) if name == TRUNCATED else [out_now])
            ]
        return Outcome(
            fault=name,
            seconds=None if fault.is_outlived else round(seconds, 1),
            exit_code=code,
            message=last_word(output),
            steps_done=done,
            steps_saved=min(step for step, _ in continued),
            is_exact=all(found == whole for _, found in continued),
        )
    finally:
        if small:
            subprocess.run(["umount", str(out)], check=True)


def resumed(folder: Path, out: Path, ranks: int) -> tuple[int, dict[int, float]]:
    """Continue a run to its end: the step it went on from, and the losses of all steps."""
    code, said = Run(folder, out, "--resume", ranks=ranks).end()
    if code != 0:
        raise RuntimeError(f"the run in {out} cannot be resumed:\n{said}")
    saved = re.search(r"continuing after step (\d+)", said)
    return int(saved[1]) if saved else 0, losses(out)


def last_word(output: str) -> str:
    """The error's first line, or the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("error: ")), lines[-1] if lines else "")


def damaged_cache(*, is_cut: bool) -> Callable[[Run], float]:
    """SIGKILL of rank 1; then the tokenised data is cut to half, or one token in it becomes another one."""

    def disturb(run: Run) -> float:
        at = told(signal.SIGKILL, 1)(run)
        run.process.wait(PATIENCE_SECONDS)
        for file in (run.folder / "cache" / "frugal" / "data").glob("*/train.arrow"):
            data = file.read_bytes()
            middle = data.index((4 + ord("b")).to_bytes(4, "little"), len(data) // 2)  # a `b` becomes a `c`
            with file.open("r+b") as opened:
                if is_cut:
                    opened.truncate(len(data) // 2)
                else:
                    opened.seek(middle)
                    opened.write(bytes([4 + ord("c")]))
        return at

    return disturb


TRUNCATED, DISK_FULL = "each of the newest checkpoint's files truncated", "disk full"
DISK_FULL_AT_RESUME = "disk full at a resume"
ON_SMALL_DISKS = (DISK_FULL, DISK_FULL_AT_RESUME)
FAULTS = {
    "SIGKILL of rank 0": Fault(disturb=told(signal.SIGKILL, 0)),
    "SIGKILL of rank 1": Fault(disturb=told(signal.SIGKILL, 1)),
    "SIGKILL in a save": Fault(disturb=in_a_save),
    "SIGKILL of the command, which nobody reaps": Fault(disturb=told(signal.SIGKILL, None)),
    "SIGTERM to the command": Fault(disturb=told(signal.SIGTERM, None)),
    "SIGTERM to one rank": Fault(disturb=told(signal.SIGTERM, 1)),
    "SIGTERM to every process": Fault(disturb=told_all(signal.SIGTERM)),
    "SIGTERM to a run on one rank": Fault(disturb=told(signal.SIGTERM, None), ranks=1),
    "SIGHUP": Fault(disturb=told(signal.SIGHUP, None)),
    "SIGHUP under nohup": Fault(disturb=told_all(signal.SIGHUP), ignored=signal.SIGHUP, is_outlived=True),
    "Ctrl-C": Fault(disturb=told(signal.SIGINT, None)),
    "console gone": Fault(disturb=leave, is_outlived=True),
    DISK_FULL: Fault(disturb=fill),
    DISK_FULL_AT_RESUME: Fault(disturb=fill_and_kill),
    "run folder moved": Fault(disturb=move),
    "half a line at the end of metrics.jsonl": Fault(disturb=tear),
    TRUNCATED: Fault(disturb=told(signal.SIGKILL, 1)),
    "data cache truncated": Fault(disturb=damaged_cache(is_cut=True)),
    "data cache damaged inside the vocabulary": Fault(disturb=damaged_cache(is_cut=False)),
}


def table(outcomes: list[Outcome]) -> str:
    """Return the table that is printed."""
    lines = ["| fault | ends after | exit code | steps done again | resumed |", "|---|---|---|---|---|"]
    for each in outcomes:
        again = each.steps_done - each.steps_saved
        exact = "bit for bit" if each.is_exact else "DIFFERS"
        ends = "goes on" if each.seconds is None else f"{each.seconds:.1f} s"
        lines.append(f"| {each.fault} | {ends} | {each.exit_code} | {again} | {exact} |")
    return "\n".join(lines)


def main() -> int:
    """Disturb, resume, compare, and keep what came of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "config.json").write_text(json.dumps(MODEL))
        rows = [{"text": f"line {i}: " + "to be or not to be, " * (i % 7)} for i in range(400)]
        (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        whole = {}
        for ranks in (1, 2):
            code, output = Run(folder, folder / f"whole-{ranks}", ranks=ranks).end()
            if code != 0:
                raise RuntimeError(output)
            whole[ranks] = losses(folder / f"whole-{ranks}")
        outcomes = []
        for name, fault in FAULTS.items():
            if name in ON_SMALL_DISKS and (os.geteuid() != 0 or shutil.which("mount") is None):
                print(f"left out: {name}, as only root may mount a small file system", file=sys.stderr)
                continue
            outcomes.append(disturbed(folder, whole[fault.ranks], name, fault))
            print(outcomes[-1], file=sys.stderr)
    result = environment("python -m bench.reliability.faults") | {
        "ranks": 2,
        "steps": STEPS,
        "save_every": SAVE_EVERY,
        "outcomes": [asdict(each) for each in outcomes],
        "goals": {
            "every run is resumed bit for bit": all(each.is_exact for each in outcomes),
            "every run that ends does so within a minute": all((each.seconds or 0) < 60 for each in outcomes),
        },
    }
    print(table(outcomes))
    return report_goals(result, RESULTS)


if __name__ == "__main__":
    sys.exit(main())
