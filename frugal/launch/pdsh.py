"""Ranks on several hosts: those of each are started through pdsh, watched, signalled and ended.

This is what `deepspeed --hostfile` does, with what a run needs besides: arguments that the shells on the way leave
alone, no prompts, signals that reach the ranks, and a run that is judged by what its ranks reported, not by exit codes.

A run that has failed is started again on all of its hosts, or with --elastic on those that still work.
"""

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO

import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from frugal import temporary
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.build_cluster import HostfileEntry
from frugal.config.hardware.cluster import Cluster, DeviceKind
from frugal.config.run_settings import RunSettings
from frugal.deepspeed_adapter import collectives
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed import first_failure, parent, stop
from frugal.distributed.connections import secret
from frugal.distributed.rank_logs import to_console
from frugal.errors import FrugalError, PlanMismatchError, RequestError
from frugal.launch import ssh
from frugal.launch.host_report import HostReport
from frugal.launch.node import PORT_TAKEN, LaunchedNode
from frugal.launch.restart import judge
from frugal.launch.ssh import Access, EnvironmentFiles, ReadyHost, UnreachableHost
from frugal.planning.plan import Plan
from frugal.training.checkpoint import run_folder
from frugal.training.checkpoint.run_folder import START
from frugal.units import plural

FAN_OUT = 1024  # hosts that pdsh reaches at the same time
SIGNAL_SECONDS = 30.0  # for a signal to reach all nodes
LEAVE_SECONDS = 10.0  # for the others to note in their logs what they saw, once a rank has said why it failed
_PDSH_EXIT = re.compile(rb"^pdsh@\S+: \S+: ssh exited with exit code ")  # of a node whose ranks said why themselves


def check_nodes(plan: Plan, named: Sequence[HostfileEntry]) -> None:
    """Whether the plan is for these hosts, in this order.

    Raises:
        PlanMismatchError: it is for another number of nodes, or of GPUs on one of them.
    """
    planned = [len(node.devices) for node in plan.cluster.nodes]
    available = [host.slots for host in named]
    if planned != available:
        raise PlanMismatchError(
            "the plan is for other nodes than the hostfile has",
            because=f"it is for {_nodes(planned)}, and the hostfile has {_nodes(available)}",
            hint="plan for it: leave --plan out, or frugal plan --hostfile HOSTS",
        )


def _nodes(slots: Sequence[int]) -> str:
    return f"{plural(len(slots), 'node')} with {', '.join(map(str, slots))} GPUs"


def ready_hosts(plan: Plan, named: Sequence[HostfileEntry], access: Access, folder: Path) -> list[ReadyHost]:
    """All hosts with all their slots, checked before anything is started.

    Raises:
        RequestError: a host does not answer, or lacks something; all that is wrong, on all hosts.
    """
    kind = plan.cluster.devices[0].kind
    return require_ready(named, ssh.collect_reports(named, access, folder, kind), access, kind)


def require_ready(
    named: Sequence[HostfileEntry], reports: Sequence[HostReport | UnreachableHost], access: Access, kind: DeviceKind
) -> list[ReadyHost]:
    """All hosts with all their slots. Raises as `ready_hosts`."""
    if problems := ssh.problems(named, reports, access, kind):
        raise RequestError(
            "not all hosts are ready", because=problems, hint="frugal doctor --hostfile HOSTS shows what each host has"
        )
    return [
        ReadyHost(host, report, tuple(range(host.slots)))
        for host, report in zip(named, reports, strict=True)
        if not isinstance(report, UnreachableHost)
    ]


def make_folder(settings: RunSettings) -> None:
    """Create the run's folder down to its checkpoints, so that hosts can be asked whether they see it.

    Raises:
        RequestError: it cannot be created.
    """
    run_folder.make_folder(settings, settings.checkpoints)


def launch(
    plan: Plan, named: Sequence[HostfileEntry], access: Access, settings: RunSettings, master_port: int | None
) -> int:
    """Train on all hosts; 0, or an exit code for how it ended."""
    make_folder(settings)
    code, report = run(plan, ready_hosts(plan, named, access, settings.out), access, settings, master_port)
    return judge(code, report, settings).code


