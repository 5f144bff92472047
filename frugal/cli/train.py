"""`frugal train`."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.checkpoint import manifest
from frugal.checkpoint.run_folder import holds_a_run
from frugal.cli.display import preview as preview_command
from frugal.cli.display.verdict import show_verdict
from frugal.cli.options import (
    SettingsCommand,
    config_option,
    options,
    planned,
    planned_for,
    planning_flags,
    read_settings,
    refuse_beside_a_plan,
)
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.build_cluster import ClusterSettings, HostfileEntry, read_hostfile
from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.config.run_settings import LaunchSettings, RunSettings, earlier_settings, launch_settings, run_settings
from frugal.config.schema import SETTINGS, TomlFile, requested
from frugal.config.setting import merged, settings_of
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed.env import DEFAULT_PORT
from frugal.dryrun.pool import shared_workers
from frugal.engine.reports import trackers
from frugal.engine.run import run
from frugal.errors import CheckpointError, PlanMismatchError, RequestError
from frugal.launch import alternatives, commands, hosts, local, restart
from frugal.planning.plan import Plan

PLAN = "plan.json"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A training job: flags (`values`), frugal.toml (`file`), and the hosts of `hostfile`, if one is named."""

    values: dict[str, Any]
    file: TomlFile
    ranks: int | None
    settings: RunSettings
    how: LaunchSettings
    hostfile: Path | None
    hosts: Sequence[HostfileEntry]


@click.command("train", cls=SettingsCommand)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="A plan.json, instead of planning flags.")
@click.option("--ranks", type=int, hidden=True, help="Train on N CPU processes; short for --device cpu --gpus N.")
@click.option(
    "--print", "printed", type=click.Choice(list(commands.LAUNCHERS)), hidden=True,
    help="Print the commands that start the run instead of starting it.",
)  # fmt: skip
@click.option(
    "--preview", type=click.IntRange(min=1), metavar="N",
    help="Print N samples, highlighting tokens that contribute to the loss, and start nothing.",
)  # fmt: skip
@options(Request, ClusterSettings, RunSettings, LaunchSettings)
@config_option
def command(
    plan_path: Path | None, ranks: int | None, printed: commands.Launcher | None, preview: int | None, **values: Any
) -> int:
    """Train with a plan; without one, plan first, as `frugal plan` with the same flags does."""
    if preview is not None:
        return preview_command.show(preview, plan_path, values, read_settings(values))
    job = _job(values, ranks)
    plan = _given_plan(job, plan_path)
    preview_command.check_data(job.settings.data)
    job.settings.check_length()
    if not job.hosts:
        trackers.check(job.settings.track)
    if plan is None:
        with shared_workers():
            plan = _new_plan(job)
            _tell(plan, err=printed is not None)
            plan = alternatives.for_run(plan, job.settings)
        if printed is not None:
            plan_path, _ = write_plan(plan, job.settings.out)
    else:
        if printed is None:
            from frugal.dryrun.compare import proven_here  # a tenth of a second that a new plan does not need

            plan = alternatives.for_run(proven_here(plan), job.settings)
        for note in cuda_allocator.notes(plan.strategy.expandable_segments, plan.cluster, os.environ):
            click.echo(f"note: {note}", err=True)
    _check_ranks(plan, ranks)
    if job.hosts:
        hosts.check_nodes(plan, job.hosts)
    if printed is None:
        code = _start(job, plan)
        if code == 0 and not job.settings.resume:
            from frugal.dryrun.compare import as_run  # after the run, which needs its memory

            if (said := as_run(plan, job.settings.out)) is not None:
                click.echo(said)
        return code
    launch_request = commands.LaunchRequest(
        plan=plan, plan_path=plan_path or job.settings.out / PLAN, hosts=job.hosts, settings=job.settings,
        hostfile=job.hostfile, port=job.how.master_port or DEFAULT_PORT,
    )  # fmt: skip
    click.echo(commands.printed(printed, launch_request))
    return 0


def _job(values: dict[str, Any], ranks: int | None) -> _Job:
    """Read the files that flags name, and the record of a run that is resumed.

    Raises:
        RequestError: they contradict each other, or a run is in the folder already.
        CheckpointError: there is nothing to resume.
    """
    file = read_settings(values)
    how = launch_settings(values, file.train)
    path = values.get("hostfile") or file.plan.get("hostfile")
    named = read_hostfile(Path(path)) if path else ()
    settings = run_settings(values, file.train)
    settings.check_addresses()
    if settings.mirror:
        from frugal.checkpoint import mirror  # torch takes seconds

        mirror.fetch_if_empty(settings)
    newest = manifest.newest_checkpoint(settings.checkpoints)
    if settings.resume:
        if newest is None:
            raise CheckpointError(f"there is no checkpoint in {settings.checkpoints}", hint="start without --resume")
        settings = run_settings(values, merged(SETTINGS, earlier_settings(settings.out), file.train))
    elif newest is not None:
        raise holds_a_run(settings.out, newest)
    hostfile = Path(path) if path else None
    return _Job(values=values, file=file, ranks=ranks, settings=settings, how=how, hostfile=hostfile, hosts=named)


