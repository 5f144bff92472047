"""`frugal train` as people call it: a tiny model, text, plans, and the command in a process of its own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from bench.plans import plan_by_hand
from frugal.config.optimizers import Optimizer
from frugal.planning.plan import Plan

TINY = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 260, "n_positions": 64}


PINNED = ("--offload", "none", "--activation-checkpointing", "off", "--loss", "plain")
"""One way to train, where a plan is not what is looked at: each other one would be traced."""


def prepared(folder: Path, *world_sizes: int, documents: int = 200, **config: Any) -> Path:
    """`folder`, now with a tiny model's config.json, text to train on, and a plan for each number of CPU ranks."""
    (folder / "config.json").write_text(json.dumps(TINY | config))
    rows = [{"text": f"line {i}: " + "to be or not to be, " * (i % 7)} for i in range(documents)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for world_size in world_sizes:
        (folder / f"plan{world_size}.json").write_bytes(plan(folder, world_size).to_json())
    return folder


def plan(folder: Path, world_size: int) -> Plan:
    made = plan_by_hand(
        world_size=world_size, global_batch=8, micro_batch=2, zero_stage=2,
        request={
            "model": str(folder / "config.json"), "learning_rate": 2.5e-3,
            "optimizer": Optimizer(reference_batch=2, lr_rule="linear"),
        },
    )  # fmt: skip
    return msgspec.convert(msgspec.to_builtins(made), Plan).sealed()  # numbers as a file has them


def environment(folder: Path) -> dict[str, str]:
    """A cache of its own, and as many threads as a test may take."""
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "frugal", "train", *map(str, arguments)]


def frugal_train(folder: Path, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a real run in a process of its own."""
    done = subprocess.run(
        command(*arguments), cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=280
    )
    return done.returncode, done.stdout, without_waiting(done.stderr)


def without_waiting(said: str) -> str:
    """Return what a command said, without lines about what takes more than three seconds, which a slow machine has."""
    return re.sub(r"^.* \.\.\.\n", "", said, flags=re.MULTILINE)


def records(path: Path) -> list[dict[str, Any]]:
    """Return what a run has logged for programs."""
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def torchrun(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A run on two ranks that torchrun starts."""
    script = Path(__file__).parents[1] / "launch" / "torchrun.sh"
    return subprocess.run(
        [script, "2", *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=200,
        env=environment(folder) | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
