"""`python -m bench.planning.latency`: how long a plan takes, beside what others take to look at a single configuration.

Each command is a process of its own, from its start to its end, imports included; all of them in turn, `--runs` times;
medians and ratios. `frugal plan` runs on a terminal, as people see it: the verdict is there when its line `fits` is,
the proof when the dry run of the winner by DeepSpeed on meta is done. It plans over all strategies it knows:

- a preset, adapters of an 8B preset (LoRA, and QLoRA on small cards) and of larger ones, a mixture of experts, and a
  model that nobody has traced before, each with an empty cache;
- then with the cache of the latter, one change each: another global batch, more cards, more memory, and another length
  of samples, of which there are traces;
- the same once more.

The others look at one configuration of an 8B model, without ZeRO: torch's `MemTracker` at one step with AdamW under
`FakeTensorMode`, and the arithmetic of `accelerate estimate-memory` on a local configuration (the command itself
needs the hub).

CPU seconds are of all processes of a command, to the verdict and in all; a row says what their imports alone take.

Goals on two quiet cores, to the verdict: a preset <= 2 s, an 8B model never seen <= 10 s, a change <= 0.5 s, the same
once more <= 0.3 s; CPU seconds beyond imports of LoRA and QLoRA of an 8B model: <= 8 to the verdict, <= 20 in all; of
a 70B model and of mixtures of experts <= 15 and <= 40.
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

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "latency.json"
SEQ_LEN = 4096
PRESET = ["--model", "gpt2", "--gpus", "4", "--mem", "12G"]
UNSEEN = ["--gpus", "8", "--mem", "24G", "--seq-len", str(SEQ_LEN)]
CHANGES = {
    "another global batch": ["--global-batch", "384"],
    "more cards": ["--gpus", "16"],
    "more memory": ["--mem", "40G"],
    "another length": ["--seq-len", str(SEQ_LEN // 2)],
}
ONE = "llama-3.1-8b"  # what the others look at
ADAPTERS = {
    "LoRA of llama-3.1-8b on 4 x 24G, nothing kept": ["--lora", "r=16", "--gpus", "4", "--mem", "24G"],
    "QLoRA of llama-3.1-8b on 4 x 12G, nothing kept": [
        "--lora",
        "r=16",
        "--quantize",
        "nf4",
        "--gpus",
        "4",
        "--mem",
        "12G",
    ],
}
LARGE = {
    "QLoRA of llama-3.1-70b on 4 x 24G, nothing kept": "llama-3.1-70b --lora r=16 --quantize nf4 --gpus 4 --mem 24G",
    "LoRA of mixtral-8x7b on 8 x 80G, nothing kept": "mixtral-8x7b --lora r=16 --gpus 8 --mem 80G",
    "LoRA of qwen3-30b-a3b on 4 x 80G, nothing kept": "qwen3-30b-a3b --lora r=16 --gpus 4 --mem 80G",
    "qwen3-30b-a3b on 8 x 80G, nothing kept": "qwen3-30b-a3b --gpus 8 --mem 80G",
}
"""Models and flags."""
IMPORTS = "import torch, transformers, peft, frugal.dryrun.trace.trace"
VERDICT, BLOCK = b"fits ", 1 << 12


def main() -> None:
    """Run everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args()
    if arguments.inside:
        print(json.dumps(_INSIDE[arguments.inside](*rest)))
        return
    rows = [row for run in range(arguments.runs) for row in _round(run)]
    results = _medians(rows)
    _show(results)
    arguments.output.write_text(json.dumps({**_environment(), "runs": arguments.runs, "results": results}, indent=2))


def _round(run: int) -> list[dict[str, Any]]:
    """Every command once."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        rows.append({"what": "gpt2 on 4 x 12G, nothing kept", **_planned(PRESET, cache)})
        rows.append({"what": "the same once more", **_planned(PRESET, cache)})
    for name, flags in ADAPTERS.items():
        with tempfile.TemporaryDirectory() as cache:
            rows.append({"what": name, **_planned(["--model", ONE, *flags], cache)})
    for name, words in LARGE.items():
        with tempfile.TemporaryDirectory() as cache:
            rows.append({"what": name, **_planned(["--model", *words.split()], cache)})
    with tempfile.TemporaryDirectory() as folder:
        model = ["--model", _unseen(Path(folder), run)]
        rows.append({"what": "an 8B model never seen on 8 x 24G, nothing kept", **_planned([*model, *UNSEEN], folder)})
        for name, change in CHANGES.items():
            if name == "another length":
                _planned([*model, *UNSEEN, *change, "--gpus", "32"], folder)  # has it traced
            rows.append({"what": f"that model, {name}", **_planned([*model, *UNSEEN, *change], folder)})
    for peer in ("imports", "memtracker", "accelerate"):
        command = [
            sys.executable,
            "-m",
            "bench.planning.latency",
            "--inside",
            peer,
            *([] if peer == "imports" else [ONE]),
        ]
        what = "imports of one worker" if peer == "imports" else f"{peer}, one configuration of {ONE}"
        rows.append({"what": what, **_process(command)})
    print(f"round {run + 1} done", file=sys.stderr)
    return rows


def _unseen(folder: Path, run: int) -> str:
    """A Llama of about 8B parameters whose width nobody has; its configuration's path."""
    configuration = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14_000 + 64 * (datetime.now(UTC).timetuple().tm_yday % 16) + 16 * run,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(configuration))
    return str(path)


