"""`python -m bench.memory.long_emulated --plans FOLDER`: plans of `bench.memory.long` run for real on emulated cards.

Each plan's first rank (the others its twins) makes two optimizer steps of two micro-steps each with frugal's engine,
under torch's own allocator, which may take what the plan calls usable: with samples of the length that fits, and of
the next one. It needs the environment of `bench/emulated_gpu`; optimizer states in host memory are real there, so only
plans run for which this machine has enough (`--host`). What came of it is written into the rows of the result.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.emulated_gpu.cards import CARDS
from bench.emulated_gpu.environment import environment as of_card
from bench.gpu.truth import environment
from bench.memory.long import RESULTS
from frugal.planning.plan import Plan
from frugal.units import parse_bytes

STATES_BYTES = 16
"""Of a parameter in host memory: master weight, two moments, a gradient. What else is there is never written to."""

FITS, TOO_LONG = "fits", "does not fit"


def main() -> int:
    """Run all plans that this machine's memory allows, at both lengths; 1 if one of them went as nobody said."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=Path, required=True, help="the folder that bench.memory.long was given")
    parser.add_argument("--host", type=parse_bytes, default=parse_bytes("12G"), help="memory that a rank may take here")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose names have one of these words")
    parser.add_argument("--result", type=Path, default=RESULTS)
    parser.add_argument("--run", metavar="PLAN", type=Path, help="run this plan, here and now")
    parser.add_argument("--seq-len", type=int, help="with samples of so many tokens")
    asked = parser.parse_args()
    if asked.run is not None:
        print(run(asked.run, asked.seq_len))
        return 0
    record = json.loads(asked.result.read_text())
    all_as_said = True
    for row in record["rows"]:
        for who in ("recipe", "frugal"):
            name = f"{row['model']}-{row['gpus']}-{who}"
            file, said = asked.plans / f"{name}.plan", row[who]
            if not said["fits"] or (asked.only and not any(word in name for word in asked.only)):
                continue
            plan = Plan.read(file)
            if STATES_BYTES * plan.model.trainable_parameters / plan.batch.world_size > asked.host:
                continue
            start = time.monotonic()
            came = {str(n): in_process(file, plan, n) for n in (said["seq_len"], said["next"])}
            said["emulated"] = came
            all_as_said &= list(came.values()) == [FITS, TOO_LONG]
            print(f"{name:32} {came}  {time.monotonic() - start:.0f} s", flush=True)
            record["emulated"] = environment("emulated cards", "cuda", "bench.memory.long_emulated")
            asked.result.write_text(json.dumps(record, indent=2) + "\n")
    return int(not all_as_said)


def in_process(file: Path, plan: Plan, seq_len: int) -> str:
    """Return what `run` prints, in a process of its own with the plan's card."""
    memory_bytes = plan.cluster.devices[0].memory_bytes
    card = next(name for name, card in CARDS.items() if card.frugal_name == plan.cluster.devices[0].name)
    variables = of_card(
        card, num_gpus=1, memory_bytes=memory_bytes, expandable_segments=plan.strategy.expandable_segments
    )
    command = [sys.executable, "-m", "bench.memory.long_emulated", "--plans", str(file.parent)]
    done = subprocess.run(
        [*command, "--run", str(file), "--seq-len", str(seq_len)],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines() or [f"failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"]
    return lines[-1]


def run(file: Path, seq_len: int) -> str:
    """Two optimizer steps of the plan's first rank with such samples: whether memory was enough."""
    import torch

    from bench.emulated_gpu.twins import alone
    from bench.gpu.worker import _with_quick_weights
    from frugal.deepspeed_adapter.kernels import DTYPES
    from frugal.distributed import process_group
    from frugal.engine.measure.two_steps import watched
    from frugal.models.resolve import resolve_request

    plan = Plan.read(file)
    plan = replace(plan, request=replace(plan.request, seq_len=seq_len)).sealed()
    card = torch.device("cuda", 0)
    torch.cuda.set_device(card)
    total_bytes = torch.cuda.mem_get_info(card)[1]
    torch.cuda.set_per_process_memory_fraction(plan.memory.usable_bytes / total_bytes, card)
    spec = resolve_request(plan.request)

    def build() -> Any:
        return spec.build(dtype=DTYPES[plan.request.precision])

    with alone(0, plan.batch.world_size):
        process_group.form()
        try:
            watched(_with_quick_weights(build), spec.objective(), plan, card, 2)
        except torch.OutOfMemoryError:
            return TOO_LONG
    return FITS


if __name__ == "__main__":
    raise SystemExit(main())
