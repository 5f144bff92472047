"""`python -m bench.memory.long`: the longest samples that fit, by GPUs: frugal's plan beside DeepSpeed's recipe.

The recipe is the one of DeepSpeed's tutorial of Arctic Long Sequence Training (deepspeed.ai/tutorials/
ulysses-alst-sequence-parallelism): ZeRO-3, optimizer in host memory, activation checkpoints in host memory, tiled loss
and tiled MLP, all GPUs sharing each sample, one sample at a time. Here frugal predicts it like its own choice: same
traces, same simulation, same card, same margin, and whatever the recipe leaves open (buckets, segments) as frugal
chooses it. What is called frugal's is the leanest of the strategies that it searches, which is what it comes to where
nothing faster fits: parameters go to host memory, too, where that is needed. `--free` has it decide by itself at that
length, with nothing pinned but the micro-batch.

Both find the longest length on a grid of steps of 6 to 13 %: a line through two lengths, which is nearly exact, says
where to begin. What fits is then dry-run, and what the dry run says stands in the row. Positions of the models are
raised, as long ones are: nothing else of them is changed.

Nothing is trained. A row takes one to three minutes of a core. `python -m bench.memory.long_emulated` runs the plans
for real on emulated cards, at the length that fits and at the next one.
"""

import argparse
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.environment import environment
from bench.goals import report_goals
from frugal.config.schema import understand
from frugal.dryrun.cache import presets
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.pool import Pool
from frugal.errors import FrugalError
from frugal.planning.planner import decide
from frugal.planning.search.candidate import Candidate
from frugal.planning.what_if import Case, predicted

RESULTS = Path(__file__).parents[1] / "results" / "long.json"
CASES = (("tinyllama-1.1b", "rtx3060-12g"), ("qwen3-8b", "rtx3090-24g"), ("llama-3.1-8b", "h100-80g"))
MODELS = [model for model, _ in CASES]
GPUS = (1, 2, 4, 8)
GLOBAL_BATCH, HOST = 8, "2T"
RECIPE = {
    "zero_stage": 3,
    "activation_checkpointing": "offloaded",
    "loss": "tiled",
    "mlp": "tiled",
    "offload": "optimizer",
}
LEANEST = (RECIPE, RECIPE | {"offload": "all"})
POSITIONS = 1 << 26


