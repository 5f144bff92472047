"""`python -m bench.emulated_gpu.ragged`: whole runs over samples of different lengths, on emulated cards.

Each row is a plan of `frugal plan` for a model, a strategy and lengths that a seed draws; every fourth model is of a
family that transformers has and no other table of this bench. Its run is that of `frugal train`: weights made and
sent as there, eight optimizer steps of the training loop over samples as data has them (lengths log-normal, or packs
of documents), an evaluation after every third step and two checkpoints. It runs

    free                 what is allocated, against a simulation of the very shapes that ran; what is reserved
    capped               with what the plan promises; a recovery from out of memory counts as a broken promise
    lazy                 of several ranks: capped, with device work done only when the host waits, and masks that hide
                         something: the other end of what a card may do
    expandable, capped   the first two with expandable segments, of a plan for them

Of several ranks each runs by itself (`bench.emulated_gpu.twins`). It needs the environment of `bench/emulated_gpu`.
Rows that the output has already are left out unless `--again` is given; after a change to predictions `--repredict`
repeats what was capped at another promise.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import msgspec

from bench.emulated_gpu.cards import CARDS
from bench.emulated_gpu.environment import environment as of_card
from bench.emulated_gpu.ragged_run import STEPS, Run, Samples, shapes
from bench.gpu.configurations import Configuration
from bench.gpu.predictions import Prediction
from bench.gpu.report import CAPPED_EXPANDABLE, Finished, Row, summary
from bench.gpu.truth import LONGER, environment
from bench.gpu.worker import Answer
from bench.training.small_configs import MORE, small_config
from frugal.config import sample_lengths
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.cluster import ALLOCATOR_BYTES, ALLOCATOR_SHARE
from frugal.config.schema import understand
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.compare import Figures, predicted
from frugal.dryrun.planner import plans_here
from frugal.planning.length_bucketing import Shape
from frugal.planning.memory.allocator import Replays
from frugal.planning.plan import Plan

RESULTS = Path(__file__).parents[1] / "results"
OUT, TYPES = RESULTS / "emulated-ragged.json", RESULTS / "architectures-cpu.json"
SEED, NUM_ROWS, UNSEEN = 20261126, 12, 4  # every UNSEEN-th row is of a family that no table has
SIZES = {2: 4, 4: 8, 8: 32, 16: 64, 64: 512, 128: 1024, 256: 8192}
"""Layers, heads, widths, positions and tokens of a model, for those of the small ones that exactness is shown for."""

KNOWN = {
    "causal-lm": (
        "gpt2", "llama", "qwen3", "mistral", "mixtral", "falcon", "phi3", "olmo2", "stablelm", "granite", "opt",
        "gpt_neox",
    ),
    "masked-lm": ("bert", "xlm-roberta"),
    "seq2seq": ("t5", "bart"),
}  # fmt: skip
"""Model types by task: those of the other tables, and others in wide use."""

PROMISED = ("capped", "lazy", CAPPED_EXPANDABLE)
"""Runs that may take what a plan promises."""


def configurations() -> Iterator[tuple[Configuration, str]]:
    """The rows and their tasks, drawn by `SEED`."""
    generator = random.Random(SEED)
    known = [(kind, task) for task, kinds in KNOWN.items() for kind in kinds]
    generator.shuffle(known)
    unseen = sorted(
        {
            (pair["model_type"], pair["task"])
            for pair in json.loads(TYPES.read_text())["pairs"]
            if pair["verdict"] == "exact" and pair["task"] in KNOWN and pair["model_type"] not in MORE
        }
        - set(known)
    )
    for number in range(NUM_ROWS):
        kind, task = generator.choice(unseen) if number % UNSEEN == UNSEEN - 1 else known.pop()
        world_size, zero_stage = generator.choice((1, 2, 4)), generator.choice((0, 2, 2, 2, 3, 3))
        lora = "r=8" if generator.random() < 0.25 else None
        yield (
            Configuration(
                model=kind,
                precision="fp32" if zero_stage == 0 else "bf16",
                zero_stage=zero_stage,
                activation_checkpointing=generator.choice(("off", "off", "selective", "full")),
                loss=generator.choice(("plain", "tiled")),
                micro_batch=generator.choice((2, 4, 8)),
                accumulation_steps=generator.choice((2, 3, 4)),
                seq_len=generator.choice((256, 384, 512)),
                world_size=world_size,
                pack=task == "causal-lm" and generator.random() < 0.3,
                lora=lora,
                card=generator.choice(("rtx3060", "a100-40g", "l40s", "h100")),
            ),
            task,
        )


def planned(asked: Configuration, task: str, seed: int, folder: Path, *, expandable: bool) -> Path:
    """The plan of `frugal plan` for a row and the lengths of its samples.

    Raises:
        FrugalError: the model cannot be trained like that.
    """
    from frugal.data.corpus import _document_tokens

    assert asked.card is not None
    config = folder / asked.model / "config.json"
    if not config.exists():
        config.parent.mkdir(parents=True)
        config.write_text(_config(asked.model, task).to_json_string(use_diff=False))
    settings = {
        "model": str(config), "task": task, "gpu": CARDS[asked.card].frugal_name, "gpus": asked.world_size,
        "precision": asked.precision, "seq_len": asked.seq_len, "zero_stage": asked.zero_stage,
        "global_batch": asked.micro_batch * asked.accumulation_steps * asked.world_size,
        "max_tokens_per_gpu": asked.micro_batch * asked.seq_len, "loss": asked.loss, "kernels": "plain",
        "activation_checkpointing": asked.activation_checkpointing, "offload": "none", "lora": asked.lora,
        "pack": asked.pack or None,
    }  # fmt: skip
    number = STEPS * settings["global_batch"]
    drawn = Samples(task, number, asked.seq_len, random.Random(seed), packed=asked.pack)
    request, cluster, defaults = understand(settings | {"lengths": sample_lengths.of(drawn.lengths.tolist())})
    if asked.pack:  # as `frugal plan --data` counts them
        most = max(len(each["documents"]) for each in drawn)
        request = replace(request, document_tokens=_document_tokens(asked.seq_len // most))
    with patch.dict(os.environ, {cuda_allocator.NAME: f"expandable_segments:{expandable}"}):
        *_, plan = plans_here(request, cluster, defaults)
    file = folder / asked.name.replace(" ", "-") / f"{'expandable' if expandable else 'plain'}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(plan.to_json())
    return file


def _config(model_type: str, task: str) -> Any:
    """A configuration of a model of some twenty million parameters."""
    import transformers

    kind = type(transformers.AutoConfig.for_model(model_type))
    return small_config(kind, SIZES)


def predict(asked: Configuration, plans: Sequence[Plan], seed: int) -> Prediction:
    """Return what both plans promise, and what is allocated in the run's own shapes."""
    plan, expandable = plans
    ranks = tuple(range(plan.batch.world_size)) if plan.strategy.zero_stage in (1, 2) else (0,)
    allocated = as_run(plan, seed)
    return Prediction(
        configuration=asked,
        figures=Figures(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=plan.memory.reserved_bytes,
            smallest_capacity_bytes=promise(plan),
            categories={"all": allocated},
            phases={"all": allocated},
            host_bytes_per_node=plan.memory.host_bytes_per_node,
            operator=plan.memory.operator,
            phase=plan.memory.phase,
        ),
        reserved_above_bytes=plan.memory.reserved_above_bytes,
        expandable_reserved_bytes=expandable.memory.reserved_bytes,
        expandable_capacity_bytes=promise(expandable),
        parameters=plan.model.parameters,
        trainable_parameters=plan.model.trainable_parameters,
        ranks=ranks,
    )


