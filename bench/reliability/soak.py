"""Check a long run for leaks: memory, descriptors, threads, objects, children, shared memory over thousands of steps.

    python -m bench.reliability.soak [--steps 3000]

A tiny GPT-2 trains on two CPU ranks under `frugal train`, with a checkpoint and an evaluation every `SAVE_EVERY` steps.
Every `SAMPLE_EVERY` steps each rank and the command are looked at: resident memory, open descriptors, threads,
children, shared memory, objects that CPython's collector tracks, and blocks that it has allocated. The run's last third
is held against the third before it, memory by its median and counts by their least: nothing may have grown by more than
`TOLERANCE` says. What a start allocates once is in the first third. Results go to `bench/results/soak-cpu.json`; the
table is printed.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types

from bench.environment import environment
from bench.goals import report_goals
from bench.runs import command, prepared
from bench.runs import environment as environment_of_runs

RESULTS = Path(__file__).parents[1] / "results" / "soak-cpu.json"
STEPS, SAVE_EVERY, SAMPLE_EVERY, RANKS = 3000, 25, 50, 2
PATIENCE_SECONDS = 60

TOLERANCE = {
    "resident_bytes": 0.01, "descriptors": 0.0, "threads": 0.0, "children": 0.0, "objects": 0.005, "blocks": 0.005,
    "shared_bytes": 0.0,
}  # fmt: skip
"""By how much the last third may be over the third before it, as a part of it."""

COUNTS = ("descriptors", "threads", "children")
"""Held by their least: what a save has open for a moment is no leak, and one that stays open raises the least."""

COUNTER = '''
"""Imported by every interpreter of the run: SIGUSR2 has a rank count its objects."""

import gc
import json
import os
import signal
import sys


def count(_number, _frame):
    counts = {"objects": len(gc.get_objects()), "blocks": sys.getallocatedblocks()}
    path = os.path.join(os.environ["SOAK_COUNTS"], f"{os.getpid()}.json")
    with open(f"{path}.new", "w") as file:
        json.dump(counts, file)
    os.rename(f"{path}.new", path)


signal.signal(signal.SIGUSR2, count)
'''


Sample = Mapping[str, float]


def start(folder: Path, steps: int) -> subprocess.Popen[str]:
    """The run, whose ranks count their objects when they are told to."""
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(COUNTER)
    (folder / "counts").mkdir()
    path = os.pathsep.join(filter(None, [str(folder / "hook"), os.environ.get("PYTHONPATH", str(Path.cwd()))]))
    return subprocess.Popen(
        command(
            "--plan", "plan2.json", "--data", "text.jsonl", "--steps", steps, "--save-every", SAVE_EVERY,
            "--eval-every", SAVE_EVERY, "--out", "run",
        ),
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=environment_of_runs(folder) | {"PYTHONPATH": path, "SOAK_COUNTS": str(folder / "counts")},
    )  # fmt: skip


def watch(folder: Path, run: subprocess.Popen[str], every: int) -> list[dict[str, Any]]:
    """Samples until the run ends, each with its `step` and one entry a process: `command`, `rank 0` and so on."""
    samples: list[dict[str, Any]] = []
    while run.poll() is None:
        step = last_step(folder / "run" / "metrics.jsonl")
        if step >= (samples[-1]["step"] if samples else 0) + every:
            with suppress(psutil.NoSuchProcess, FileNotFoundError, TimeoutError):  # the run has ended meanwhile
                samples.append({"step": step, "processes": look(folder, run.pid)})
        time.sleep(0.05)
    return samples


def last_step(metrics: Path) -> int:
    """The newest step of which there is a record."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 2000))
            steps = [json.loads(line)["step"] for line in file.read().splitlines()[1:] if line.endswith(b"}")]
    except FileNotFoundError:
        return 0
    return max(steps, default=0)


def look(folder: Path, pid: int) -> dict[str, Sample]:
    """Return what the command and each rank hold now."""
    parent = psutil.Process(pid)
    tree = {"command": parent}
    for child in parent.children(recursive=True):
        rank = next((word for word in child.cmdline() if word.startswith("--local_rank=")), None)
        if rank is not None:
            tree[f"rank {rank.partition('=')[2]}"] = child
    return {name: held(process) | counted(folder, process, name) for name, process in tree.items()}


