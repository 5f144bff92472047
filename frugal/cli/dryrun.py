"""`frugal dryrun`."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import msgspec

from frugal.cli.options import (
    SettingsCommand,
    collect,
    config_option,
    options,
    planning_flags,
    read_plan,
    read_settings,
)
from frugal.cli.terminal import print_json, waiting
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.build_cluster import ClusterSettings
from frugal.config.hardware.cluster import Cluster
from frugal.config.pins import check_pins
from frugal.config.request import Request
from frugal.config.schema import settings_of_toml
from frugal.config.setting import settings_of
from frugal.distributed.env import silence_libraries
from frugal.dryrun.client import DryRunSource
from frugal.dryrun.compare import fullest, interval, predicted
from frugal.dryrun.messages import DryRun
from frugal.errors import refuse
from frugal.planning.batch import BatchPlan
from frugal.planning.memory import timeline_files
from frugal.planning.memory.timeline import CATEGORIES
from frugal.planning.report import bounds_of
from frugal.planning.strategy import Strategy, allowed_strategies, offload_levels
from frugal.tools.own_loop.reference import names_a_step
from frugal.units import format_bytes, plural

SHOWN_MODULES = 20
_NUMBER = re.compile(r"\.\d+(?=\.|$)")  # of a layer in a dotted name


@dataclass(frozen=True)
class _DryRuns:
    """The dry runs of a step, one for each kind of device, and the lines that describe it.

    `promised_bytes`: live bytes that a plan promises; 0 without a plan.
    """

    title: list[str]
    runs: Sequence[DryRun]
    cluster: Cluster
    expandable_segments: bool
    promised_bytes: int = 0


@click.command("dryrun", cls=SettingsCommand)
@click.argument("what", metavar="PLAN|MODEL|SCRIPT.py[:STEP]")
@click.argument("words", metavar="[-- ARGUMENTS OF THE SCRIPT]", nargs=-1)
@options(Request, ClusterSettings)
@config_option
@click.option("--json", "as_json", is_flag=True, help="Print the figures for programs.")
@click.option(
    "--explain", type=click.Choice(CATEGORIES), metavar="CATEGORY",
    help=f"List the modules that hold a category at the peak: {', '.join(CATEGORIES)}.",
)  # fmt: skip
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    help="Write the live bytes after every event: a .csv table, or a .pickle for torch's memory_viz.",
)
@click.option(
    "--steps", "num_steps", type=click.IntRange(1, 100),
    help="Calls of SCRIPT.py:STEP, or optimizer steps after which SCRIPT.py is ended.  [default: 2, the second is like "
    "all later ones; SCRIPT.py: to its end]",
)  # fmt: skip
@click.option(
    "--torch", "torch_version", metavar="VERSION",
    help="The version that SCRIPT.py will run with, such as 2.6: cuBLAS and RMSNorm take other memory in some.  "
    "[default: this]",
)  # fmt: skip
def command(
    what: str, words: tuple[str, ...], as_json: bool, explain: str | None, timeline: Path | None,
    num_steps: int | None, torch_version: str | None, **values: Any
) -> None:  # fmt: skip
    """Predict a step's memory by running it on meta tensors.

    A plan.json is dry-run exactly. A model is dry-run with the planning flags given: what they leave open is as
    simple as possible (the lowest ZeRO stage, nothing recomputed or moved to the host, one sample per micro-step).
    Your own training step, SCRIPT.py:STEP, is dry-run as it is: the script has functions named as its parameters, and
    what follows `--` in sys.argv. SCRIPT.py alone runs as a whole, or with --steps until so many optimizer steps.
    """
    if timeline is not None:
        timeline_files.check_file(timeline)
    is_step = names_a_step(what)
    refuse(
        (
            what.endswith(".ipynb"),
            f"{what} is a notebook",
            "a script is dry-run, as Python runs it",
            f"write it as one: jupyter nbconvert --to script {what}",
        ),
        (
            num_steps is not None and not is_step,
            f"--steps is for a training step of yours, and {what} is none",
            "",
            "name a function that trains: frugal dryrun train.py:step --steps 3",
        ),
        (
            torch_version is not None and not is_step,
            f"--torch is for a training step of yours, and {what} is none",
            "a plan is for the torch that frugal is made for",
            "name a function that trains: frugal dryrun train.py:step --torch 2.6",
        ),
        (
            words and not is_step,
            f"{what} was given together with {next(iter(words), '')}",
            "only a script with a training step of yours takes arguments",
            "leave it out, or name a function that trains: frugal dryrun train.py:step -- --width 64",
        ),
    )
    if is_step:
        with patch.object(sys, "argv", [what.rpartition(":")[0] or what, *words]):
            made = _own_step(what, num_steps, torch_version, values)
    else:
        with waiting(f"dry-running {what}"):
            if _is_plan(Path(what)):
                plan = read_plan(Path(what), planning_flags(values, "config", "hostfile"))
                with DryRunSource(plan.request, plan.cluster) as source:
                    made = _dry_run(source, plan.strategy, plan.batch, plan.memory.live_bytes)
            else:
                made = _model(what, values)
    kind = made.cluster.devices[0].kind
    result = predicted(made.runs, made.cluster, expandable_segments=made.expandable_segments)
    held = None if explain is None else fullest(made.runs, kind).explain(explain)
    if timeline is not None:
        timeline_files.write(timeline, {"predicted": fullest(made.runs, kind).timeline})
    notes = list(dict.fromkeys(note for each in made.runs for note in each.notes))
    device = min(made.cluster.devices, key=lambda device: device.usable_bytes)
    bounds = interval(result, device, notes)
    if as_json:
        content = msgspec.to_builtins(result) | {"interval": msgspec.to_builtins(bounds), "notes": notes}
        content |= {} if held is None else {"explained": dict(held)}
        print_json(content)
        return
    totals = {
        "allocated": result.peak_allocated_bytes,
        "reserved": result.peak_reserved_bytes,
        "smallest": result.smallest_capacity_bytes,
        "usable": device.usable_bytes,
        "promised": made.promised_bytes,
        "host, a node": result.host_bytes_per_node if kind == "cuda" else 0,
    }
    operator = result.operator.removeprefix("aten.").removesuffix(".default")
    needs = f"what it needs{'' if kind == 'cpu' else ', with the context'}: {bounds_of(bounds)[1:-1]}"
    missing = result.smallest_capacity_bytes - device.usable_bytes
    blocks = [
        made.title,
        [
            f"at its peak, in {result.phase} ({operator})",
            *_table({**result.categories, "total": result.peak_allocated_bytes}),
        ],
        ["peak of each phase", *_table(result.phases)],
        ["memory of the fullest device", *_table(totals), f"  bounds of {needs}"],
        ["it fits" if missing <= 0 else f"it does not fit: {format_bytes(missing)} short"],
    ]
    blocks += [["assumed, because it depends on data", *(f"  {note}" for note in notes)]] if notes else []
    blocks += [] if held is None else [_holders(held, str(explain))]
    blocks += [] if timeline is None else [[f"wrote {timeline}"]]
    click.echo("\n\n".join("\n".join(block) for block in blocks))


def _own_step(what: str, num_steps: int | None, torch_version: str | None, values: dict[str, Any]) -> _DryRuns:
    """Dry-run the user's own training step, with the segments that torch would make here, or those asked for."""
    overridden = settings_of_toml({}, values["overrides"])
    for name, row in settings_of(Request).items():
        refuse(
            (
                values.get(name) not in (None, ()) or name in overridden,
                f"{what} was given together with {row.flag}",
                "the script says what its step does",
                "leave it out, and write it into the script",
            )
        )
    settings = read_settings(values) | {"precision": "fp32"}  # the script's own is not known; old cards refuse bf16
    cards = [str(settings[name]) for name in ("gpu", "mem") if settings.get(name)]
    if cards and not settings.get("hostfile") and not any("," in each for each in cards):
        settings.setdefault("gpus", 1)  # as `python SCRIPT.py` runs it
    _, cluster, _ = collect(settings, asks_data=False)
    refuse(
        (
            cluster.devices[0].kind != "cuda",
            f"{what} was given together with --device cpu",
            "a step is dry-run for a GPU",
            None,
        )
    )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed says that it chose so
    silence_libraries()
    from frugal.tools.own_loop.run import NUM_STEPS, Script, dry_runs, version_of_torch  # torch takes seconds

    is_whole, calls = what.endswith(".py"), num_steps or NUM_STEPS  # a script has a loop of its own
    is_endless = is_whole and num_steps is None
    run = "to its end" if is_endless else plural(calls, "optimizer step" if is_whole else "step")
    waits_for = f"dry-running {what}{' to its end (--steps 3: until 3 optimizer steps)' * is_endless}"
    with waiting(waits_for), redirect_stdout(sys.stderr):  # what a script prints is not the answer
        version = version_of_torch(torch_version)
        steps = {"num_steps": 1, "ends_after": num_steps} if is_whole else {"num_steps": calls}
        runs = dry_runs(lambda: Script.load(what), cluster, **steps, torch_version=version)
    gpus = plural(cluster.world_size, cluster.rank_noun)
    title = [f"{what}, {run} on {gpus}: {cluster.devices[0].name}"]
    return _DryRuns(title, runs, cluster, bool(cuda_allocator.expandable(os.environ)))