def promise(plan: Plan) -> int:
    """Bytes that the plan leaves to torch's allocator."""
    return plan.memory.total_bytes - plan.memory.context


def as_run(plan: Plan, seed: int) -> int:
    """Bytes allocated at the peak of a run in these shapes.

    Where arithmetic knows no other lengths, at most that of dry runs: of the micro-batch with most tokens in each range
    of lengths up to a power of two.
    """
    run = shapes(plan, seed)
    if plan.memory.counts_lengths:
        with DryRunSource(plan.request, plan.cluster, will_dry_run=False) as source:
            memories = source.in_lengths(plan.strategy, [run])
        assert memories is not None
        return max(
            Replays(each.timeline.fixed, each.timeline.events, each.timeline.empties).under().peak_allocated_bytes
            for each in memories[0]
        )
    largest: dict[int, Shape] = {}
    for shape in {shape for step in run for micro_step in step for shape in micro_step}:
        length = shape[1].bit_length()
        largest[length] = max(largest.get(length, shape), shape, key=math.prod)
    peaks = []
    for num_samples, tokens in largest.values():
        request = replace(plan.request, seq_len=tokens, lengths=None)
        with DryRunSource(request, plan.cluster, will_dry_run=False) as source:
            dry_runs = source.dry_runs(plan.strategy, num_samples, plan.batch.accumulation_steps)
        peaks.append(predicted(dry_runs, plan.cluster).peak_allocated_bytes)
    return max(peaks)


