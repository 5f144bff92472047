"""A random walk of allocations, frees and resets, with torch's counters after each, on a card or in a dry run.

    python -m tests.dryrun.counters

repeats it on an emulated card and writes `counters.json` beside this file.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import torch

RECORD = Path(__file__).with_suffix(".json")
SEEDS, STEPS = 3, 60


def walk(seed: int) -> list[list[int]]:
    """Return the bytes allocated and reserved, their peaks, and the same of `memory_stats`, after each step."""
    rng, cuda = random.Random(seed), torch.cuda
    kept: list[torch.Tensor] = []
    counted: list[list[int]] = []
    cuda.empty_cache()  # of another walk
    cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        what = rng.random()
        if what < 0.5 or not kept:
            kept.append(torch.empty(int(2 ** rng.uniform(1, 27)), dtype=torch.uint8, device="cuda"))
        elif what < 0.86:
            kept.pop(rng.randrange(len(kept)))
        elif what < 0.93:
            cuda.empty_cache()
        else:
            rng.choice([cuda.reset_peak_memory_stats, cuda.reset_max_memory_allocated])()
        stats = cuda.memory_stats()
        counted.append([
            cuda.memory_allocated(), cuda.memory_reserved(), cuda.max_memory_allocated(), cuda.max_memory_reserved(),
            *(stats[f"{kind}_bytes.all.{when}"] for when in ("current", "peak") for kind in ("allocated", "reserved")),
            stats["active_bytes.all.current"],
        ])  # fmt: skip
    return counted


def main() -> None:
    """Write the record, from a process on an emulated card."""
    from bench.emulated_gpu.environment import environment, python

    code = "import json; from tests.dryrun.counters import *; print(json.dumps([*map(walk, range(SEEDS))]))"
    env = environment("rtx3060", num_gpus=1)
    done = subprocess.run([python(), "-c", code], env=env, stdout=subprocess.PIPE, check=True)
    RECORD.write_text(json.dumps(json.loads(done.stdout)).replace("], [", "],\n[") + "\n")
    print(f"wrote {RECORD}", file=sys.stderr)


if __name__ == "__main__":
    main()
