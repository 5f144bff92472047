"""`frugal train`."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.cli import config, launcher
from frugal.cli.options import collect, planning_options
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
    """Train as planned; without a plan, plan first."""
    file = config.read(values.get("config"))
    asked = settings.collect(values, file.train)
    if asked.resume:
        if manifest.newest(asked.checkpoints) is None:
            raise CheckpointError(f"there is no checkpoint in {asked.checkpoints}", hint="start without --resume")
        asked = settings.collect(values, settings.earlier(asked.out) | file.train)
    elif (newest := manifest.newest(asked.checkpoints)) is not None:
        raise in_use(asked, newest)
    path = _given_plan(plan_path, values, asked)
    if path is not None:
        plan = Plan.read(path)
    else:
        plan = _make_plan(ranks, values, file)
        click.echo(report(plan) + "\n")
    _check_ranks(plan, ranks)
    launcher.check(plan, master_port)
    if plan.batch.world_size > 1:
        with TemporaryDirectory(prefix="frugal-") as folder:
            written, _ = write_plan(plan, Path(folder))
            return launcher.launch(plan, written, asked, master_port)
    run(plan, asked)
    return 0


def _given_plan(path: Path | None, values: dict[str, Any], asked: Settings) -> Path | None:
    """Where a plan is that was made before: in the file given, or in the folder of a run to resume."""
    flags = [name for name in NAMES if values.get(name) is not None]
    if path is not None and flags:
        raise RequestError(
            f"--plan was given together with --{flags[0].replace('_', '-')}",
            because="a plan is a decision already made",
            hint="leave one of them out",
        )
    if path is None and asked.resume and not flags and (asked.out / PLAN).exists():
        return asked.out / PLAN
    return path


def _check_ranks(plan: Plan, ranks: int | None) -> None:
    kind = plan.cluster.devices[0].kind
    if ranks is not None and (ranks != plan.batch.world_size or kind != "cpu"):
        raise PlanMismatchError(
            f"the plan is for {plan.batch.world_size} {'CPU ranks' if kind == 'cpu' else 'GPUs'},"
            f" this run has {ranks} CPU ranks",
            hint=f"leave --ranks out, or plan again: frugal plan --device cpu --gpus {ranks}",
        )


def _make_plan(ranks: int | None, values: dict[str, Any], file: config.Config) -> Plan:
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
    return make_plan(*collect(values, file))