def in_process(run: Run, asked: Configuration, *, expandable: bool, lazy: bool) -> Answer:
    """The answer of `run`, in a process with the row's card."""
    assert asked.card is not None
    given = of_card(asked.card, expandable_segments=expandable) | {"OMP_NUM_THREADS": "1"}
    if lazy:
        given |= {"EMULATED_GPU_EVENTS": "lazy", "EMULATED_GPU_MASKS": "padded"}
    command = ["nice", "-n", "5", sys.executable, "-m", "bench.emulated_gpu.ragged_run", msgspec.json.encode(run)]
    done = subprocess.run(command, env=given, capture_output=True, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["no word"]
        return Answer(failure=f"ended with {done.returncode}: {words[-1]}", clean=False)
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=Answer)


def measure(row: Row, asked: Configuration, plans: Sequence[Path], seed: int, folder: Path) -> None:
    """All runs of a row that it does not have yet, into it."""
    figures = row.prediction.figures
    assert figures is not None

    def go(what: str, cap_bytes: int | None = None) -> Answer:
        known = row.runs.get(what)
        if known is not None and known.cap_bytes == cap_bytes and known.answer.failure is None:
            return known.answer
        is_expandable = what.startswith("expandable")
        run = Run(
            plan=str(plans[is_expandable]), seed=seed, ranks=row.prediction.ranks, folder=str(folder),
            cap_bytes=cap_bytes, keeps_requests=what == "free",
        )  # fmt: skip
        answer = in_process(run, asked, expandable=is_expandable, lazy=what.startswith("lazy"))
        row.runs[what] = Finished(cap_bytes=cap_bytes, answer=answer)
        print(row.line(what), flush=True)
        return answer

    row.capacity_bytes = max(map(int, go("free").requests), default=0)
    cap = figures.smallest_capacity_bytes
    names = ["capped", *(f"capped x {factor:.2f}" for factor in LONGER)]
    for name, factor in zip(names, (1, *LONGER), strict=True):
        if go(name, int(cap * factor)).survived:
            break
    if asked.world_size > 1:
        go("lazy", cap)
    go("expandable")
    go(CAPPED_EXPANDABLE, row.prediction.expandable_capacity_bytes)


