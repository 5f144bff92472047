"""`frugal train`."""

import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.cli.options import collect, planning_options
from frugal.cli.plan import waiting, with_lengths
from frugal.config import hostfile, schema
from frugal.config import run as settings
from frugal.config.cluster import Cluster
from frugal.config.hostfile import HostfileEntry
from frugal.config.run import Settings
from frugal.config.schema import NAMES, REQUEST_NAMES, requested
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed.env import DEFAULT_PORT
from frugal.errors import CheckpointError, PlanMismatchError, RequestError
from frugal.launch import commands, local, pdsh, restart
from frugal.launch.elastic import RestartableHosts
from frugal.launch.ssh import Access
from frugal.planning.plan import Plan
from frugal.planning.report import report
from frugal.training.checkpoint import manifest
from frugal.training.checkpoint.run_folder import in_use
from frugal.training.run import run

PLAN = "plan.json"


@click.command("train")
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="A plan.json, instead of planning flags.")
@click.option("--ranks", type=int, help="Train on so many CPU processes; short for --device cpu --gpus N.")
@click.option("--master-port", type=click.IntRange(1, 65535), help="Where ranks meet.  [default: a free port]")
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="With --hostfile: where ssh listens on the nodes.")
@click.option("--nic", metavar="NAME", help="Several nodes: the network interface to talk over, such as eth0.")
@click.option(
    "--print", "printed", type=click.Choice(list(commands.LAUNCHERS)),
    help="Start nothing; print the commands that do, one for each node or one for all.",
)  # fmt: skip
@click.option("--max-restarts", type=click.IntRange(0), default=0, help="After a crash, go on so many times.")
@click.option("--elastic", is_flag=True, help="With --max-restarts: plan anew when GPUs or hosts are gone.")
@settings.options
@planning_options
def command(
    plan_path: Path | None,
    ranks: int | None,
    master_port: int | None,
    ssh_port: int | None,
    nic: str | None,
    printed: commands.Launcher | None,
    max_restarts: int,
    elastic: bool,
    **values: Any,
) -> int:
    """Train as planned; without a plan, plan first, as `frugal plan` with the same flags does."""
    if elastic and not max_restarts:
        raise RequestError("--elastic was given without --max-restarts", hint="add --max-restarts 3")
    file = schema.read_toml(values.get("config"))
    hosts_path = values.get("hostfile") or file.plan.get("hostfile")
    named = hostfile.read_hostfile(Path(hosts_path)) if hosts_path else ()
    asked = settings.collect(values, file.train)
    if asked.resume:
        if manifest.newest_checkpoint(asked.checkpoints) is None:
            raise CheckpointError(f"there is no checkpoint in {asked.checkpoints}", hint="start without --resume")
        asked = settings.collect(values, settings.earlier(asked.out) | file.train)
    elif (newest := manifest.newest_checkpoint(asked.checkpoints)) is not None:
        raise in_use(asked, newest)
    plan = _given_plan(plan_path, values, asked, ranks, named)
    is_new = plan is None
    if plan is None:
        if asked.resume and (asked.out / PLAN).exists():
            file = replace(file, plan=_trained(Plan.read(asked.out / PLAN)) | file.plan)
        plan = _make_plan(ranks, values, file, is_new=not asked.resume)
        click.echo(report(plan) + "\n", err=printed is not None)
    _check_ranks(plan, ranks)
    if named:
        pdsh.check_nodes(plan, named)
    access = Access(ssh_port=ssh_port, nic=nic)
    if printed is not None:
        if is_new:
            plan_path, _ = write_plan(plan, asked.out)
        told = commands.LaunchRequest(
            plan=plan, plan_path=plan_path or asked.out / PLAN, hosts=named, settings=asked, access=access,
            hostfile=Path(hosts_path) if hosts_path else None, port=master_port or DEFAULT_PORT,
        )  # fmt: skip
        click.echo(commands.launch_command(printed, told))
        return 0
    if named and not _is_this_machine(named):
        if not max_restarts:
            return pdsh.launch(plan, named, access, asked, master_port)
        plan_for = partial(_plan_on, before=plan, values=values, file=file) if elastic else None
        on = RestartableHosts(plan, named, access, asked, master_port, plan_for)
        return restart.supervise(on.start, plan, asked, max_restarts, on.plan_for_restart)
    local.check_machine(plan, master_port)
    if max_restarts:
        rest = partial(_plan_for_rest, values=values, file=file) if elastic else lambda before: before
        return restart.supervise(local.starter(master_port), plan, asked, max_restarts, rest)
    if plan.batch.world_size > 1:
        with TemporaryDirectory(prefix="frugal-") as folder:
            written, _ = write_plan(plan, Path(folder))
            return local.launch(plan, written, asked, master_port)
    run(plan, asked)
    return 0


def _plan_on(cluster: Cluster, *, before: Plan, values: dict[str, Any], file: schema.TomlFile) -> Plan:
    """The plan for a part of the hosts that a run began on."""
    from frugal.dryrun.planner import make_plan

    given = file.plan | {name: value for name, value in values.items() if value is not None}
    wanted = _trained(before) | {name: value for name, value in given.items() if name in REQUEST_NAMES}
    request, defaults = requested(wanted)
    with waiting(f"dry-running {request.model}"):
        plan = make_plan(request, cluster, defaults)
    click.echo(report(plan) + "\n")
    return plan


def _plan_for_rest(before: Plan, *, values: dict[str, Any], file: schema.TomlFile) -> Plan:
    """The plan for the devices of this machine that are left; the one before, if these are all."""
    number = local.num_working_devices(before)
    if number == before.batch.world_size:
        return before
    click.echo(f"{number} of {before.batch.world_size} devices are left: planning anew", err=True)
    on_cpu = before.cluster.devices[0].kind == "cpu"
    values = values | {"nodes": None, "hostfile": None, "gpu": None, "device": None, "gpus": None if on_cpu else number}
    described = {name: value for name, value in file.plan.items() if name != "hostfile"}
    file = replace(file, plan=_trained(before) | described)
    plan = _make_plan(number if on_cpu else None, values, file, is_new=False)
    click.echo(report(plan) + "\n")
    return plan


def _is_this_machine(named: Sequence[HostfileEntry]) -> bool:
    """Whether this machine alone is named, which needs no ssh."""
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    return len(named) == 1 and named[0].name in here


def _given_plan(
    path: Path | None, values: dict[str, Any], asked: Settings, ranks: int | None, named: Sequence[HostfileEntry]
) -> Plan | None:
    """A plan that was made before: the one given, or that of a run to resume, unless flags ask for another.

    A hostfile does not: beside a plan it says where to run it. To resume on other nodes is to plan anew.
    """
    flags = [name for name in NAMES if values.get(name) is not None and name != "hostfile"]
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
    is_for_others = named and [len(node.devices) for node in plan.cluster.nodes] != [host.slots for host in named]
    return None if is_for_others or (ranks is not None and not _is_for(plan, ranks)) else plan


def _trained(plan: Plan) -> dict[str, Any]:
    """What a run was asked to train, which a new plan for it keeps; how it does so is decided anew."""
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


def _make_plan(ranks: int | None, values: dict[str, Any], file: schema.TomlFile, *, is_new: bool) -> Plan:
    """A plan for what flags and `file` describe. Only for a new run the data is asked how long its samples are."""
    from frugal.dryrun.planner import make_plan

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
    with waiting(f"dry-running {request.model}"):
        return make_plan(request, cluster, defaults)
