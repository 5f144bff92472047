"""`python -m bench.planning.search`: how long the search takes on a thousand GPUs of two kinds, given profiles.

The model's traces are there (they come with frugal), and nothing is dry-run. Timed in one process:

- profiles, once: DeepSpeed simulated over the traces, for every strategy of every level of offloading, and for one and
  for several micro-steps, with the fullest moment for every micro-batch;
- ranking: every strategy of every level: the largest micro-batch each kind of GPU holds, micro-batches balanced by
  memory and speed, seconds of a step. By drafts, which leave the allocator out;
- full evaluation: those of the first level that fits that could win, with CUDA's allocator replayed: what is left
  of a search before the winner is dry-run. It ranks that level once more, as a search does;
- search: both together. Medians of several runs, each of which knows no replay of those before.

`--beyond-tracing` measures a whole search, nothing of it known but the model's traces, up to the dry run of the winner:
profiles, ranking, mixtures of modes, the allocator's replays, and whether cheaper optimizer states are worth an offer.
On 64 and on 1,024 equal GPUs, where memory is plenty, and where it binds. Goal: less than 2 s.

Beside it what DeepSpeed has to say without a GPU: the bytes of model states under ZeRO-2 and 3 and each way to offload,
a formula each. It knows nothing of activations, micro-batches, mixed cards or time, so it is no rival, only a floor.

Seconds are of this process's CPU time, because other work shares the machine; wall seconds stand beside them.

Goal (Must show 3): the search of the whole space for 1024 mixed GPUs in less than a second.
"""

import argparse
import io
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.trace.drafts import MIXTURES
from frugal.planning.search.candidate import Candidate
from frugal.planning.search.search import Search

RESULTS = Path(__file__).parents[1] / "results" / "search.json"
CASES = (
    # model, global batch, cards of half of the nodes, of the other half
    ("gpt2", 65_536, "rtx3090-24g", "rtx4090-24g"),
    ("llama-3.1-8b", 4096, "a100-40g", "h100-80g"),
)
NODES, GPUS = 128, 8
BEYOND_TRACING: tuple[dict[str, Any], ...] = (
    {"nodes": 8, "mem": "80G"},
    {"nodes": 8, "mem": "24G", "global_batch": 1024},
    {"nodes": 8, "mem": "40G", "global_batch": 1024, "seq_len": 8192},
    {"nodes": 128, "mem": "80G"},
    {"nodes": 128, "mem": "24G", "global_batch": 8192},
    {"nodes": 128, "mem": "40G", "global_batch": 8192, "seq_len": 8192},
)
"""Of llama-3.1-8b on nodes of eight GPUs."""


def main() -> None:
    """Measure every case and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="only these")
    parser.add_argument("--repeats", type=int, default=5, help="searches of each case")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--beyond-tracing", action="store_true", help="only whole searches, nothing known but traces")
    arguments = parser.parse_args()
    if arguments.beyond_tracing:
        kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        found = [beyond_tracing(arguments.repeats, case) for case in BEYOND_TRACING]
        of_these = _environment(arguments.repeats, ["--beyond-tracing"]) | {"results": found}
        arguments.output.write_text(json.dumps(kept | {"beyond_tracing": of_these}, indent=2) + "\n")
        return
    cases = [case for case in CASES if not arguments.models or case[0] in arguments.models]
    found = [measured(arguments.repeats, *case) for case in cases]
    words = ["--models", *arguments.models] if arguments.models else []
    kept = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    record = _environment(arguments.repeats, words) | {"gpus": NODES * GPUS, "results": found}
    if "beyond_tracing" in kept:
        record["beyond_tracing"] = kept["beyond_tracing"]
    arguments.output.parent.mkdir(exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")


def _environment(repeats: int, words: list[str]) -> dict[str, Any]:
    return {
        "command": " ".join(["python -m bench.planning.search", *words]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in ("torch", "deepspeed", "transformers")},
        "load_at_the_end": os.getloadavg()[0],
        "repeats": repeats,
    }


def measured(repeats: int, model: str, global_batch: int, *cards: str) -> dict[str, Any]:
    """One case: seconds of each part, and what was looked at."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts"
        lines = (f"node{i} slots={GPUS}  # gpu={cards[i * len(cards) // NODES]}\n" for i in range(NODES))
        hosts.write_text("".join(lines))
        request, cluster, _ = understand({"hostfile": str(hosts), "model": model, "global_batch": global_batch})
    with DryRunSource(request, cluster, cache=False, will_dry_run=False) as source:
        search = Search(request, cluster, source)
        levels = {level: search.strategies(level) for level in search.levels}
        strategies = [strategy for level in levels.values() for strategy in level]
        source.prepare(strategies)
        once: Seconds = {}
        with timed("profiles", once):
            for strategy, accumulates in product(strategies, (True, False)):
                profile = source.draft(strategy, accumulates)
                assert profile is not None
                for rank in profile.ranks:
                    rank.timeline.peak_bytes(1)
        runs: Seconds = {}
        for _ in range(repeats):
            forget_replays(source)
            search = Search(request, cluster, source)
            with timed("search", runs):
                with timed("ranking", runs):
                    attempts = [search._attempt(strategy, search.evaluation.draft) for strategy in strategies]
                    drafts = [draft for draft in attempts if draft is not None]
                with timed("full evaluation", runs):
                    fitting = {draft.strategy for draft in drafts if draft.fits}
                    options = search.candidates(next(level for level in levels if fitting & {*levels[level]}))
    looked = [option for option in options if not option.is_draft and option.memory is not None]
    seconds = medians(once | runs)
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
        "cpu_seconds_of_each_search": [cpu for cpu, _ in runs["search"]],
        "deepspeed": deepspeed_estimates(search),
    }