def main() -> int:
    """Plan, run and compare; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m bench.emulated_gpu.ragged", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="WORD", help="rows whose name has it; more than one: any")
    parser.add_argument("--again", action="store_true", help="also rows that the output has already")
    parser.add_argument("--repredict", action="store_true", help="plan rows of the output anew, keep their runs")
    parser.add_argument("--minutes", type=float, default=60.0, help="when no row is begun any more  [default: 60]")
    parser.add_argument("--list", action="store_true", help="only print the rows")
    parser.add_argument("--out", type=Path, default=OUT, help="[default: emulated-ragged.json in bench/results]")
    asked = parser.parse_args()
    drawn = list(enumerate(configurations()))
    if asked.list:
        print("\n".join(f"{number:2} {task:10} {each.name}" for number, (each, task) in drawn))
        return 0
    names = {each.name for _, (each, _) in drawn}
    rows: list[Row] = []
    if asked.out.exists():
        content = msgspec.json.decode(asked.out.read_bytes())["rows"]
        rows = [row for each in content if (row := Row.read(each)).measured and each["name"] in names]
    deadline = time.monotonic() + 60 * asked.minutes
    head = environment("emulated", "cuda", "bench.emulated_gpu.ragged") | {"seed": SEED}
    with TemporaryDirectory(prefix="emulated-ragged-") as name:
        folder = Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        for number, (each, task) in sorted(drawn, key=lambda row: row[1][1] == "seq2seq"):  # these take longest
            old = next((row for row in rows if row.prediction.configuration.name == each.name), None)
            is_asked = not asked.only or any(word in each.name for word in asked.only)
            if (
                not is_asked
                or time.monotonic() > deadline
                or (old is not None and not (asked.again or asked.repredict))
            ):
                continue
            rows = [row for row in rows if row is not old]
            runs = {} if old is None or asked.again else old.runs
            rows.append(_row(each, task, SEED + number, folder, runs))
            content = head | {"summary": _summary(rows), "rows": [row.content() for row in rows]}
            asked.out.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    if any(row.measured for row in rows):
        print("\n" + line(_summary(rows)))
    return int(not all(is_kept(row) for row in rows))


def _row(asked: Configuration, task: str, seed: int, folder: Path, runs: dict[str, Finished]) -> Row:
    """One row, planned and measured; `runs`: those that there are, of which those at the same promise are kept."""
    from frugal.errors import FrugalError

    row = Row(Prediction(configuration=asked), {what: each for what, each in runs.items() if " x " not in what})
    start = time.monotonic()
    try:
        files = [planned(asked, task, seed, folder, expandable=each) for each in (False, True)]
        row.prediction = predict(asked, [Plan.read(file) for file in files], seed)
    except FrugalError as error:
        row.failure = f"not planned: {error.what}: {error.because}"
        print(f"{asked.name} {row.failure}", flush=True)
        return row
    row.prediction = msgspec.structs.replace(row.prediction, seconds=time.monotonic() - start)
    print(f"{asked.name}: planned in {row.prediction.seconds:.0f} s", flush=True)
    measure(row, asked, files, seed, folder)
    return row


def is_kept(row: Row) -> bool:
    """Return whether every capped run went through."""
    return all(each.answer.survived for name, each in row.runs.items() if name in PROMISED)


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """As of other tables, without peers, whose estimates know no lengths; and broken promises by kind of run."""
    found = {name: value for name, value in summary(rows).items() if name not in ("peers", "attention")}
    found["reserved_above_bounds"] = sum(_is_above_bounds(row) for row in rows if row.measured)
    runs = {what: [row.runs[what].answer for row in rows if what in row.runs] for what in PROMISED}
    return found | {"out_of_memory": {what: sum(not each.survived for each in runs[what]) for what in PROMISED}}


def _is_above_bounds(row: Row) -> bool:
    """Return whether the free run reserved more than the plan says, and than its bounds of the allocator are above
    that."""
    figures = row.prediction.figures
    assert figures is not None
    above = ALLOCATOR_BYTES + ALLOCATOR_SHARE * figures.smallest_capacity_bytes
    most = figures.peak_reserved_bytes + row.prediction.reserved_above_bytes + above
    return row.runs["free"].answer.of_gpu["reserved_bytes"] > most


def line(found: dict[str, Any]) -> str:
    """The sums for people, as the documentation shows them."""
    allocated, reserved = found["allocated_error"], found["reserved_error"]
    out = ", ".join(f"{what} {count}" for what, count in found["out_of_memory"].items())
    return (
        f"{found['measured']} of {found['configurations']} runs, {found['families']} families; predicted over measured "
        f"allocated {allocated['lowest']:+.2%} at the lowest, {allocated['worst']:.2%} at the worst; reserved "
        f"{reserved['lowest']:+.1%} and {reserved['worst']:.1%}, above the bounds in {found['reserved_above_bounds']}; "
        f"out of memory: {out}"
    )


if __name__ == "__main__":
    sys.exit(main())
