"""`frugal train`."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from frugal.checkpoint import manifest, run_folder
from frugal.cli.options import (
    SettingsCommand,
    check_folder,
    collect,
    config_option,
    options,
    planned,
    planning_flags,
    read_plan,
    read_settings,
    with_data,
)
from frugal.cli.terminal import show_verdict
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.build_cluster import ClusterSettings, HostfileEntry, read_hostfile
from frugal.config.hardware.cluster import Cluster
from frugal.config.request import Request
from frugal.config.run_settings import LaunchSettings, RunSettings, earlier_settings
from frugal.config.schema import merged, requested
from frugal.config.setting import build, settings_of
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed.env import DEFAULT_PORT, silence_libraries
from frugal.dryrun.pool import shared_workers
from frugal.engine.reports import trackers
from frugal.engine.run import run
from frugal.errors import CheckpointError, refuse
from frugal.launch import commands, hosts, local, restart
from frugal.planning.plan import Plan

PLAN = "plan.json"

_TRAINED = (
    "model", "task", "global_batch", "global_tokens", "seq_len", "precision", "optimizer", "learning_rate",
    "weight_decay", "gradient_clipping", "lengths", "pack", "batch_norm", "lora", "quantize",
)  # fmt: skip
"""Settings that change a run's numbers, which a new plan for it keeps."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """A training job: flags (`values`), what they and frugal.toml say (`asked`), the hosts that a hostfile names."""

    values: dict[str, Any]
    asked: dict[str, Any]
    settings: RunSettings
    how: LaunchSettings
    hosts: Sequence[HostfileEntry]


@click.command("train", cls=SettingsCommand)
@click.option("--plan", "plan_path", type=click.Path(path_type=Path), help="A plan.json, instead of planning flags.")
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
def command(plan_path: Path | None, printed: commands.Launcher | None, preview: int | None, **values: Any) -> int:
    """Train with a plan; without one, plan first, as `frugal plan` with the same flags does."""
    if plan_path is not None and plan_path.is_dir():
        plan_path /= PLAN
    if preview is not None:
        _preview(preview, plan_path, read_settings(values))
        return 0
    job = _job(values)
    plan = _given_plan(job, plan_path)
    _check_data(job.settings)
    job.settings.check_length()
    if not job.hosts:
        trackers.check(job.settings.track)
        if job.settings.mirror and printed is None:
            from frugal.checkpoint import mirror  # torch takes seconds

            mirror.warn_if_unreachable(job.settings.mirror)
    if plan is None:
        with shared_workers():
            plan = _new_plan(job, starts_here=printed is None and not job.hosts)
            show_verdict(plan, err=printed is not None)
            click.echo(err=printed is not None)
        if printed is not None:
            plan_path, _ = write_plan(plan, job.settings.out)
    else:
        if printed is None:
            from frugal.dryrun.compare import proven_here  # a tenth of a second that a new plan does not need

            plan = proven_here(plan)
        for note in cuda_allocator.notes(plan.strategy.expandable_segments, plan.cluster, os.environ):
            click.echo(f"note: {note}", err=True)
    if job.hosts:
        hosts.check_nodes(plan, job.hosts)
    if printed is None:
        return _start(job, plan)
    launch_request = commands.LaunchRequest(
        plan=plan, plan_path=plan_path or job.settings.out / PLAN, hosts=job.hosts,
        run_arguments=job.settings.arguments(), grace=job.settings.grace,
        hostfile=Path(job.asked["hostfile"]) if job.hosts else None, port=job.how.master_port or DEFAULT_PORT,
    )  # fmt: skip
    click.echo(commands.printed(printed, launch_request))
    return 0


def _preview(number: int, plan_path: Path | None, asked: dict[str, Any]) -> None:
    settings = build(RunSettings, asked)
    _check_data(settings)
    request = requested(asked)[0] if plan_path is None else Plan.read(plan_path).request
    silence_libraries()
    from frugal.cli import preview  # torch takes seconds

    preview.show(number, request, settings)


def _check_data(settings: RunSettings) -> None:
    refuse(
        (
            not settings.data,
            "no data was given",
            "",
            "pass --data PATH, or --data stdlib to try it on Python's own sources",
        )
    )


