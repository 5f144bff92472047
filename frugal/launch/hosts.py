"""Ranks on several hosts: ssh starts `frugal.launch.node` on each, which receives signals and ends with the command.

A run that has failed is started again on all of its hosts, or with --elastic on those that still work.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from frugal.checkpoint import run_folder
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.build_cluster import HostfileEntry
from frugal.config.hardware.cluster import Cluster, DeviceKind
from frugal.config.run_settings import RunSettings
from frugal.deepspeed_adapter import collectives
from frugal.distributed import parent
from frugal.distributed.connections import secret
from frugal.distributed.first_failure import FailureReport
from frugal.distributed.rank_logs import to_console
from frugal.errors import PlanMismatchError, RequestError
from frugal.launch import host_report
from frugal.launch.host_report import HostReport, ReadyHost, UnreachableHost
from frugal.launch.local import RANK_MODULE, run_reported
from frugal.launch.node import END_SECONDS, Launch, Processes
from frugal.planning.plan import Plan
from frugal.units import plural

RETURN_SECONDS = 300.0
"""Time after which hosts that do not answer are given up: booting takes minutes, a spanning tree half of one."""

RETRY_SECONDS = 5.0  # between two attempts to reach them


def check_nodes(plan: Plan, named: Sequence[HostfileEntry]) -> None:
    """Refuse a plan that is not for these hosts, in this order.

    Raises:
        PlanMismatchError: it is for another number of nodes, or of GPUs on one of them.
    """
    slots = [len(node.devices) for node in plan.cluster.nodes], [host.slots for host in named]
    if slots[0] != slots[1]:
        planned, available = (f"{plural(len(each), 'node')} with {', '.join(map(str, each))} GPUs" for each in slots)
        raise PlanMismatchError(
            "the plan is for other nodes than the hostfile has",
            because=f"it is for {planned}, and the hostfile has {available}",
            hint="plan for it: leave --plan out, or frugal plan --hostfile HOSTS",
        )


def require_ready(
    named: Sequence[HostfileEntry], reports: Sequence[HostReport | UnreachableHost], kind: DeviceKind
) -> list[ReadyHost]:
    """Return all hosts with all their slots.

    Raises:
        RequestError: a host does not answer, or lacks something; it lists all that is wrong, on all hosts.
    """
    if problems := host_report.problems(named, reports, kind):
        raise RequestError(
            "not all hosts are ready", because=problems, hint="frugal doctor --hostfile HOSTS shows what each host has"
        )
    return usable_hosts(named, reports, kind)[0]


def _start(plan: Plan, hosts: Sequence[ReadyHost], port: int, arguments: list[str], variables: dict[str, str]) -> int:
    """Start the ranks of every host and wait; return the exit code of the first host that failed, or 0."""
    environment = host_report.environment() | variables | {parent.OVER_SSH: "1", secret.SECRET: secret.make()}
    environment |= cuda_allocator.settings(plan.cluster, environment, plan.strategy.expandable_segments)
    if plan.cluster.devices[0].kind == "cpu":
        environment |= collectives.ON_CPU
    launch = Launch(
        devices=[[*host.gpus] for host in hosts], port=port, module=RANK_MODULE, arguments=arguments,
        address=host_report.rendezvous_address([host.report for host in hosts]), environment=environment,
    )  # fmt: skip
    command = host_report.command([sys.executable, "-u", "-m", "frugal.launch.node"])
    with Processes(END_SECONDS) as nodes:
        for number, ready in enumerate(hosts):
            nodes.start(
                ["ssh", *host_report.OPTIONS, "--", ready.host.name, command], os.environ,
                first_line=msgspec.json.encode(msgspec.structs.replace(launch, number=number)),
            )  # fmt: skip
        return nodes.wait()


class RestartableHosts:
    """The hosts of a hostfile, on which a run is started, and again on those that answer.

    `plan` is the one for all of them. `plan_for` makes one for a part of the cluster; without it, the run waits for
    all hosts.
    """

    def __init__(
        self, plan: Plan, named: Sequence[HostfileEntry], settings: RunSettings,
        master_port: int | None, plan_for: Callable[[Cluster], Plan] | None,
    ) -> None:  # fmt: skip
        self._plan, self._named, self._port = plan, named, master_port
        self._out, self._plan_for = settings.out, plan_for
        self._kind: DeviceKind = plan.cluster.devices[0].kind
        run_folder.make_folder(settings, settings.checkpoints)  # so that hosts can be asked whether they see it
        reports = host_report.collect_reports(named, settings.out, self._kind)
        self._ready = require_ready(named, reports, self._kind)

    def start(self, plan: Plan, settings: RunSettings) -> tuple[int, FailureReport | None]:
        """Train on the hosts that were ready when last checked; see `run_reported`."""
        return run_reported(
            plan, settings, partial(_start, plan, self._ready, self._port or self._ready[0].report.free_port)
        )

    def plan_for_restart(self, before: Plan) -> Plan:
        """Check the hosts again; return the plan for those that are ready: `before` where they are the same.

        Raises:
            RequestError: some host, or with `plan_for` every host, does not answer for minutes, or lacks something.
            NothingFitsError: the run does not fit on what is left.
        """
        reports = self._collect_reports()
        if self._plan_for is None:
            self._ready = require_ready(self._named, reports, self._kind)
            return before
        left, lost = usable_hosts(self._named, reports, self._kind)
        if not left:
            raise RequestError("no host is left to continue on", because=lost, hint="continue with --resume later")
        for text in lost:
            to_console(text)
        previous, self._ready = self._ready, left
        if [(ready.host.name, ready.gpus) for ready in left] == [(ready.host.name, ready.gpus) for ready in previous]:
            return before
        if not lost:
            to_console(f"all {len(left)} hosts are there again: continuing as first planned")
            return self._plan
        number, total = sum(len(host.gpus) for host in left), self._plan.batch.world_size
        to_console(
            f"{len(left)} of {len(self._named)} hosts are left, with {number} of {total} "
            f"{'ranks' if self._kind == 'cpu' else 'GPUs'}: planning anew"
        )
        return self._plan_for(part_of_cluster(self._plan.cluster, self._named, left))

    def _collect_reports(self) -> list[HostReport | UnreachableHost]:
        """Return reports once all hosts give one, or one host where that is enough, or after `RETURN_SECONDS`."""
        enough, is_noticed = all if self._plan_for is None else any, False
        end = time.monotonic() + RETURN_SECONDS
        while True:
            reports = host_report.collect_reports(self._named, self._out, self._kind, probe=self._plan_for is not None)
            if enough(isinstance(report, HostReport) for report in reports) or time.monotonic() > end:
                return reports
            if not is_noticed:
                unreachable = [
                    f"{host.name}, which {report.why}"
                    for host, report in zip(self._named, reports, strict=True)
                    if isinstance(report, UnreachableHost)
                ]
                to_console(f"waiting {RETURN_SECONDS / 60:.0f} minutes for {'; '.join(unreachable)}")
                is_noticed = True
            time.sleep(RETRY_SECONDS)


def usable_hosts(
    named: Sequence[HostfileEntry], reports: Sequence[HostReport | UnreachableHost], kind: DeviceKind
) -> tuple[list[ReadyHost], list[str]]:
    """Return the hosts to continue with, each with its GPUs that work, and a line for each host or GPU left out."""
    left, lost = [], []
    for host, report in zip(named, reports, strict=True):
        gpus = tuple(range(host.slots))
        if isinstance(report, HostReport) and report.working_gpus is not None:
            gpus = tuple(number for number in gpus if number in report.working_gpus)
        # What a report lacks in GPUs counts only where all of them are used.
        problems = host_report.problems([host], [report], kind if len(gpus) == host.slots else "cpu")
        if isinstance(report, UnreachableHost) or problems:
            lost.append(f"left out: {'; '.join(problems)}")
        elif not gpus:
            lost.append(f"left out: {host.name} has no GPU that works")
        else:
            left.append(ReadyHost(host, report, gpus))
            if len(gpus) < host.slots:
                lost.append(f"left out: {host.slots - len(gpus)} of {host.slots} GPUs of {host.name}: they do not work")
    return left, lost


def part_of_cluster(cluster: Cluster, named: Sequence[HostfileEntry], left: Sequence[ReadyHost]) -> Cluster:
    """Return the nodes and devices that are left of a cluster whose nodes are `named`."""
    nodes_by_name = {host.name: node for host, node in zip(named, cluster.nodes, strict=True)}
    kept = [(nodes_by_name[ready.host.name], ready.gpus) for ready in left]
    nodes = [replace(node, devices=tuple(node.devices[number] for number in gpus)) for node, gpus in kept]
    return replace(cluster, nodes=tuple(nodes))
