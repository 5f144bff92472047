"""`python -m bench.search`: how long the search itself takes on a thousand GPUs of two kinds, once there are profiles.

The model's traces are there (they come with frugal), and nothing is rehearsed. Three parts, timed one after the other
in one process:

- profiles: DeepSpeed simulated over the traces, for every strategy of every level of offloading, and for one and for
  several micro-steps, with the fullest moment for every micro-batch;
- ranking: every strategy of every level: the largest micro-batch each kind of GPU holds, cells balanced by memory and
  speed, seconds of a step. By drafts, which leave the allocator out;
- closer look: those of the first level that fits that could be fastest, with CUDA's allocator replayed: what is left
  of a search before the winner is rehearsed.

Seconds are of this process's CPU time, because other work shares the machine; wall seconds stand beside them.

Goal (Must show 3): the ranking of the whole space for 1024 mixed GPUs in less than a second.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from frugal.dryrun.client import Rehearsals
from frugal.planning.search import Search
from frugal.planning.settings import understand

RESULTS = Path(__file__).parent / "results" / "search.json"
CASES = (
    # model, global batch, cards of half of the nodes, of the other half
    ("gpt2", 65_536, "rtx3090-24g", "rtx4090-24g"),
    ("llama-3.1-8b", 4096, "a100-40g", "h100-80g"),
)
NODES, GPUS = 128, 8


def main() -> None:
    """Measure every case and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="only these")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cases = [case for case in CASES if not arguments.models or case[0] in arguments.models]
    found = [measured(*case) for case in cases]
    record = {
        "command": " ".join(["python -m bench.search", *(["--models", *arguments.models] if arguments.models else [])]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "load_at_the_end": os.getloadavg()[0],
        "gpus": NODES * GPUS,
        "results": found,
    }
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


def measured(model: str, global_batch: int, *cards: str) -> dict[str, Any]:
    """One case: seconds of each part, and what was looked at."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts"
        lines = (f"node{i} slots={GPUS}  # gpu={cards[i * len(cards) // NODES]}\n" for i in range(NODES))
        hosts.write_text("".join(lines))
        request, cluster, _ = understand({"hostfile": str(hosts), "model": model, "global_batch": global_batch})
    seconds: dict[str, dict[str, float]] = {}
    with Rehearsals(request, cluster, cache=False) as source:
        search = Search(request, cluster, source)
        levels = {level: search.strategies(level) for level in search.levels}
        strategies = [strategy for level in levels.values() for strategy in level]
        for level in levels.values():
            source.prepare(level)
        with timed("profiles", seconds):
            for strategy in strategies:
                for accumulates in (True, False):
                    profile = source.draft(strategy, accumulates)
                    assert profile is not None
                    for rank in profile.ranks:
                        rank.timeline.peak_bytes(1)
        with timed("ranking", seconds):
            drafts = [draft for strategy in strategies for draft in search._draft(strategy)]
        with timed("closer look", seconds):
            first = next(level for level in levels if any(d.fits for d in drafts if d.strategy in levels[level]))
            options = search.options(first)
    looked = [option for option in options if not option.is_draft]
    print(f"{model} on {cluster.world_size} GPUs: {', '.join(cards)}; {len(drafts)} strategies")
    for name, taken in seconds.items():
        print(f"  {name:<12} {taken['cpu_seconds']:7.2f} s of CPU time, {taken['wall_seconds']:7.2f} s")
    return {
        "model": model,
        "cards": cards,
        "global_batch": global_batch,
        "strategies": len(drafts),
        "ranking_cpu_seconds_per_strategy": seconds["ranking"]["cpu_seconds"] / len(drafts),
        "looked_at_closely": [str(option.strategy) for option in looked],
        "seconds": seconds,
    }


@contextmanager
def timed(name: str, seconds: dict[str, dict[str, float]]) -> Iterator[None]:
    """Keep under `name` what the block took."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    seconds[name] = {"cpu_seconds": time.process_time() - cpu, "wall_seconds": time.perf_counter() - wall}


if __name__ == "__main__":
    main()