def _job(values: dict[str, Any]) -> _Job:
    """Read the files that flags name, and the record of a run that is resumed.

    Raises:
        RequestError: they contradict each other, or a run is in the folder already.
        CheckpointError: there is nothing to resume.
    """
    asked = read_settings(values)
    how = build(LaunchSettings, asked)
    named = read_hostfile(Path(asked["hostfile"])) if asked.get("hostfile") else ()
    settings = build(RunSettings, asked)
    settings.check_addresses()
    if settings.mirror:
        from frugal.checkpoint import mirror  # torch takes seconds

        mirror.fetch_if_empty(settings.mirror if settings.resume else None, settings.out)
    newest = manifest.newest_checkpoint(settings.checkpoints)
    if settings.resume:
        if newest is None:
            raise CheckpointError(f"there is no checkpoint in {settings.checkpoints}", hint="start without --resume")
        settings = build(RunSettings, merged(earlier_settings(settings.out), asked))
    elif newest is not None:
        raise run_folder.holds_a_run(settings.out, newest)
    return _Job(values=values, asked=asked, settings=settings, how=how, hosts=named)


def _given_plan(job: _Job, path: Path | None) -> Plan | None:
    """Return the plan given, or that of the run to resume, unless flags ask for another or the nodes are others."""
    flags = planning_flags(job.values)
    if path is not None:
        return read_plan(path, flags, what="--plan")
    earlier = job.settings.out / PLAN
    if not job.settings.resume or flags or not earlier.exists():
        return None
    plan = Plan.read(earlier)
    is_for_others = job.hosts and [len(node.devices) for node in plan.cluster.nodes] != [h.slots for h in job.hosts]
    return None if is_for_others else plan


def _new_plan(job: _Job, *, starts_here: bool) -> Plan:
    """Return a new plan; that of a run that is resumed keeps the request, and the devices where nothing is said of
    them. What the run would refuse anyhow is refused before a second of planning is spent."""
    asked, earlier = job.asked, job.settings.out / PLAN
    if job.settings.resume and earlier.exists():
        before = Plan.read(earlier)
        asked = merged(_trained(before), asked)
    if job.settings.resume and earlier.exists() and settings_of(ClusterSettings).keys().isdisjoint(job.asked):
        (request, defaults), cluster = requested(asked), before.cluster  # on the same devices
    else:
        request, cluster, defaults = collect(asked, asks_data=False)
    if starts_here:
        local.check_machine(cluster, job.how.master_port)
        check_folder(job.settings.out, "--out")
    silence_libraries()
    from frugal.engine import training  # DeepSpeed and torch take seconds

    training.check(request, job.settings)
    if not job.settings.resume:
        request = with_data(request, asked, defaults)
        training.check_schedule(request, job.settings)
    return planned(request, cluster, defaults)


def _trained(plan: Plan) -> dict[str, Any]:
    """Return the settings of a plan's request that a new plan for its run keeps."""
    kept = [name for name in _TRAINED if name == "seq_len" or name not in plan.defaults]
    return {name: getattr(plan.request, name) for name in kept}


def _start(job: _Job, plan: Plan) -> int:
    """Train here or on the named hosts, with restarts after a crash if asked for, and return the exit code."""
    settings, restarts, port = job.settings, job.how.max_restarts, job.how.master_port
    here = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn()}
    if job.hosts and not (len(job.hosts) == 1 and job.hosts[0].name in here):  # this machine alone needs no ssh
        plan_for = partial(_plan_on, job, before=plan) if job.how.elastic else None
        on = hosts.RestartableHosts(plan, job.hosts, settings, port, plan_for)
        return restart.supervise(on.start, plan, settings, restarts, on.plan_for_restart)
    local.check_machine(plan.cluster, port)
    if plan.batch.world_size == 1 and not restarts:
        run(plan, settings)
        return 0
    rest = partial(_plan_for_rest, job) if job.how.elastic else lambda before: before
    return restart.supervise(partial(local.run, master_port=port), plan, settings, restarts, rest)


def _plan_on(job: _Job, cluster: Cluster, *, before: Plan) -> Plan:
    """Return the plan for a part of the hosts that a run began on."""
    request, defaults = requested(merged(_trained(before), job.asked))
    plan = planned(request, cluster, defaults)
    show_verdict(plan)
    click.echo()
    return plan


def _plan_for_rest(job: _Job, before: Plan) -> Plan:
    """Return the plan for the devices of this machine that are left; the one before, if these are all."""
    left, (node,) = local.working_devices(before), before.cluster.nodes
    if len(left) == len(node.devices):
        return before
    click.echo(f"{len(left)} of {len(node.devices)} devices are left: planning again", err=True)
    rest = replace(node, devices=tuple(node.devices[number] for number in left))
    return _plan_on(job, replace(before.cluster, nodes=(rest,)), before=before)