def run(
    plan: Plan, hosts: Sequence[ReadyHost], access: Access, settings: RunSettings, master_port: int | None
) -> tuple[int, first_failure.FailureReport | None]:
    """Train on these hosts; 0 if the run came to its end, otherwise an exit code and the first failed rank's report.

    Prints an error where there is no report. A port that was free and is taken before ranks meet there is chosen anew,
    below those that Linux gives to connections.
    """
    port = master_port or hosts[0].report.free_port
    while True:
        code, report = _run_at(port, plan, hosts, access, settings)
        if report is None or report.code != PORT_TAKEN:
            return code, report
        if master_port is not None:
            to_console(report.text)
            return RequestError.exit_code, msgspec.structs.replace(report, code=RequestError.exit_code)
        port = random.randrange(20_000, 32_768)


def _run_at(
    port: int, plan: Plan, hosts: Sequence[ReadyHost], access: Access, settings: RunSettings
) -> tuple[int, first_failure.FailureReport | None]:
    address = ssh.rendezvous_address([host.report for host in hosts], access)
    # In the run's folder, which all nodes see; its name is that of this start in every command line on them.
    with temporary.folder(settings.out, START) as folder:
        written, _ = write_plan(plan, folder)
        arguments = ["--plan", str(written), *settings.rank_words(folder)]
        if shutil.which("pdsh") is None:
            raise RequestError(
                "there is no pdsh on this machine",
                because="it is what starts the ranks on several nodes",
                hint="install it (apt install pdsh), or start them yourself: frugal train ... --print no-ssh",
            )
        files = EnvironmentFiles()
        ranks = RemoteRanks([host.host for host in hosts], access, folder, files.removal)
        try:
            files.write([host.host for host in hosts], access, _environment(plan, access, folder))
        except BaseException:
            ranks.end()
            raise
        code = ranks.run(_node_command(hosts, address, port, files, arguments))
        if first_failure.is_done(folder, code):
            return 0, None
        report = first_failure.read_report(folder)
    if report is None:
        error = FrugalError(
            "the run ended without a message from its ranks",
            because=ranks.pdsh_messages or f"pdsh ended with {code}",
            hint=f"see {settings.out}/logs",
        )
        to_console(f"error: {error}")
    return code or 1, report


def _environment(plan: Plan, access: Access, folder: Path) -> dict[str, str]:
    """What every node's processes get, which other users are not to see."""
    environment = access.environment() | {
        first_failure.REPORT_FOLDER: str(folder.absolute()),
        parent.OVER_SSH: "1",
        secret.SECRET: secret.make(),
    }
    environment |= cuda_allocator.settings(plan.cluster, environment, plan.strategy.expandable_segments)
    return environment | (collectives.ON_CPU if plan.cluster.devices[0].kind == "cpu" else {})


def _node_command(
    hosts: Sequence[ReadyHost], address: str, port: int, files: EnvironmentFiles, arguments: Sequence[str]
) -> str:
    """What every node's shell runs; pdsh puts the node's number in for `%n`."""
    node = LaunchedNode(devices=[host.gpus for host in hosts], address=address, port=port)
    words = node.command("frugal.training.run", arguments, number="NUMBER")
    line = escape(files.command(words, "NUMBER"))
    return line.replace("--node_rank=NUMBER", "--node_rank=%n", 1).replace(files.path("NUMBER"), files.path("%n"))


