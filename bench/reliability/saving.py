"""`python -m bench.reliability.saving`: how long a checkpoint holds up training, written at once and in the background.

One CPU rank with one thread trains a model whose checkpoint has some hundred MB, under ZeRO-2. Each round saves once in
each way and then trains three steps. Measured: the seconds until training goes on, those of the steps beside the
writing, against steps without, and the seconds until all is written. Ratios are of one round; medians of the rounds.

The disk is this machine's. On a slow or a shared one writing takes longer, and what is gained is more.

Goal: training waits for at most a third of the time. `--record` keeps the result.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import frugal
from bench.environment import environment
from bench.goals import report_goals
from bench.plans import without_calibration
from bench.ranks import Ranks
from frugal.planning.plan import Plan

RESULTS = Path(__file__).parents[1] / "results" / "saving-cpu.json"
MODEL = {"n_layer": 8, "n_embd": 512, "n_head": 8, "vocab_size": 260, "n_positions": 128}
SEQ_LEN, ROUNDS, STEPS, MOST = 128, 7, 3, 1 / 3


def planned(folder: Path) -> Plan:
    """One micro-batch of four samples a step."""
    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **MODEL}))
    without_calibration()
    return frugal.plan(
        model=str(config), device="cpu", gpus=1, mem="4G", seq_len=SEQ_LEN, global_batch=4, precision="fp32",
        zero_stage=2,
    )  # fmt: skip


def rounds(plan: Plan, folder: Path) -> dict[str, Any]:
    """Seconds of each round, and the bytes of a checkpoint; runs on a rank."""
    import torch

    from frugal.checkpoint.progress import Progress
    from frugal.checkpoint.saving import Saver
    from frugal.engine.engine import initialize
    from frugal.models.objectives import CausalLM
    from frugal.models.resolve import resolve

    spec = resolve(plan.request.model, None)
    engine = initialize(spec.build(dtype=torch.float32, device="cpu", seed=0), plan, CausalLM())
    tokens = np.random.default_rng(0).integers(4, 260, (plan.batch.global_batch, SEQ_LEN))
    batch = engine.prepare([{"input_ids": each} for each in tokens])
    ways = {
        name: Saver(engine, folder / name, keep=1, in_background=name == "in background")
        for name in ("at once", "in background")
    }
    found: dict[str, Any] = {name: {"held": [], "steps": [], "written": []} for name in ways}
    for turn in range(ROUNDS + 1):  # the first is thrown away
        for name in sorted(ways, reverse=turn % 2 == 1):
            began = time.perf_counter()
            path = ways[name].save(Progress(step=turn + 1))
            held = time.perf_counter() - began
            for _ in range(STEPS):
                engine.train_step(batch)
            trained = time.perf_counter() - began - held
            ways[name].finish()
            if turn:
                found[name]["held"].append(held)
                found[name]["steps"].append(trained / STEPS)
                found[name]["written"].append(time.perf_counter() - began)
    found["bytes"] = sum(file.stat().st_size for file in path.iterdir())
    engine.destroy()
    return found


def main() -> int:
    """Measure, print, and say whether the goal is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"keep the result in {RESULTS.name}")
    asked, ranks = parser.parse_args(), Ranks(1)
    with tempfile.TemporaryDirectory() as folder:
        found = ranks.run(rounds, planned(Path(folder)), Path(folder), timeout=600)[0]
    ranks.close()
    once, behind = found["at once"], found["in background"]
    held = statistics.median(b / a for a, b in zip(once["held"], behind["held"], strict=True))
    slower = statistics.median(b / a for a, b in zip(once["steps"], behind["steps"], strict=True))
    print(f"a checkpoint of {found['bytes'] / 1e6:.0f} MB\n\n| | training waits | a step after it |\n|---|---|---|")
    for name in ("at once", "in background"):
        print(f"| {name} | {_middle(found[name]['held'])} s | {_middle(found[name]['steps'])} s |")
    print(f"\ntraining waits for {held:.2f} of the time, a step beside the writing takes {slower:.2f} of one without")
    goals = {"training waits for at most a third of the time": held <= MOST}
    kept = environment("python -m bench.reliability.saving --record") | {"model": MODEL, "waits": held, "step": slower}
    return report_goals(kept | found | {"goals": goals}, RESULTS if asked.record else None)


def _middle(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f}"


if __name__ == "__main__":
    sys.exit(main())
