"""`frugal train`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.cli import config, launcher
from frugal.cli.options import collect, planning_options
from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.files import write_plan
from frugal.planning.plan import Plan
from frugal.planning.settings import NAMES
from frugal.training import manifest, settings
from frugal.training.settings import Settings

PLAN, ASKED = "plan.json", "train.json"


@click.command("train")
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="A plan.json, instead of planning flags.")
@click.option("--ranks", type=int, help="Train on so many CPU processes; short for --device cpu --gpus N.")
@click.option("--master-port", type=int, help="Where ranks meet.  [default: a free port]")
@settings.options
@planning_options
def command(plan_path: Path | None, ranks: int | None, master_port: int | None, **values: Any) -> int:
    """Train as planned; without a plan, plan first."""
    file = config.read(values.get("config"))
    asked = settings.collect(values, _earlier(values, file.train) | file.train)
    plan = _plan(plan_path, ranks, values, file, asked)
    launcher.check(plan, master_port)
    _write_run(asked, plan)
    if plan.batch.world_size > 1:
        return launcher.launch(plan, asked.out / PLAN, asked, master_port)
    from frugal.training.run import run

    run(plan, asked)
    return 0


def _earlier(values: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """What the run to resume was asked for; nothing for a new run."""
    if not (values.get("resume") or file.get("resume")):
        return {}
    path = Path(values.get("out") or file.get("out") or Settings.out) / ASKED
    try:
        earlier = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        raise RequestError(f"cannot read what {path.parent} was asked for", because=f"{path}: {error}") from None
    return {name: value for name, value in earlier.items() if value not in (None, [])}


def _plan(path: Path | None, ranks: int | None, values: dict[str, Any], file: config.Config, asked: Settings) -> Plan:
    """The plan in the file, in the folder of a run to resume, or a new one."""
    flags = [name for name in NAMES if values.get(name) is not None]
    if path is not None and flags:
        raise RequestError(
            f"--plan was given together with --{flags[0].replace('_', '-')}",
            because="a plan is a decision already made",
            hint="leave one of them out",
        )
    if path is None and asked.resume and not flags and (asked.out / PLAN).exists():
        path = asked.out / PLAN
    if path is None:
        return _make_plan(ranks, values, file)
    plan = Plan.read(path)
    if ranks is not None and (ranks != plan.batch.world_size or plan.cluster.devices[0].kind != "cpu"):
        kind = "CPU ranks" if plan.cluster.devices[0].kind == "cpu" else "GPUs"
        raise PlanMismatchError(
            f"the plan is for {plan.batch.world_size} {kind}, this run has {ranks} CPU ranks",
            hint=f"leave --ranks out, or plan again: frugal plan --device cpu --gpus {ranks}",
        )
    return plan


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


def _write_run(asked: Settings, plan: Plan) -> None:
    """What the run is, in its folder: the plan, its print-out for DeepSpeed, and what was asked for."""
    write_plan(plan, asked.out)
    record = {name: getattr(asked, name) for name in settings.NAMES if name != "resume"} | {"out": str(asked.out)}
    try:
        manifest.write(asked.out / ASKED, msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
    except OSError as error:
        raise RequestError(
            f"cannot write to {asked.out}", because=str(error.strerror), hint="choose another folder with --out"
        ) from None
