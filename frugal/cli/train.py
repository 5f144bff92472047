"""`frugal train`."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.cli import config, launcher
from frugal.cli.options import collect, planning_options
from frugal.cli.plan import waiting, with_lengths
from frugal.errors import CheckpointError, PlanMismatchError, RequestError
from frugal.planning.files import write_plan
from frugal.planning.plan import Plan
from frugal.planning.report import report
from frugal.planning.settings import NAMES
from frugal.training import manifest, settings
from frugal.training.run import in_use, run
from frugal.training.settings import Settings

PLAN = "plan.json"


@click.command("train")
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="A plan.json, instead of planning flags.")
@click.option("--ranks", type=int, help="Train on so many CPU processes; short for --device cpu --gpus N.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="Where ranks meet.  [default: a free port]")
@settings.options
@planning_options
def command(plan_path: Path | None, ranks: int | None, master_port: int | None, **values: Any) -> int:
    """Train as planned; without a plan, plan first, as `frugal plan` with the same flags does."""
    file = config.read(values.get("config"))
    asked = settings.collect(values, file.train)
    if asked.resume:
        if manifest.newest(asked.checkpoints) is None:
            raise CheckpointError(f"there is no checkpoint in {asked.checkpoints}", hint="start without --resume")
        asked = settings.collect(values, settings.earlier(asked.out) | file.train)
    elif (newest := manifest.newest(asked.checkpoints)) is not None:
        raise in_use(asked, newest)
    plan = _given_plan(plan_path, values, asked, ranks)
    if plan is None:
        if asked.resume:
            file = replace(file, plan=_as_before(asked) | file.plan)
        plan = _make_plan(ranks, values, file, is_new=not asked.resume)
        click.echo(report(plan) + "\n")
    _check_ranks(plan, ranks)
    launcher.check(plan, master_port)
    if plan.batch.world_size > 1:
        with TemporaryDirectory(prefix="frugal-") as folder:
            written, _ = write_plan(plan, Path(folder))
            return launcher.launch(plan, written, asked, master_port)
    run(plan, asked)
    return 0


def _given_plan(path: Path | None, values: dict[str, Any], asked: Settings, ranks: int | None) -> Plan | None:
    """A plan that was made before: the one given, or that of a run to resume, unless flags ask for another."""
    flags = [name for name in NAMES if values.get(name) is not None]
    if path is not None and flags:
        raise RequestError(
            f"--plan was given together with --{flags[0].replace('_', '-')}",
            because="a plan is a decision already made",
            hint="leave one of them out",
        )
    if path is not None:
        return Plan.read(path)
    if not asked.resume or flags or not (asked.out / PLAN).exists():
        return None
    plan = Plan.read(asked.out / PLAN)
    return None if ranks is not None and not _is_for(plan, ranks) else plan


def _as_before(asked: Settings) -> dict[str, Any]:
    """What a run to resume was asked to train, which a new plan for it keeps; how it does so is decided anew."""
    path = asked.out / PLAN
    if not path.exists():
        return {}
    plan = Plan.read(path)
    return {
        name: value
        for name in _TRAINED
        if name not in plan.defaults and (value := getattr(plan.request, name)) is not None
    }


_TRAINED = (
    "model", "task", "global_batch", "global_tokens", "seq_len", "precision", "optimizer", "momentum", "learning_rate",
    "reference_batch", "lr_rule", "weight_decay", "gradient_clipping", "lengths", "pack",
)  # fmt: skip


def _is_for(plan: Plan, ranks: int) -> bool:
    """Whether a plan is for so many CPU ranks."""
    return plan.batch.world_size == ranks and plan.cluster.devices[0].kind == "cpu"


def _check_ranks(plan: Plan, ranks: int | None) -> None:
    kind = plan.cluster.devices[0].kind
    if ranks is not None and not _is_for(plan, ranks):
        raise PlanMismatchError(
            f"the plan is for {plan.batch.world_size} {'CPU ranks' if kind == 'cpu' else 'GPUs'},"
            f" this run has {ranks} CPU ranks",
            hint=f"leave --ranks out, or plan again: frugal plan --device cpu --gpus {ranks}",
        )


def _make_plan(ranks: int | None, values: dict[str, Any], file: config.Config, *, is_new: bool) -> Plan:
    """A plan for what flags and `file` describe. Only for a new run the data is asked how long its samples are."""
    from frugal.planner import make_plan

    if ranks is not None:
        for name in ("gpus", "nodes", "gpu", "device"):
            if values.get(name) is not None:
                raise RequestError(
                    f"--ranks was given together with --{name}",
                    because=f"--ranks {ranks} means {ranks} processes on this machine's CPU",
                    hint="leave one of them out",
                )
        cpu = {"device": "cpu", "gpus": ranks}
        if values.get("mem") is None and "mem" not in file.plan:
            cpu["mem"] = psutil.virtual_memory().available // max(ranks, 1)
        values = values | cpu
        file = replace(file, plan={name: value for name, value in file.plan.items() if name not in ("gpu", "nodes")})
    request, cluster, defaults = collect(values, file)
    if is_new:
        request = with_lengths(request, values, file)
    with waiting(f"rehearsing {request.model}"):
        return make_plan(request, cluster, defaults)
