"""The hosts that a run on several goes on with when it is started again: all of them, or with --elastic those left."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import click

from frugal.config.cluster import Cluster, DeviceKind
from frugal.config.hostfile import HostfileEntry
from frugal.config.run import Settings
from frugal.distributed import first_failure
from frugal.errors import RequestError
from frugal.launch import pdsh, ssh
from frugal.launch.host_report import HostReport
from frugal.launch.ssh import Access, Place, Silent
from frugal.planning.plan import Plan

RETURN_SECONDS = 300.0
"""Until hosts that do not answer are given up: booting takes minutes, a switch that lost its way half of one."""

AGAIN_SECONDS = 5.0  # between two questions


class Remaining:
    """Starts a run on the hosts of a hostfile, and again on those that answer.

    `plan` is the one for all of them. `plan_for` plans anew for some; without it, all are waited for.
    """

    def __init__(
        self, plan: Plan, named: Sequence[HostfileEntry], access: Access, asked: Settings, master_port: int | None,
        plan_for: Callable[[Cluster], Plan] | None,
    ) -> None:  # fmt: skip
        self._plan, self._named, self._access, self._port = plan, named, access, master_port
        self._out, self._plan_for = asked.out, plan_for
        self._kind: DeviceKind = plan.cluster.devices[0].kind
        pdsh.make_folder(asked)
        self._on = pdsh.ready(plan, named, access, asked.out)

    def start(self, plan: Plan, asked: Settings) -> tuple[int, first_failure.FailureReport | None]:
        """Train on the hosts that were ready when last asked."""
        return pdsh.run(plan, self._on, self._access, asked, self._port)

    def rest(self, before: Plan) -> Plan:
        """See which hosts there are now, and the plan for them: `before` where nothing changed. Says what did.

        Raises:
            RequestError: some host, or with `plan_for` every host, does not answer for minutes, or lacks something.
            NothingFitsError: the run does not fit on what is left.
        """
        reports = self._answers()
        if self._plan_for is None:
            self._on = pdsh.places(self._named, reports, self._access, self._kind)
            return before
        left, lost = choose(self._named, reports, self._access, self._kind)
        if not left:
            raise RequestError("no host is left to go on with", because=lost, hint="continue with --resume later")
        for text in lost:
            click.echo(text, err=True)
        were, self._on = self._on, left
        if _used(left) == _used(were):
            return before
        if not lost:
            click.echo(f"all {len(left)} hosts are there again: going on as planned at first", err=True)
            return self._plan
        number, total = sum(len(place.gpus) for place in left), self._plan.batch.world_size
        click.echo(
            f"{len(left)} of {len(self._named)} hosts are left, with {number} of {total} "
            f"{'ranks' if self._kind == 'cpu' else 'GPUs'}: planning anew",
            err=True,
        )
        return self._plan_for(part(self._plan.cluster, self._named, left))

    def _answers(self) -> list[HostReport | Silent]:
        """What hosts answer, once all do, or one where that is enough; after `RETURN_SECONDS` whatever they do."""
        enough, is_said = all if self._plan_for is None else any, False
        end = time.monotonic() + RETURN_SECONDS
        while True:
            reports = ssh.ask(self._named, self._access, self._out, self._kind, probe=self._plan_for is not None)
            if enough(isinstance(report, HostReport) for report in reports) or time.monotonic() > end:
                return reports
            if not is_said:
                silent = [
                    f"{host.name}, which {report.why}"
                    for host, report in zip(self._named, reports, strict=True)
                    if isinstance(report, Silent)
                ]
                click.echo(f"waiting {RETURN_SECONDS / 60:.0f} minutes for {'; '.join(silent)}", err=True)
                is_said = True
            time.sleep(AGAIN_SECONDS)


def choose(
    named: Sequence[HostfileEntry], reports: Sequence[HostReport | Silent], access: Access, kind: DeviceKind
) -> tuple[list[Place], list[str]]:
    """The hosts to go on with and the GPUs of each, and what is left out, a line each."""
    left, lost = [], []
    for host, report in zip(named, reports, strict=True):
        gpus = tuple(range(host.slots))
        if isinstance(report, HostReport) and report.working_gpus is not None:
            gpus = tuple(number for number in gpus if number in report.working_gpus)
        # What is said of its GPUs is of all of them: it is not asked for where only some are used.
        wrong = ssh.problems([host], [report], access, kind if len(gpus) == host.slots else "cpu")
        if isinstance(report, Silent) or wrong:
            lost.append(f"left out: {'; '.join(wrong)}")
        elif not gpus:
            lost.append(f"left out: {host.name} has no GPU that works")
        else:
            left.append(Place(host, report, gpus))
            if len(gpus) < host.slots:
                lost.append(f"left out: {host.slots - len(gpus)} of {host.slots} GPUs of {host.name}: they do not work")
    return left, lost


def part(cluster: Cluster, named: Sequence[HostfileEntry], left: Sequence[Place]) -> Cluster:
    """Of a cluster whose nodes are `named` the devices that are left."""
    nodes_by_name = {host.name: node for host, node in zip(named, cluster.nodes, strict=True)}
    kept = []
    for place in left:
        node = nodes_by_name[place.host.name]
        kept.append(replace(node, devices=tuple(node.devices[number] for number in place.gpus)))
    return replace(cluster, nodes=tuple(kept))


def _used(places: Sequence[Place]) -> list[tuple[str, tuple[int, ...]]]:
    return [(place.host.name, place.gpus) for place in places]
