"""Starts DeepSpeed's launcher on every node of a hostfile through pdsh, and ends with the run.

This is what `deepspeed --hostfile` does, with what a run needs besides: arguments that the shells on the way leave
alone, no prompts, signals that reach the ranks, and a run that is judged by what its ranks reported, not by exit codes.
"""

import base64
import ctypes
import json
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import IO

import click
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.config.cluster import DeviceKind
from frugal.config.hostfile import HostfileEntry
from frugal.config.run import Settings
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed import first_failure, process_group
from frugal.distributed.signals import STOP_SIGNALS, handled
from frugal.errors import FrugalError, PlanMismatchError, RequestError
from frugal.launch import local, ssh
from frugal.launch.host_report import HostReport
from frugal.launch.ssh import Access, Place, Silent
from frugal.planning.plan import Plan
from frugal.training.checkpoint import run_folder

SIGNAL_SECONDS = 30.0  # for a signal to reach all nodes
LEAVE_SECONDS = 10.0  # for the others to note in their logs what they saw, once a rank has said why it failed
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def check(plan: Plan, named: Sequence[HostfileEntry]) -> None:
    """Whether the plan is for these hosts, in this order.

    Raises:
        PlanMismatchError: it is for another number of nodes, or of GPUs on one of them.
    """
    planned = [len(node.devices) for node in plan.cluster.nodes]
    there = [host.slots for host in named]
    if planned != there:
        raise PlanMismatchError(
            "the plan is for other nodes than the hostfile has",
            because=f"it is for {_nodes(planned)}, and the hostfile has {_nodes(there)}",
            hint="plan for it: leave --plan out, or frugal plan --hostfile HOSTS",
        )


def _nodes(slots: Sequence[int]) -> str:
    return f"{len(slots)} node{'s' * (len(slots) != 1)} with {', '.join(map(str, slots))} GPUs"


def ready(plan: Plan, named: Sequence[HostfileEntry], access: Access, folder: Path) -> list[Place]:
    """All hosts with all their slots, asked before anything is started.

    Raises:
        RequestError: a host does not answer, or lacks something; all that is wrong, on all hosts.
    """
    kind = plan.cluster.devices[0].kind
    return places(named, ssh.ask(named, access, folder, kind), access, kind)


def places(
    named: Sequence[HostfileEntry], reports: Sequence[HostReport | Silent], access: Access, kind: DeviceKind
) -> list[Place]:
    """All hosts with all their slots. Raises as `ready`."""
    if found := ssh.problems(named, reports, access, kind):
        raise RequestError(
            "not all hosts are ready", because=found, hint="frugal doctor --hostfile HOSTS shows what each host has"
        )
    return [
        Place(host, report, tuple(range(host.slots)))
        for host, report in zip(named, reports, strict=True)
        if not isinstance(report, Silent)
    ]


def make_folder(asked: Settings) -> None:
    """Have the run's folder, down to where its checkpoints will be, so that hosts can be asked whether they see it.

    Raises:
        RequestError: it cannot be made.
    """
    run_folder.make_folder(asked, asked.checkpoints)


def launch(plan: Plan, named: Sequence[HostfileEntry], access: Access, asked: Settings, master_port: int | None) -> int:
    """Train on all hosts; 0, or an exit code for how it ended."""
    make_folder(asked)
    code, report = run(plan, ready(plan, named, access, asked.out), access, asked, master_port)
    return local.ended(code, report, asked).code


def run(
    plan: Plan, on: Sequence[Place], access: Access, asked: Settings, master_port: int | None
) -> tuple[int, first_failure.FailureReport | None]:
    """Train there; 0 if the run came to its end, otherwise an exit code and what the rank said that failed first.

    Says so where no rank said anything.
    """
    address = ssh.meeting_place([place.report for place in on], access)
    port = master_port or on[0].report.free_port
    # In the run's folder, which all nodes see; its name is that of this start in every command line on them.
    with TemporaryDirectory(
        prefix=".start-", suffix=secrets.token_hex(4), dir=asked.out, ignore_cleanup_errors=True
    ) as folder:
        written, _ = write_plan(plan, Path(folder))
        arguments = ["--module", "frugal.training.run", "--plan", str(written), *asked.arguments()]
        start = Start([place.host for place in on], access, Path(folder))
        code = start.run(_line(plan, on, access, address, port, Path(folder), arguments))
        if first_failure.is_done(Path(folder)):
            return 0, None
        report = first_failure.read_report(Path(folder))
    if report is None:
        silence = FrugalError(
            "the run ended without a word from its ranks",
            because=start.said or f"pdsh ended with {code}",
            hint=f"see {asked.out}/logs",
        )
        click.echo(f"error: {silence}", err=True)
    return code or 1, report


