"""`python -m bench.memory.long`: the longest samples that fit, by GPUs: frugal's plan beside DeepSpeed's recipe.

The recipe is the one of DeepSpeed's tutorial of Arctic Long Sequence Training (deepspeed.ai/tutorials/
ulysses-alst-sequence-parallelism): ZeRO-3, optimizer in host memory, activation checkpoints in host memory, tiled loss
and tiled MLP, all GPUs sharing each sample. Here frugal predicts it like its own choice: same traces, same simulation,
same card, same margin. frugal chooses by itself. Both find the longest length on a grid of steps of 6 to 13 %, which is
then planned in full: the winner is dry-run, and what it says stands in the row. Positions of the models are raised, as
long ones are: nothing else of them is changed.

Nothing is trained. A row takes some ten minutes of a core, and more with more GPUs, whose samples are longer: traces
grow with the number of slices. `python -m bench.emulated_gpu --strategies` runs such strategies on emulated cards.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import frugal
from bench.environment import environment
from bench.goals import report_goals
from frugal.config.schema import understand
from frugal.dryrun.cache import presets
from frugal.dryrun.client import DryRunSource, workers
from frugal.errors import FrugalError
from frugal.planning.search.candidate import Candidate, OpenSource
from frugal.planning.what_if import Case, predicted, predicted_with_sharing

RESULTS = Path(__file__).parents[1] / "results" / "long.json"
CASES = (("tinyllama-1.1b", "rtx3060-12g"), ("qwen3-8b", "rtx3090-24g"), ("llama-3.1-8b", "h100-80g"))
GPUS = (1, 2, 4, 8)
GLOBAL_BATCH, HOST = 8, "1T"
RECIPE = {
    "zero_stage": 3,
    "activation_checkpointing": "offloaded",
    "loss": "tiled",
    "mlp": "tiled",
    "offload": "optimizer",
}
POSITIONS = 1 << 26


def main() -> int:
    """Find all lengths, write them, and say whether frugal's are the longer ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[], help="only these")
    parser.add_argument("--gpus", nargs="*", type=int, default=GPUS, help="numbers of GPUs")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, card in CASES:
            if arguments.models and model not in arguments.models:
                continue
            for row in rows_of(model, card, arguments.gpus, Path(folder)):
                print(line(row), flush=True)
                rows.append(row)
    goals = {
        "no recipe takes longer samples than frugal's plan": all(
            row["frugal"]["seq_len"] >= row["recipe"]["seq_len"] for row in rows
        ),
        "all of them fit when dry-run": all(
            row[who]["fits"] for row in rows for who in ("frugal", "recipe") if row[who]["seq_len"]
        ),
    }
    command = " ".join(["python -m bench.memory.long", *sys.argv[1:]])
    record = environment(command) | {"host": HOST, "global_batch": GLOBAL_BATCH, "rows": rows, "goals": goals}
    return report_goals(record, arguments.output)


def rows_of(model: str, card: str, gpus: list[int], folder: Path) -> Iterator[dict[str, Any]]:
    """For each number of GPUs what either takes. More GPUs take no shorter samples, so the last answer is a start."""
    file = folder / f"{model}.json"
    preset = presets()[model]
    file.write_text(
        json.dumps({"model_type": preset["type"], **preset["config"], "max_position_embeddings": POSITIONS})
    )
    at_own = 0
    for number in gpus:
        settings = {"model": str(file), "task": preset["task"], "gpus": number, "gpu": card, "host_mem": HOST}
        settings |= {"global_batch": GLOBAL_BATCH}
        with closing(workers()) as pool:
            dry_run = partial(DryRunSource, pool=pool, will_dry_run=False)
            pinned = settings | RECIPE | {"sequence_parallel": number}
            recipe = partial(looked_at, pinned, dry_run, predicted)
            own = partial(looked_at, settings, dry_run, predicted_with_sharing)
            at_recipe = last(recipe, estimate(recipe))
            at_own = last(own, max(at_recipe, at_own, 0))
        yield {
            "model": model,
            "gpu": card,
            "gpus": number,
            "recipe": planned(pinned, at_recipe),
            "frugal": planned(settings, at_own),
        }


Look = Callable[[int], Candidate | None]
"""What is predicted of samples as long as a place of the grid."""


def looked_at(
    settings: dict[str, Any],
    dry_run: OpenSource,
    predict: Callable[[list[Case], OpenSource], list[Candidate | None]],
    i: int,
) -> Candidate | None:
    """A `Look`, but for its settings and what predicts."""
    request, cluster, _ = understand({**settings, "seq_len": tokens(i)})
    (found,) = predict([Case(name=f"{tokens(i)} tokens", request=request, cluster=cluster)], dry_run)
    return found


def fits(found: Candidate | None) -> bool:
    """None is nothing that could be predicted."""
    return found is not None and found.fits


def estimate(look: Look) -> int:
    """The place at which a line through two short lengths reaches the card: where to begin, nothing more."""
    places = (16, 24)
    headrooms = [(found.headroom_bytes or 0) if (found := look(i)) else 0 for i in places]
    (near, far), (more, less) = (tokens(i) for i in places), headrooms
    if more <= less:
        return 0
    longest = near + more * (far - near) / (more - less)
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


def planned(settings: dict[str, Any], place: int) -> dict[str, Any]:
    """What a plan of samples of that length says, dry-run."""
    if place < 0:
        return {"seq_len": 0, "fits": False}
    length = tokens(place)
    try:
        plan = frugal.plan(**settings, seq_len=length)
    except FrugalError as error:
        return {"seq_len": length, "fits": False, "why": str(error)}
    return {
        "seq_len": length,
        "next_does_not_fit": tokens(place + 1),
        "fits": True,
        "strategy": str(plan.strategy),
        "bytes": plan.memory.total_bytes,
        "headroom_bytes": plan.memory.headroom_bytes,
        "seconds": round(plan.time.total_seconds, 2),
    }


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
