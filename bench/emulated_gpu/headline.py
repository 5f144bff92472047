"""`python -m bench.emulated_gpu.headline`: a plan for four cards of 12 GB, then measured and trained on four of them.

    frugal plan --model MODEL --gpus 4 --mem 12G
    frugal measure --capped            (the allocator gets what the plan promises to it, and no more)
    frugal train --steps 20            (with two validations; on rtx3060-12g, and on cards of exactly the planned size)

for gpt2, bert-large and gpt2-xl, with and without expandable segments, on emulated cards (docs/emulated-gpu.md). All
four ranks run, in processes of their own, as `frugal train` starts them. Each command's answer is kept as it comes, so
a run that was ended goes on where it was.

    python -m bench.emulated_gpu.headline --only gpt2-xl --only bert-large --steps 5

Cards of the planned size have no margin: a run in which memory ran out there went on in smaller micro-batches, or gave
back what torch had cached. gpt2-xl accumulates over two micro-steps instead of four (`--global-batch 256`), since a
third takes no more memory.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from bench.emulated_gpu.environment import environment, python
from frugal.config.hardware import local_host
from frugal.planning.plan import Plan
from frugal.units import GIB, MIB

OUT = Path(__file__).parents[1] / "results" / "headline-emulated.json"
CARD, NUM_GPUS = "rtx3060", 4
MODELS: dict[str, tuple[str, ...]] = {"gpt2": (), "bert-large": (), "gpt2-xl": ("--global-batch", "256")}
SEGMENTS = ("expandable", "plain")
_FRAGMENTED = "though enough is free in pieces"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """`frugal train` on four cards: bytes of rank 0's allocator, and how often memory ran out (`fragmented` of them:
    enough was free, in pieces).

    `card_bytes`: what each card's driver reports.
    """

    steps: int
    card_bytes: int | None
    exit_code: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    recoveries: int
    fragmented: int
    seconds: float


def main() -> int:
    """Run what the output lacks; 1 if anything did not keep its promise."""
    parser = argparse.ArgumentParser(prog="python -m bench.emulated_gpu.headline", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=MODELS, help="these models")
    parser.add_argument("--segments", action="append", choices=SEGMENTS, help="only these segments")
    parser.add_argument("--on", action="append", choices=("card", "promise"), help="train only on these cards")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of `frugal train`  [default: 20]")
    parser.add_argument("--again", action="store_true", help="also what the output has already")
    parser.add_argument("--out", type=Path, default=OUT, help="[default: bench/results/headline-emulated.json]")
    asked = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if asked.out.exists():
        rows = msgspec.json.decode(asked.out.read_bytes())["rows"]
    for model in asked.only or MODELS:
        for segments in asked.segments or SEGMENTS:
            name = f"{model}, {segments}"
            row = {} if asked.again else rows.get(name, {})
            rows[name] = row
            with TemporaryDirectory(prefix="headline-") as folder:
                _fill(row, model, segments, asked, Path(folder), lambda: _keep(asked.out, rows))
            print(_line(name, row), flush=True)
    return int(not all(_is_kept(row) for row in rows.values()))


def _fill(row: dict[str, Any], model: str, segments: str, asked: Any, folder: Path, keep: Any) -> None:
    """Run what `row` lacks, one command after the other."""
    words = ["plan", "--model", model, "--gpus", str(NUM_GPUS), "--mem", "12G", *MODELS[model], "-o", str(folder)]
    _frugal(words, _cards(None) | {"PYTORCH_ALLOC_CONF": f"expandable_segments:{segments == 'expandable'}"})
    plan = Plan.read(folder / "plan.json")
    promise = plan.memory.total_bytes
    strategy = plan.strategy
    row["plan"] = {
        "zero_stage": strategy.zero_stage, "activation_checkpointing": strategy.activation_checkpointing,
        "loss": strategy.loss, "micro_batch": plan.batch.largest_micro_batch,
        "accumulation_steps": plan.batch.accumulation_steps, "total_bytes": promise,
        "context_bytes": plan.memory.context, "live_bytes": plan.memory.live_bytes, "digest": plan.digest,
    }  # fmt: skip
    if "measured" not in row:
        done = _frugal(["measure", str(folder / "plan.json"), "--capped", "--json"], _cards(None))
        found = msgspec.json.decode(done.stdout)
        names = ("peak_allocated_bytes", "peak_reserved_bytes", "context_bytes")
        row["measured"] = {name: found[name] for name in names} | {"capped": found["capped"]}
        row["measured"]["predicted"] = {name: found["predicted"][name] for name in names[:2]}
        keep()
    for on, card_bytes in (("card", None), ("promise", promise)):
        if on not in row and on in (asked.on or ("card", "promise")):
            row[on] = asdict(_train(folder, card_bytes, plan.memory.context, asked.steps))
            keep()


def _train(folder: Path, card_bytes: int | None, context_bytes: int, steps: int) -> Trained:
    """Train as planned, on cards of `card_bytes` of which the context takes what was planned; None: the card's own."""
    begun = time.monotonic()
    words = ["train", "--plan", str(folder / "plan.json"), "--data", "stdlib", "--steps", str(steps)]
    words += ["--eval-every", str(-(-steps // 2)), "--save-every", "0", "--out", str(folder / "run")]
    given = _cards(card_bytes)
    if card_bytes is not None:
        given["EMULATED_GPU_CONTEXT"] = str(context_bytes)
    done = _frugal(words, given, is_checked=False)
    records = folder / "run" / "metrics.jsonl"
    lines = [msgspec.json.decode(line) for line in records.read_bytes().splitlines()] if records.exists() else []
    said = done.stdout + done.stderr
    trained = Trained(
        steps=max((line["step"] for line in lines), default=0),
        card_bytes=card_bytes,
        exit_code=done.returncode,
        allocated_bytes=max((line.get("memory_bytes") or 0 for line in lines), default=None),
        reserved_bytes=max((line.get("reserved_bytes") or 0 for line in lines), default=None),
        recoveries=said.count("out of memory"),
        fragmented=said.count(_FRAGMENTED),
        seconds=round(time.monotonic() - begun, 1),
    )
    if done.returncode:
        print(said[-2000:], file=sys.stderr)
    subprocess.run(["rm", "-rf", str(folder / "run")], check=True)
    return trained


def _cards(memory_bytes: int | None) -> dict[str, str]:
    base = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    return environment(CARD, num_gpus=NUM_GPUS, memory_bytes=memory_bytes, base=base) | {"OMP_NUM_THREADS": "1"}


def _frugal(words: list[str], given: dict[str, str], *, is_checked: bool = True) -> subprocess.CompletedProcess[str]:
    command = [python(), "-m", "frugal", *words]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    if is_checked and done.returncode not in (0, 5):
        raise SystemExit(f"frugal {' '.join(words)} ended with {done.returncode}\n{done.stderr[-2000:]}")
    return done


def _keep(out: Path, rows: dict[str, Any]) -> None:
    head = {
        "command": "python -m bench.emulated_gpu.headline",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": f"{NUM_GPUS} x emulated {CARD}-12g, no kernel runs; all ranks; host: {local_host.cpu_name()}",
        "versions": {"python": platform.python_version(), **local_host.library_versions()},
    }
    out.write_bytes(msgspec.json.format(msgspec.json.encode(head | {"rows": rows}), indent=2) + b"\n")


def _is_kept(row: dict[str, Any]) -> bool:
    """Return whether measured and trained memory was inside the promise, and never ran out."""
    trained = [row[on] for on in ("card", "promise") if on in row]
    return bool(row["measured"]["capped"]["survived"]) and all(
        not each["recoveries"] and not each["exit_code"] for each in trained
    )


def _line(name: str, row: dict[str, Any]) -> str:
    plan, measured = row["plan"], row["measured"]
    parts = [
        f"{name:22} {plan['total_bytes'] / GIB:6.2f} GiB promised",
        f"allocated {plan['live_bytes'] / MIB:,.0f} MiB, {measured['peak_allocated_bytes'] / MIB:,.0f} measured",
        f"capped: {'enough' if measured['capped']['survived'] else 'not enough'}",
    ]
    for on in ("card", "promise"):
        if on in row:
            each = row[on]
            parts.append(
                f"{each['steps']} steps on {'the card' if on == 'card' else 'the promised size'}: "
                + (f"{each['recoveries']} recoveries" if each["recoveries"] else "no recovery")
                + (f", exit code {each['exit_code']}" if each["exit_code"] else "")
            )
    return "; ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