def _line(
    plan: Plan, on: Sequence[Place], access: Access, address: str, port: int, folder: Path, arguments: Sequence[str]
) -> str:
    """What every node's shell runs; pdsh puts the node's number in for `%n`."""
    environment = access.environment() | {
        first_failure.REPORT_FOLDER: str(folder.absolute()),
        process_group.OVER_SSH: "1",
    }
    if plan.cluster.devices[0].kind == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    world = {place.host.name: place.gpus for place in on}
    words = [
        sys.executable, "-u", "-m", "deepspeed.launcher.launch", "--log_level=critical",
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}", f"--master_addr={address}",
        f"--master_port={port}", "--node_rank=NUMBER", *arguments,
    ]  # fmt: skip
    return ssh.literal(ssh.remote(words, environment)).replace("--node_rank=NUMBER", "--node_rank=%n", 1)


class Start:
    """The processes of one start of a run, on all hosts. `folder` has a name that their command lines hold."""

    def __init__(self, named: Sequence[HostfileEntry], access: Access, folder: Path) -> None:
        self._hosts, self._folder = named, folder
        self.said: list[str] = []  # by pdsh, of nodes that did not end well
        self._environment = ssh.pdsh_environment(access)

    def run(self, line: str) -> int:
        """Run the line on all hosts and wait; pdsh's exit code. Nothing is left running on a host that answers.

        Raises:
            RequestError: there is no pdsh.
            KeyboardInterrupt: a second Ctrl-C, or one before there were ranks.
        """
        try:
            process = subprocess.Popen(
                ssh.pdsh(self._hosts, line), env=self._environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=_end_with_parent,
            )  # fmt: skip
        except FileNotFoundError:
            raise RequestError(
                "there is no pdsh on this machine",
                because="it is what starts the ranks on several nodes",
                hint="install it (apt install pdsh), or start them yourself: frugal train ... --print no-ssh",
            ) from None
        assert process.stderr is not None
        passing = threading.Thread(target=self._pass_on, args=(process.stderr,), daemon=True)
        passing.start()
        code = 1
        try:
            with self._forwarding():
                try:
                    code = self._wait(process)
                except KeyboardInterrupt:
                    if not self._signal("INT"):
                        raise
                    code = self._wait(process)
        finally:
            if code:
                self._signal("KILL", of="")  # of everything, launchers and ranks that wait for the one that failed
            _kill(process)
            passing.join(timeout=SIGNAL_SECONDS)
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

    def _signal(self, name: str, of: str = "[l]ocal_rank=.*") -> bool:
        """Send a signal to the ranks on all hosts, or to all processes of this start; whether there were any anywhere.

        The brackets keep the pattern from matching the shell that holds it.
        """
        key = self._folder.name
        pattern = f"{of}{key[:-1]}[{key[-1]}]"
        command = ssh.pdsh(self._hosts, f"pkill -{name} -f -- {shlex.quote(pattern)}")
        try:
            done = subprocess.run(
                command, env=self._environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=SIGNAL_SECONDS
            )
        except subprocess.TimeoutExpired:
            return True
        return done.stderr.count(b"exited with exit code 1\n") < len(self._hosts)  # pkill's, for nobody there

    def _pass_on(self, stream: IO[bytes]) -> None:
        """To our standard error, without what pdsh says of its own: which ssh ended with which code."""
        for line in stream:
            if ssh.PDSH_SAYS.match(line):
                self.said.append(line.decode(errors="replace").strip())
            else:
                click.echo(line, nl=False, err=True)

    @contextmanager
    def _forwarding(self) -> Iterator[None]:
        """SIGTERM and SIGUSR1 to us go to the ranks, which save and end; a second one, and SIGHUP, end everything."""
        told: list[int] = []

        def tell(number: int, _frame: FrameType | None) -> None:
            if told or number == signal.SIGHUP or not self._signal(signal.Signals(number).name.removeprefix("SIG")):
                raise KeyboardInterrupt
            told.append(number)

        with handled((*STOP_SIGNALS, signal.SIGHUP), tell):
            yield


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End pdsh and its ssh, which would wait for a host that is silent."""
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
    process.wait()


def _end_with_parent() -> None:
    """Have the kernel end this process when the one that started it is killed without a word."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
