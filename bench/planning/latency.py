"""`python -m bench.planning.latency`: how long a plan takes, beside what others take to look at a single configuration.

Each command is a process of its own, from its start to its end, imports included; all of them in turn, `--runs` times;
medians and ratios. `frugal` plans over all strategies it knows:

- cold: with an empty cache, to the ranked table and to the end, with the winner dry-run by DeepSpeed on meta;
- known: the model is in the cache, the cluster is new;
- cached: the same plan again.

The others look at one configuration of the 8B model, without ZeRO: torch's `MemTracker` at one step with AdamW under
`FakeTensorMode`, and the arithmetic of `accelerate estimate-memory` on a local configuration (the command itself
needs the hub).

Goals, on two quiet cores: 8B cold <= 5 s to the table and <= 15 s to the end, in less than 1.5 GB; 70B <= 8 s and
<= 25 s; cached <= 0.3 s.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parents[1] / "results" / "latency.json"
SEQ_LEN = 4096
CASES = (
    # model, GPUs a node, nodes, memory
    ("gpt2", 8, 1, "24G"),
    ("gpt2", 8, 128, "24G"),
    ("llama-3.1-8b", 8, 1, "80G"),
    ("llama-3.1-8b", 8, 128, "80G"),
    ("llama-3.1-70b", 8, 2, "80G"),
    ("llama-3.1-70b", 8, 128, "80G"),
)
ONE = "llama-3.1-8b"  # what the others look at


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=[], help="only these models")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.inside:
        print(json.dumps(_INSIDE[arguments.inside](*rest)))
        return
    cases = [case for case in CASES if not arguments.cases or case[0] in arguments.cases]
    rows = [row for run in range(arguments.runs) for row in _round(cases, run)]
    results = _medians(rows)
    _show(results)
    arguments.output.write_text(json.dumps({**_environment(), "runs": arguments.runs, "results": results}, indent=2))


def _round(cases: list[tuple[str, int, int, str]], run: int) -> list[dict[str, Any]]:
    """Every command once."""
    rows = []
    for model, gpus, nodes, memory in cases:
        name = f"{model} on {nodes} x {gpus} GPUs of {memory}"
        flags = ["--model", model, "--mem", memory, "--nodes", str(nodes)]
        if model != "gpt2":
            flags += ["--seq-len", str(SEQ_LEN)]
        with tempfile.TemporaryDirectory() as cache:
            cold = _process([sys.executable, "-m", "bench.planning.latency", "--inside", "plan", *flags,
                             "--gpus", str(gpus)], cache)  # fmt: skip
            rows.append({"what": f"{name}, cold", **cold})
            frugal = [sys.executable, "-m", "frugal", "plan", "--json"]
            rows.append({"what": f"{name}, known", **_process([*frugal, *flags, "--gpus", str(gpus // 2)], cache)})
            rows.append({"what": f"{name}, cached", **_process([*frugal, *flags, "--gpus", str(gpus)], cache)})
    for peer in ("memtracker", "accelerate"):
        found = _process([sys.executable, "-m", "bench.planning.latency", "--inside", peer, ONE], None)
        rows.append({"what": f"{peer}, one configuration of {ONE}", **found})
    print(f"round {run + 1} done", file=sys.stderr)
    return rows


def _process(command: list[str], cache: str | None) -> dict[str, Any]:
    """Run a command: its seconds, the most memory its processes had together, and what it says of itself."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    if cache is not None:
        environment["XDG_CACHE_HOME"] = cache
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2]
    )
    peak = [0]
    watcher = threading.Thread(target=_watch, args=(process.pid, peak), daemon=True)
    watcher.start()
    out, err = process.communicate(timeout=900)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{err.decode()}")
    said = json.loads(out.decode().strip().splitlines()[-1]) if "--inside" in command else {}
    return {"seconds": seconds, "rss_bytes": peak[0], **said}


def _watch(pid: int, peak: list[int]) -> None:
    """The resident bytes of a process and its children together, every 50 ms."""
    while True:
        try:
            root = psutil.Process(pid)
            total = 0
            for each in (root, *root.children(recursive=True)):
                try:
                    total += each.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
            peak[0] = max(peak[0], total)
        except psutil.NoSuchProcess:
            return
        time.sleep(0.05)


def _plan(*flags: str) -> dict[str, Any]:
    """`frugal plan`, which also says when the table was ready, and how many strategies were ranked."""
    from frugal import cli
    from frugal.planning.search.evaluate import StrategyEvaluation

    noticed: dict[str, Any] = {}
    dry_run_result = StrategyEvaluation.dry_run_result

    def noted(evaluation: StrategyEvaluation, option: Any) -> Any:
        noticed.setdefault("table_seconds", time.time() - psutil.Process().create_time())
        return dry_run_result(evaluation, option)

    StrategyEvaluation.dry_run_result = noted  # type: ignore[assignment, method-assign]  # the moment before the winner is dry-run
    with tempfile.TemporaryDirectory() as folder:
        output = os.dup(1)
        os.dup2(2, 1)
        code = cli.run(["plan", *flags, "-o", folder])
        os.dup2(output, 1)
        plan = json.loads((Path(folder) / "plan.json").read_text())
    assert code == 0
    return {**noticed, "strategies": 1 + len(plan["rejected"])}


def _memtracker(model: str) -> dict[str, Any]:
    """torch's own memory tracker on one forward, backward and AdamW step of micro-batch 1, no ZeRO."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from frugal.training.models.resolve import resolve

    spec = resolve(model, None)
    with FakeTensorMode():
        made = spec.build(dtype=torch.bfloat16, device="cpu")
        made.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(made.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(made, optimizer)
        tokens = torch.zeros(1, SEQ_LEN, dtype=torch.long)
        with tracker:
            made(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")
    return {"peak_bytes": max(each["Total"] for each in peak.values())}


def _accelerate(model: str) -> dict[str, Any]:
    """What `accelerate estimate-memory` does once it has the configuration."""
    import transformers
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes

    from frugal.training.models.resolve import resolve

    config = resolve(model, None).build(dtype=None, device="meta").config
    with init_empty_weights():
        made = transformers.AutoModel.from_config(config)
    total, _ = calculate_maximum_sizes(made)
    return {"peak_bytes": 4 * total}  # as it says itself: training with Adam takes four times the model


_INSIDE = {"plan": _plan, "memtracker": _memtracker, "accelerate": _accelerate}


def _medians(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for what in dict.fromkeys(row["what"] for row in rows):
        same = [row for row in rows if row["what"] == what]
        numbers = {key: statistics.median(row[key] for row in same) for key in same[0] if key != "what"}
        found.append({"what": what, **numbers, "all_seconds": [round(row["seconds"], 3) for row in same]})
    return found


def _show(results: list[dict[str, Any]]) -> None:
    unit = next((row["seconds"] for row in results if row["what"].startswith("memtracker")), None)
    for row in results:
        table = f"{row['table_seconds']:6.2f} s to the table" if "table_seconds" in row else " " * 21
        ratio = f"  {row['seconds'] / unit:6.2f} x MemTracker" if unit else ""
        print(f"{row['what']:48s} {row['seconds']:7.2f} s  {table}  {row['rss_bytes'] / 1e9:5.2f} GB{ratio}")


def _environment() -> dict[str, Any]:
    packages = ("torch", "deepspeed", "transformers", "accelerate")
    return {
        "command": " ".join(["python -m bench.planning.latency", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: version(name) for name in packages},
        "load_at_the_end": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