def beyond_tracing(repeats: int, case: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of the search, traces apart; medians of several runs."""
    request, cluster, _ = understand({"model": "llama-3.1-8b", "gpus": GPUS, **case})
    runs: Seconds = {}
    for _ in range(repeats):
        MIXTURES.clear()
        with DryRunSource(request, cluster, cache=False, will_dry_run=False) as source:
            search = Search(request, cluster, source)
            levels = {level: search.strategies(level) for level in search.levels}
            with timed("reading traces", runs):
                source.prepare([strategy for level in levels.values() for strategy in level])
            with timed("search", runs):
                chosen, _ = _chosen(search)
    seconds = medians(runs)
    total = sum(of_part["cpu_seconds"] for of_part in seconds.values())
    print(f"{case}: {total:.2f} s of CPU time, {chosen.strategy}")
    return {"case": case, "gpus": cluster.world_size, "total_cpu_seconds": total, "seconds": seconds}


def _chosen(search: Search) -> tuple[Candidate, list[Candidate]]:
    """Return what a search has dry-run first, and all that it looked at until then."""
    looked_at: list[Candidate] = []
    for level in search.levels:
        candidates = search.candidates(level)
        looked_at += candidates
        if winner := search._winner(candidates):
            return winner, looked_at
    raise SystemExit("nothing fits")


def forget_replays(source: DryRunSource) -> None:
    """The same profiles, as they are before the allocator is replayed over any."""
    for key, profile in source._profiles.items():
        source._profiles[key] = replace(profile, ranks=tuple(replace(rank, known={}) for rank in profile.ranks))


def deepspeed_estimates(search: Search) -> dict[str, Any]:
    """Return what DeepSpeed says of the same model on as many GPUs, and how long that takes."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as zero_3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_cold as zero_2

    facts, said, seconds = search.facts, io.StringIO(), {}
    with timed("estimates", seconds), redirect_stdout(said):
        zero_2(facts.parameters, num_gpus_per_node=GPUS, num_nodes=NODES)
        zero_3(facts.parameters, facts.largest_parameter, num_gpus_per_node=GPUS, num_nodes=NODES)
    return {"seconds": medians(seconds)["estimates"], "answers": said.getvalue().count("offload_optimizer")}


Seconds = dict[str, list[tuple[float, float]]]
"""What each part took, in every run: CPU time and wall time."""


def medians(seconds: Seconds) -> dict[str, dict[str, float]]:
    """Return the median of each part over its runs."""
    return {
        name: {
            "cpu_seconds": statistics.median(cpu for cpu, _ in runs),
            "wall_seconds": statistics.median(wall for _, wall in runs),
        }
        for name, runs in seconds.items()
    }


@contextmanager
def timed(name: str, seconds: Seconds) -> Iterator[None]:
    """Keep under `name` what the block took."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    seconds.setdefault(name, []).append((time.process_time() - cpu, time.perf_counter() - wall))


if __name__ == "__main__":
    main()
