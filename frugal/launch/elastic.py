"""The hosts that a run on several is started again on: all of them, or with --elastic those that still work."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from frugal.config.cluster import Cluster, DeviceKind
from frugal.config.hostfile import HostfileEntry
from frugal.config.settings.run_settings import RunSettings
from frugal.distributed import first_failure
from frugal.distributed.rank_logs import to_console
from frugal.errors import RequestError
from frugal.launch import pdsh, ssh
from frugal.launch.host_report import HostReport
from frugal.launch.ssh import Access, ReadyHost, UnreachableHost
from frugal.planning.plan import Plan

RETURN_SECONDS = 300.0
"""Until hosts that do not answer are given up: booting takes minutes, a spanning tree half of one."""

RETRY_SECONDS = 5.0  # between two attempts to reach them


class RestartableHosts:
    """Starts a run on the hosts of a hostfile, and again on those that answer.

    `plan` is the one for all of them. `plan_for` makes one for a part of the cluster; without it, the run waits for
    all hosts.
    """

    def __init__(
        self, plan: Plan, named: Sequence[HostfileEntry], access: Access, settings: RunSettings,
        master_port: int | None, plan_for: Callable[[Cluster], Plan] | None,
    ) -> None:  # fmt: skip
        self._plan, self._named, self._access, self._port = plan, named, access, master_port
        self._out, self._plan_for = settings.out, plan_for
        self._kind: DeviceKind = plan.cluster.devices[0].kind
        pdsh.make_folder(settings)
        self._ready = pdsh.ready_hosts(plan, named, access, settings.out)

    def start(self, plan: Plan, settings: RunSettings) -> tuple[int, first_failure.FailureReport | None]:
        """Train on the hosts that were ready when last checked."""
        return pdsh.run(plan, self._ready, self._access, settings, self._port)

    def plan_for_restart(self, before: Plan) -> Plan:
        """Check the hosts again; the plan for those that are ready, which is `before` where they are the same.

        Raises:
            RequestError: some host, or with `plan_for` every host, does not answer for minutes, or lacks something.
            NothingFitsError: the run does not fit on what is left.
        """
        reports = self._collect_reports()
        if self._plan_for is None:
            self._ready = pdsh.require_ready(self._named, reports, self._access, self._kind)
            return before
        left, lost = usable_hosts(self._named, reports, self._access, self._kind)
        if not left:
            raise RequestError("no host is left to go on with", because=lost, hint="continue with --resume later")
        for text in lost:
            to_console(text)
        previous, self._ready = self._ready, left
        if _gpus_by_host(left) == _gpus_by_host(previous):
            return before
        if not lost:
            to_console(f"all {len(left)} hosts are there again: going on as planned at first")
            return self._plan
        number, total = sum(len(host.gpus) for host in left), self._plan.batch.world_size
        to_console(
            f"{len(left)} of {len(self._named)} hosts are left, with {number} of {total} "
            f"{'ranks' if self._kind == 'cpu' else 'GPUs'}: planning anew"
        )
        return self._plan_for(part_of_cluster(self._plan.cluster, self._named, left))

    def _collect_reports(self) -> list[HostReport | UnreachableHost]:
        """Reports once all hosts give one, or one host where that is enough; what there is after `RETURN_SECONDS`."""
        enough, is_noticed = all if self._plan_for is None else any, False
        end = time.monotonic() + RETURN_SECONDS
        while True:
            reports = ssh.collect_reports(
                self._named, self._access, self._out, self._kind, probe=self._plan_for is not None
            )
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
    named: Sequence[HostfileEntry], reports: Sequence[HostReport | UnreachableHost], access: Access, kind: DeviceKind
) -> tuple[list[ReadyHost], list[str]]:
    """The hosts to go on with, each with its GPUs that work, and a line for each host or GPU that is left out."""
    left, lost = [], []
    for host, report in zip(named, reports, strict=True):
        gpus = tuple(range(host.slots))
        if isinstance(report, HostReport) and report.working_gpus is not None:
            gpus = tuple(number for number in gpus if number in report.working_gpus)
        # What a report lacks in GPUs counts only where all of them are used.
        problems = ssh.problems([host], [report], access, kind if len(gpus) == host.slots else "cpu")
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
    """The nodes and devices that are left of a cluster whose nodes are `named`."""
    nodes_by_name = {host.name: node for host, node in zip(named, cluster.nodes, strict=True)}
    nodes = []
    for ready in left:
        node = nodes_by_name[ready.host.name]
        nodes.append(replace(node, devices=tuple(node.devices[number] for number in ready.gpus)))
    return replace(cluster, nodes=tuple(nodes))


def _gpus_by_host(hosts: Sequence[ReadyHost]) -> dict[str, tuple[int, ...]]:
    return {ready.host.name: ready.gpus for ready in hosts}