class RemoteRanks:
    """The processes of one start of a run on all hosts. All their command lines contain the name of `folder`.

    `removal`: a command for each host that removes what is left of the start there.
    """

    def __init__(self, named: Sequence[HostfileEntry], access: Access, folder: Path, removal: str) -> None:
        self._hosts, self._folder, self._removal = named, folder, removal
        self.pdsh_messages: list[str] = []  # of nodes that did not end well
        self._environment = _pdsh_environment(access)

    def run(self, line: str) -> int:
        """Run the line on all hosts and wait; pdsh's exit code. Nothing is left running on a host that answers.

        Raises:
            KeyboardInterrupt: a second Ctrl-C, or one before there were ranks.
        """
        process = subprocess.Popen(
            pdsh_command(self._hosts, line), env=self._environment, stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True, preexec_fn=_leave_signals_to_parent,
        )  # fmt: skip
        assert process.stderr is not None
        relay = threading.Thread(target=self._relay_stderr, args=(process.stderr,), daemon=True)
        relay.start()
        code = 1
        try:
            with self._forwarded_signals():
                try:
                    code = self._wait(process)
                except KeyboardInterrupt:
                    if not self._signal("INT"):
                        raise
                    code = self._wait(process)
        finally:
            if code:
                self.end()
            _kill(process)
            relay.join(timeout=SIGNAL_SECONDS)
        return code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        """pdsh's exit code. It waits for all nodes; we do no longer, once a rank has said why it failed."""
        end = None
        while True:
            try:
                return process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                if end is None and first_failure.read_report(self._folder) is not None:
                    end = time.monotonic() + LEAVE_SECONDS
                if end is not None and time.monotonic() > end:
                    return 1

    def end(self) -> None:
        """End everything, launchers and ranks that wait for the one that failed, and remove what is left."""
        self._signal("KILL", of="", then=f"; {self._removal}")

    def _signal(self, name: str, of: str = "[l]ocal_rank=.*", then: str = "") -> bool:
        """Send a signal to the ranks on all hosts, or to all processes of this start; whether there were any anywhere.

        The brackets keep the pattern from matching the shell that holds it.
        """
        key = self._folder.name
        pattern = f"{of}{key[:-1]}[{key[-1]}]"
        command = pdsh_command(self._hosts, f"pkill -{name} -f -- {shlex.quote(pattern)}{then}")
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=SIGNAL_SECONDS
            )
        except subprocess.TimeoutExpired:
            return True
        return done.stderr.count(b"exited with exit code 1\n") < len(self._hosts)  # pkill's, where no process matches

    def _relay_stderr(self, stream: IO[bytes]) -> None:
        """To our standard error, without what pdsh says of its own: which ssh ended with which code."""
        for line in stream:
            if _PDSH_EXIT.match(line):
                self.pdsh_messages.append(line.decode(errors="replace").strip())
            else:
                with suppress(OSError):  # nobody reads it any more; pdsh must not wait for us
                    sys.stderr.buffer.write(line)
                    sys.stderr.flush()

    @contextmanager
    def _forwarded_signals(self) -> Iterator[None]:
        """Signals to stop go to the ranks, which save and end, and by a second one end at once."""
        received = stop.Received()

        def forward(number: int, _frame: FrameType | None) -> None:
            stop.note(number)
            if received.add(number) and not self._signal(signal.Signals(number).name.removeprefix("SIG")):
                raise KeyboardInterrupt

        with stop.handled(stop.SIGNALS, forward):
            yield


def pdsh_command(hosts: Sequence[HostfileEntry], command: str) -> list[str]:
    """The words that run a shell's line on all hosts at once, without names before what they print.

    In `command`, `%n` is the number of the host in `hosts`; see `escape`.
    """
    names = ",".join(_name_for_pdsh(host.name) for host in hosts)
    return ["pdsh", "-R", "ssh", "-S", "-N", "-f", str(FAN_OUT), "-w", names, command]


def _name_for_pdsh(name: str) -> str:
    """Return a host's name as pdsh takes it: of `2001:db8::1` it takes `2001` for how to reach `db8::1`."""
    if ":" not in name:
        return name
    user, at, address = name.rpartition("@")
    return f"ssh:{user}{at}{'0' if address.startswith(':') else ''}{address}"


def escape(command: str) -> str:
    """A line in which pdsh replaces nothing."""
    return command.replace("%", "%%")


def _pdsh_environment(access: Access) -> dict[str, str]:
    """What pdsh reads: its ssh asks no questions either."""
    options = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {' '.join(access.options())}".strip()
    return {**os.environ, "PDSH_RCMD_TYPE": "ssh", "PDSH_SSH_ARGS_APPEND": options}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End pdsh and its ssh, which would wait for a host that does not answer."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
    process.kill()
    process.wait()


def _leave_signals_to_parent() -> None:
    """Have pdsh and its ssh end with the command, and not by signals to stop, which it passes on to the ranks."""
    parent.set_death_signal(signal.SIGKILL)
    stop.ignore()


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
        make_folder(settings)
        self._ready = ready_hosts(plan, named, access, settings.out)

    def start(self, plan: Plan, settings: RunSettings) -> tuple[int, first_failure.FailureReport | None]:
        """Train on the hosts that were ready when last checked."""
        return run(plan, self._ready, self._access, settings, self._port)

    def plan_for_restart(self, before: Plan) -> Plan:
        """Check the hosts again; the plan for those that are ready, which is `before` where they are the same.

        Raises:
            RequestError: some host, or with `plan_for` every host, does not answer for minutes, or lacks something.
            NothingFitsError: the run does not fit on what is left.
        """
        reports = self._collect_reports()
        if self._plan_for is None:
            self._ready = require_ready(self._named, reports, self._access, self._kind)
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