def main() -> int:
    """Find all lengths, write them, and say whether frugal's are the longer ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="only these")
    parser.add_argument("--gpus", nargs="*", type=int, default=GPUS, help="numbers of GPUs")
    parser.add_argument("--free", action="store_true", help="have frugal decide by itself at the length that was found")
    parser.add_argument("--draft", action="store_true", help="predict, and dry-run nothing")
    parser.add_argument("--plans", type=Path, help="keep the plans here, for bench.memory.long_emulated")
    parser.add_argument("--workers", type=int, default=1, help="processes that trace  [default: 1]")
    parser.add_argument("--again", action="store_true", help="repeat rows that the output has already")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    before: dict[str, Any] = {"rows": []}
    if arguments.output.exists() and not arguments.again:
        before = json.loads(arguments.output.read_text())
    rows = before["rows"]
    known = {(row["model"], row["gpus"]) for row in rows}
    reached = 1
    with tempfile.TemporaryDirectory() as temporary, closing(Pool(arguments.workers)) as pool:
        folder = arguments.plans or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for model, card in CASES:
            if arguments.models and model not in arguments.models:
                continue
            missing = [number for number in arguments.gpus if (model, number) not in known]
            asked = Asked(missing, folder, pool, arguments.free, arguments.draft)
            for row in rows_of(model, card, asked):
                print(line(row), flush=True)
                rows.append(row)
                rows.sort(key=lambda each: (MODELS.index(each["model"]), each["gpus"]))
                reached = keep(rows, before.get("emulated"), arguments)
    return reached


def keep(rows: list[dict[str, Any]], emulated: dict[str, Any] | None, arguments: argparse.Namespace) -> int:
    """Write what there is so far, and what emulated cards said before; 0 if all goals are reached, 1 if not."""
    longer = sum(row["frugal"]["seq_len"] > row["recipe"]["seq_len"] for row in rows)
    goals = {
        "frugal takes longer samples than the recipe in three of four rows": longer >= 0.75 * len(rows),
        "all of them fit when planned": all(
            row[who]["fits"] for row in rows for who in ("frugal", "recipe") if row[who]["seq_len"]
        ),
    }
    command = "python -m bench.memory.long" + " --free" * arguments.free + " --draft" * arguments.draft
    record = environment(command) | {"global_batch": GLOBAL_BATCH, "rows": rows, "goals": goals}
    return report_goals(record | ({"emulated": emulated} if emulated else {}), arguments.output)


@dataclass(frozen=True)
class Asked:
    """Settings of all rows: numbers of GPUs, where plans are kept, who traces; see `--free` and `--draft`."""

    gpus: list[int]
    folder: Path
    pool: Pool
    decides_freely: bool
    only_drafts: bool


def rows_of(model: str, card: str, asked: Asked) -> Iterator[dict[str, Any]]:
    """For each number of GPUs what either takes."""
    file = (asked.folder / f"{model}.json").absolute()
    preset = presets()[model]
    file.write_text(
        json.dumps({"model_type": preset["type"], **preset["config"], "max_position_embeddings": POSITIONS})
    )
    for number in asked.gpus:
        settings = {"model": str(file), "task": preset["task"], "gpus": number, "gpu": card, "host_mem": HOST}
        settings |= {"global_batch": GLOBAL_BATCH, "micro_batch": 1}
        places = []
        for pins in LEANEST:
            look = functools.cache(partial(looked_at, settings | pins | {"sequence_parallel": number}, asked.pool))
            places.append(last(look, estimate(look, number)))
        own = LEANEST[max(range(len(places)), key=lambda i: (places[i], -i))]
        shared = {"sequence_parallel": number}
        plans = {"recipe": (RECIPE | shared, places[0]), "frugal": (own | shared, max(places))}
        if asked.decides_freely:
            plans["decides freely"] = ({}, max(places))
        yield {"model": model, "gpu": card, "gpus": number, "host": HOST} | {
            who: planned(settings | pins, place, asked, asked.folder / f"{model}-{number}-{who.split()[-1]}.plan")
            for who, (pins, place) in plans.items()
        }


Look = Callable[[int], Candidate | None]
"""What is predicted of samples as long as a place of the grid."""


def looked_at(settings: dict[str, Any], pool: Pool, i: int) -> Candidate | None:
    """A `Look`, but for its settings and who traces."""
    request, cluster, _ = understand({**settings, "seq_len": tokens(i)})
    case = Case(name=f"{tokens(i)} tokens", request=request, cluster=cluster)
    (prediction,) = predicted([case], partial(DryRunSource, pool=pool, will_dry_run=False))
    return prediction


def fits(prediction: Candidate | None) -> bool:
    """None is nothing that could be predicted."""
    return prediction is not None and prediction.fits


def estimate(look: Look, number: int) -> int:
    """The place at which a line through two lengths reaches the card: where to begin, nothing more.

    From 32,768 tokens a GPU on, slices of loss and MLP grow no more, and memory is a line.
    """
    near, far = (place + 8 * (number.bit_length() - 1) for place in (40, 48))
    more, less = ((made.headroom_bytes or 0) if (made := look(place)) else 0 for place in (near, far))
    if more <= less:
        return 0
    longest = tokens(near) + more * (tokens(far) - tokens(near)) / (more - less)
    return max(i for i in range(160) if i == 0 or tokens(i) <= longest)


def tokens(i: int) -> int:
    """The grid: eight steps from each power of two to the next, the first of them 1024."""
    return (8 + i % 8) * 128 << i // 8


def last(look: Look, start: int) -> int:
    """The last place of the grid that fits, looked for around `start`; -1 if none does."""
    if fits(look(start)):
        low, high, step = start, start + 1, 1
        while fits(look(high)):
            low, high, step = high, high + 2 * step, 2 * step
    else:
        low, high, step = start - 1, start, 1
        while low >= 0 and not fits(look(low)):
            low, high, step = low - 2 * step, low, 2 * step
        low = max(low, -1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(look(middle)) else (low, middle)
    return low


def planned(settings: dict[str, Any], place: int, asked: Asked, file: Path) -> dict[str, Any]:
    """Return what a plan of samples of that length says, dry-run; of the next shorter one where the dry run refuses
    it."""
    refused = []
    dry_run = partial(DryRunSource, pool=asked.pool, will_dry_run=not asked.only_drafts)
    for i in range(place, max(place - 3, -1), -1):
        request = understand(settings | {"seq_len": tokens(i)})
        try:
            plans = decide(*request, dry_run)
            *_, plan = [next(plans)] if asked.only_drafts else plans
        except FrugalError as error:
            refused.append({"seq_len": tokens(i), "why": str(error)})
            continue
        file.write_bytes(plan.to_json())
        return {
            "seq_len": tokens(i),
            "next": tokens(i + 1),
            "fits": True,
            "dry-run": not asked.only_drafts,
            "strategy": str(plan.strategy),
            "bytes": plan.memory.total_bytes,
            "headroom_bytes": plan.memory.headroom_bytes,
            "host_bytes_per_node": plan.memory.host_bytes_per_node,
            "seconds": round(plan.time.total_seconds, 2),
            **({"refused by a dry run": refused} if refused else {}),
        }
    return {"seq_len": 0, "fits": False, **({"refused by a dry run": refused} if refused else {})}


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    own, recipe = row["frugal"], row["recipe"]
    ratio = f"{own['seq_len'] / recipe['seq_len']:.2f} x" if recipe["seq_len"] else "-"
    return (
        f"{row['model']:16} {row['gpus']} x {row['gpu']:12} recipe {recipe['seq_len']:9,}  frugal {own['seq_len']:9,}  "
        f"{ratio:>7}  {own.get('strategy', own.get('why', ''))}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