def _given_plan(job: _Job, path: Path | None) -> Plan | None:
    """Return the plan given, or that of the run to resume, unless flags ask for another or the nodes are others."""
    flags = planning_flags(job.values)
    if path is not None:
        refuse_beside_a_plan("--plan", flags)
        return Plan.read(path)
    earlier = job.settings.out / PLAN
    if not job.settings.resume or flags or not earlier.exists():
        return None
    plan = Plan.read(earlier)
    is_for_others = job.hosts and [len(node.devices) for node in plan.cluster.nodes] != [h.slots for h in job.hosts]
    return None if is_for_others or (job.ranks is not None and not _is_for(plan, job.ranks)) else plan


def _new_plan(job: _Job) -> Plan:
    """Return a new plan, which keeps the request of a run that is resumed; `ranks` stands for this machine's CPU."""
    file, values, earlier = job.file, job.values, job.settings.out / PLAN
    if job.settings.resume and earlier.exists():
        file = replace(file, plan=merged(SETTINGS, _trained(Plan.read(earlier)), file.plan))
    if job.ranks is not None:
        given = next((name for name in ("gpus", "nodes", "gpu", "device") if values.get(name) is not None), "")
        if given:
            raise RequestError(
                f"--ranks was given together with --{given}",
                because=f"--ranks {job.ranks} means {job.ranks} processes on this machine's CPU",
                hint="leave one of them out",
            )
        cpu: dict[str, Any] = {"device": "cpu", "gpus": job.ranks}
        if values.get("mem") is None and "mem" not in file.plan:
            cpu["mem"] = psutil.virtual_memory().available // max(job.ranks, 1)
        values = values | cpu
        file = replace(file, plan={name: value for name, value in file.plan.items() if name not in ("gpu", "nodes")})
    return planned(values, file, asks_data=not job.settings.resume)


def _start(job: _Job, plan: Plan) -> int:
    """Train here or on the named hosts, with restarts after a crash if asked for, and return the exit code."""
    settings, restarts, port = job.settings, job.how.max_restarts, job.how.master_port
    if job.hosts and not _is_this_machine(job.hosts):
        plan_for = partial(_plan_on, job, before=plan) if job.how.elastic else None
        on = hosts.RestartableHosts(plan, job.hosts, settings, port, plan_for)
        return restart.supervise(on.start, plan, settings, restarts, on.plan_for_restart)
    local.check_machine(plan, port)
    if plan.batch.world_size == 1 and not restarts:
        run(plan, settings)
        return 0
    rest = partial(_plan_for_rest, job) if job.how.elastic else lambda before: before
    return restart.supervise(partial(local.run, master_port=port), plan, settings, restarts, rest)


def _plan_on(job: _Job, cluster: Cluster, *, before: Plan) -> Plan:
    """Return the plan for a part of the hosts that a run began on."""
    rows = settings_of(Request)
    given = merged(rows, _trained(before), job.file.plan, job.values)
    request, defaults = requested({name: value for name, value in given.items() if name in rows})
    plan = planned_for(request, cluster, defaults)
    _tell(plan)
    return plan


def _plan_for_rest(job: _Job, before: Plan) -> Plan:
    """Return the plan for the devices of this machine that are left; the one before, if these are all."""
    left, (node,) = local.working_devices(before), before.cluster.nodes
    if len(left) == len(node.devices):
        return before
    click.echo(f"{len(left)} of {len(node.devices)} devices are left: planning again", err=True)
    rest = replace(node, devices=tuple(node.devices[number] for number in left))
    return _plan_on(job, replace(before.cluster, nodes=(rest,)), before=before)


def _tell(plan: Plan, *, err: bool = False) -> None:
    """Show the verdict of a plan; `frugal explain` reads the rest from the run's folder."""
    show_verdict(plan, err=err)
    click.echo(err=err)


def _is_this_machine(named: Sequence[HostfileEntry]) -> bool:
    """Return True if only this machine is named, which needs no ssh."""
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    return len(named) == 1 and named[0].name in here


def _trained(plan: Plan) -> dict[str, Any]:
    """Return the settings that change a run's numbers, which a new plan for it keeps."""
    return {
        name: value
        for name in _TRAINED
        if (name == "seq_len" or name not in plan.defaults) and (value := getattr(plan.request, name)) is not None
    }


_TRAINED = (
    "model", "task", "global_batch", "global_tokens", "seq_len", "precision", "optimizer", "learning_rate",
    "weight_decay", "gradient_clipping", "lengths", "pack", "batch_norm", "lora", "quantize",
)  # fmt: skip


def _is_for(plan: Plan, ranks: int) -> bool:
    """Return True if a plan is for this number of CPU ranks."""
    return plan.batch.world_size == ranks and plan.cluster.devices[0].kind == "cpu"


def _check_ranks(plan: Plan, ranks: int | None) -> None:
    kind = plan.cluster.devices[0].kind
    if ranks is not None and not _is_for(plan, ranks):
        raise PlanMismatchError(
            f"the plan is for {plan.batch.world_size} {'CPU ranks' if kind == 'cpu' else 'GPUs'},"
            f" this run has {ranks} CPU ranks",
            hint=f"leave --ranks out, or plan again: frugal plan --device cpu --gpus {ranks}",
        )
