"""`python -m bench.training.language_model`: `launch/lm.sh small` on one CPU rank and on two learns the same.

The whole command, as a user runs it, once after the other: plan, train, evaluate on validation text meanwhile, and at
the end on training text (as many samples) and on test text, all from different files. One thread a rank.

Goal: each of the three perplexities is the same on one rank and on two. `--record` keeps the result.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import environment
from bench.goals import report_goals
from frugal.engine.reports.metrics import METRICS

COMMAND = "python -m bench.training.language_model --record"
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "language-model-cpu.json"
WORLD_SIZES = (1, 2)
EVENTS = {"train": "training", "evaluation": "validation", "test": "test"}
ALIKE = 1e-4  # relative, of perplexities


def trained(ranks: int, folder: Path, flags: Sequence[str] = ()) -> dict[str, Any]:
    """Return what one run comes to: steps, seconds of all of them, and the perplexities at the end."""
    subprocess.run(
        [ROOT / "launch" / "lm.sh", "small", str(ranks), "--out", folder, *flags],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    return {
        "steps": len(steps),
        "seconds": sum(step["targets"] / step["tokens_per_second"] for step in steps),
        "first_loss": steps[0]["loss"],
        "perplexity": {EVENTS[each["event"]]: each["perplexity"] for each in records if each["event"] in EVENTS},
    }


def summary(runs: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The runs on so many ranks, and how much their perplexities differ."""
    found = {part: [run["perplexity"][part] for run in runs.values()] for part in EVENTS.values()}
    difference = max(max(each) / min(each) - 1 for each in found.values())
    return {
        "largest_difference_of_perplexities": difference,
        "ranks": runs,
        "goals": {"the same perplexities": difference <= ALIKE},
    }


def table(runs: dict[Any, dict[str, Any]]) -> str:
    """For docs/benchmarks.md."""
    lines = [
        "| ranks | seconds of training | training perplexity | validation | test |",
        "|---|---|---|---|---|",
    ]
    for ranks, run in runs.items():
        perplexities = " | ".join(f"{run['perplexity'][part]:.4f}" for part in EVENTS.values())
        lines.append(f"| {ranks} | {run['seconds']:.0f} | {perplexities} |")
    return "\n".join(lines)


def main() -> int:
    """Run both, print the table, and say whether the goal is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"keep the result in {RESULTS.name}")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = summary({ranks: trained(ranks, Path(folder) / str(ranks)) for ranks in WORLD_SIZES})
    result = environment(COMMAND) | found
    print(f"\n{table(result['ranks'])}\n")
    return report_goals(result, RESULTS if asked.record else None)


if __name__ == "__main__":
    sys.exit(main())