def held(process: psutil.Process) -> dict[str, float]:
    """Return what the kernel knows of a process."""
    with process.oneshot():
        return {
            "resident_bytes": process.memory_info().rss, "descriptors": process.num_fds(),
            "threads": process.num_threads(), "children": len(process.children()),
            "shared_bytes": shared_bytes(process.pid),
        }  # fmt: skip


def counted(folder: Path, process: psutil.Process, name: str) -> dict[str, float]:
    """Return what CPython knows of a rank.

    Raises:
        TimeoutError: it does not answer.
    """
    if name == "command":
        return {}
    answer = folder / "counts" / f"{process.pid}.json"
    process.send_signal(signal.SIGUSR2)
    end = time.monotonic() + PATIENCE_SECONDS
    while not answer.exists():
        if time.monotonic() > end:
            raise TimeoutError(name)
        time.sleep(0.01)
    counts: dict[str, float] = json.loads(answer.read_text())
    answer.unlink()
    return counts


def shared_bytes(pid: int) -> int:
    """Return the bytes of shared memory that a process holds: /dev/shm and anonymous."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssShmem"].split()[0]) * 1024


def growth(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """By process and quantity: what is typical of the second and the last third, and by which part the last is more."""
    third = len(samples) // 3
    parts = samples[third : 2 * third], samples[2 * third :]
    grown: dict[str, dict[str, dict[str, float]]] = {}
    for name in samples[-1]["processes"]:
        for quantity in samples[-1]["processes"][name]:
            typical = min if quantity in COUNTS else median
            second, last = (typical(each["processes"][name][quantity] for each in part) for part in parts)
            grown.setdefault(name, {})[quantity] = _compared(second, last)
    return grown


def _compared(second: float, last: float) -> dict[str, float]:
    return {"second_third": second, "last_third": last, "growth": (last - second) / max(second, 1)}


def is_flat(grown: Mapping[str, Mapping[str, Mapping[str, float]]]) -> bool:
    """Return whether nothing has grown by more than it may."""
    return all(
        entry["growth"] <= TOLERANCE[quantity] for entries in grown.values() for quantity, entry in entries.items()
    )


def table(grown: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return the table that is printed."""
    names = list(grown)
    words = {
        "resident_bytes": "resident memory, MiB",
        "shared_bytes": "shared memory, MiB",
        "descriptors": "open descriptors",
        "threads": "threads",
        "children": "children",
        "objects": "objects that CPython tracks",
        "blocks": "blocks that CPython has allocated",
    }
    lines = ["| second and last third of the steps | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for quantity, word in words.items():
        columns = []
        for name in names:
            entry = grown[name].get(quantity)
            unit = 2**20 if quantity.endswith("_bytes") else 1
            shown = "" if entry is None else f"{entry['second_third'] / unit:,.0f}, {entry['last_third'] / unit:,.0f}"
            columns.append(shown)
        lines.append(f"| {word} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def soak(steps: int, every: int) -> list[dict[str, Any]]:
    """Samples of one run.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = prepared(Path(place), 2)
        run = start(folder, steps)
        try:
            samples = watch(folder, run, every)
        finally:
            run.kill()
        errors = run.communicate()[1]
        if run.returncode != 0:
            raise RuntimeError(errors)
        return samples


def main() -> int:
    """Run, sample, and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    began = time.monotonic()
    samples = soak(asked.steps, SAMPLE_EVERY)
    grown = growth(samples)
    result = environment("python -m bench.reliability.soak") | {
        "ranks": RANKS, "steps": asked.steps, "save_and_evaluate_every": SAVE_EVERY,
        "seconds": round(time.monotonic() - began), "tolerance": TOLERANCE, "grown": grown, "samples": samples,
        "goals": {"nothing grows": is_flat(grown)},
    }  # fmt: skip
    print(table(grown))
    return report_goals(result, RESULTS if asked.steps == STEPS else None)


if __name__ == "__main__":
    sys.exit(main())