def _environment_of_commands(cache: str | None = None) -> dict[str, str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "TERM": "xterm", "COLUMNS": "120"}
    return environment if cache is None else {**environment, "XDG_CACHE_HOME": cache}


def _planned(flags: list[str], cache: str) -> dict[str, Any]:
    """`frugal plan` on a terminal: (CPU) seconds to its verdict and to its end, the most memory of its processes."""
    ours, theirs = os.openpty()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "frugal", "plan", *flags], stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT,
        env=_environment_of_commands(cache),
    )  # fmt: skip
    os.close(theirs)
    watched = Watched(process.pid)
    written, verdict_seconds, verdict_cpu_seconds = b"", 0.0, 0.0
    while block := _read(ours):
        written += block
        if not verdict_seconds and VERDICT in written:
            verdict_seconds, verdict_cpu_seconds = time.perf_counter() - start, watched.cpu_seconds
    _, err = process.communicate(timeout=900)
    os.close(ours)
    if process.returncode or not verdict_seconds:
        raise SystemExit(f"frugal plan {' '.join(flags)}\n{written.decode()}\n{err.decode()}")
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "verdict_seconds": verdict_seconds,
        "verdict_cpu_seconds": verdict_cpu_seconds,
        **watched.numbers,
    }


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, BLOCK)
    except OSError:  # nobody writes any more
        return b""


def _process(command: list[str]) -> dict[str, Any]:
    """Run a command: its seconds, the most memory its processes had together, and what it says of itself."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=_environment_of_commands(), cwd=ROOT
    )
    watched = Watched(process.pid)
    out, err = process.communicate(timeout=900)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{err.decode()}")
    return {"seconds": seconds, **watched.numbers, **json.loads(out.decode().strip().splitlines()[-1])}


class Watched:
    """A process and its children, looked at every 50 ms: their CPU seconds, and the most resident bytes together."""

    def __init__(self, pid: int) -> None:
        self.rss_bytes = 0
        self._seconds: dict[int, float] = {}  # by process
        threading.Thread(target=self._watch, args=(pid,), daemon=True).start()

    @property
    def cpu_seconds(self) -> float:
        """User and system seconds of all processes so far, those that have ended included."""
        return sum(self._seconds.values())

    @property
    def numbers(self) -> dict[str, float]:
        """Both figures."""
        return {"cpu_seconds": self.cpu_seconds, "rss_bytes": self.rss_bytes}

    def _watch(self, pid: int) -> None:
        try:
            root = psutil.Process(pid)
            while True:
                total = 0
                for each in (root, *root.children(recursive=True)):
                    try:
                        total += each.memory_info().rss
                        times = each.cpu_times()
                        self._seconds[each.pid] = times.user + times.system
                    except psutil.NoSuchProcess:
                        continue
                self.rss_bytes = max(self.rss_bytes, total)
                time.sleep(0.05)
        except psutil.NoSuchProcess:
            return


def _memtracker(model: str) -> dict[str, Any]:
    """torch's own memory tracker on one forward, backward and AdamW step of micro-batch 1, no ZeRO."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from frugal.models.resolve import resolve

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
    """Do what `accelerate estimate-memory` does once it has the configuration."""
    import transformers
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes

    from frugal.models.resolve import resolve

    config = resolve(model, None).build(dtype=None, device="meta").config
    with init_empty_weights():
        made = transformers.AutoModel.from_config(config)
    total, _ = calculate_maximum_sizes(made)
    return {"peak_bytes": 4 * total}  # as it says itself: training with Adam takes four times the model


def _imports() -> dict[str, Any]:
    """Import what each worker of a plan imports before it traces."""
    exec(IMPORTS)
    return {}


_INSIDE = {"imports": _imports, "memtracker": _memtracker, "accelerate": _accelerate}


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
        verdict = f"{row['verdict_seconds']:6.2f} s to the verdict" if "verdict_seconds" in row else " " * 23
        cpu = " / ".join(f"{row[key]:.1f}" for key in ("verdict_cpu_seconds", "cpu_seconds") if key in row)
        ratio = f"  {row.get('verdict_seconds', row['seconds']) / unit:6.3f} x MemTracker" if unit else ""
        rest = f"CPU {cpu:>11s} s  {row['rss_bytes'] / 1e9:5.2f} GB{ratio}"
        print(f"{row['what']:48s} {verdict}  {row['seconds']:7.2f} s in all  {rest}")


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