def _is_plan(path: Path) -> bool:
    """Return True for a .json file, unless it is a model's configuration."""
    if path.suffix != ".json" or path.is_dir():
        return False
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True  # reading it as a plan says what is wrong
    return not (isinstance(content, dict) and "model_type" in content and "schema" not in content)


def _model(what: str, values: dict[str, Any]) -> _DryRuns:
    """Dry-run the first strategy that the search would look at, with one sample per micro-step unless pinned."""
    refuse((values.get("model") is not None, f"{what} was given together with --model", "", "leave one of them out"))
    request, cluster, defaults = collect(read_settings(values) | {"model": what}, asks_data=False)
    request = cuda_allocator.planned(request, cluster, os.environ)
    with DryRunSource(request, cluster) as source:
        facts = source.facts()
        if "seq_len" in defaults and facts.max_positions is not None:
            request = source.request = replace(request, seq_len=min(request.seq_len, facts.max_positions))
        check_pins(request, cluster.world_size)
        strategies = allowed_strategies(
            request,
            replace(facts, can_recompute=True, can_tile=False),
            world_size=cluster.world_size,
            offload=offload_levels(request)[0],
            on_gpus=cluster.devices[0].kind == "cuda",
        )
        micro_batch, shared_by = request.micro_batch or 1, request.sequence_parallel or 1
        num_takers = cluster.world_size // shared_by  # of samples: ranks, or groups that share theirs
        if request.accumulation_steps is not None and request.micro_batch is None:
            micro_batch = -(-request.batch_samples // (request.accumulation_steps * num_takers))
        batch = BatchPlan.of(request.batch_samples, (micro_batch,) * num_takers, sequence_parallel=shared_by)
        return _dry_run(source, strategies[0], batch)


def _dry_run(source: DryRunSource, strategy: Strategy, batch: BatchPlan, promised_bytes: int = 0) -> _DryRuns:
    request, cluster = source.request, source.cluster
    title = [
        f"{request.model} in {request.precision}, samples of {request.seq_len} tokens",
        f"{strategy}{', expandable segments' if strategy.expandable_segments else ''}",
        f"{plural(batch.world_size, cluster.rank_noun)}, micro-batch {batch.largest_micro_batch}, "
        f"{plural(batch.accumulation_steps, 'accumulation step')}",
    ]
    runs = source.dry_runs(strategy, batch.largest_micro_batch, batch.accumulation_steps)
    return _DryRuns(title, runs, cluster, strategy.expandable_segments, promised_bytes)


def _table(rows: dict[str, int]) -> list[str]:
    return [f"  {name:<16} {format_bytes(size):>12}" for name, size in rows.items() if size]


def _holders(held: list[tuple[str, int]], category: str) -> list[str]:
    """Return the modules that hold a category, layers that differ only in their number in one line."""
    groups: dict[str, list[int]] = {}
    for name, size in held:
        groups.setdefault(_NUMBER.sub(".*", name), []).append(size)
    rows = sorted(((sum(sizes), len(sizes), name) for name, sizes in groups.items()), reverse=True)
    total = sum(size for _, size in held)
    lines = [f"{category} at the peak, by the module that made them"]
    for size, count, name in rows[:SHOWN_MODULES]:
        operator = name.removeprefix("(aten.").removesuffix(")").removesuffix(".default")
        where = f"outside of the model ({operator.strip('(')})" if name.startswith("(") else name
        times = f"{count} x {format_bytes(size // count)}" if count > 1 else ""
        lines.append(f"  {format_bytes(size):>12} {size / total:>6.1%}  {where:<44} {times}".rstrip())
    rest = rows[SHOWN_MODULES:]
    if rest:
        lines.append(f"  {format_bytes(sum(size for size, *_ in rest)):>12}         {len(rest)} more, in --json")
    lines.append(f"  {format_bytes(total):>12}         total" if held else "  none")
    return lines
