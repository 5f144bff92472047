"""Starts DeepSpeed's launcher on this node, and ends with it.

The launcher and its ranks run in a session of their own, so that Ctrl-C reaches them through us: the ranks are
interrupted and end with 130, and the launchers above them pass that on without a traceback.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.cards import DeviceKind
from frugal.planning.plan import Plan
from frugal.training.group import STARTER, free_port
from frugal.training.manifest import newest
from frugal.training.settings import Settings
from frugal.training.stopping import SIGNALS, handled

INTERRUPTED = 130


def check(plan: Plan, master_port: int | None) -> None:
    """Refuse what could not start here.

    Raises:
        PlanMismatchError: the plan is for other machines than this one.
        RequestError: the port is taken.
    """
    if len(plan.cluster.nodes) > 1:
        raise PlanMismatchError(
            f"the plan is for {len(plan.cluster.nodes)} nodes, and nothing names them",
            hint="name them with --hostfile HOSTS, a line `NAME slots=GPUS` for each; or start the ranks yourself: "
            "--print slurm, or torchrun, openmpi, no-ssh",
        )
    if plan.cluster.devices[0].kind == "cuda":
        found = len(visible_gpus())
        if found < plan.batch.world_size:
            raise PlanMismatchError(
                f"the plan is for {plan.batch.world_size} GPUs, there are {found} here",
                hint="plan for what is here: frugal plan --gpus N, or frugal train --ranks N for CPU processes",
            )
    if master_port is not None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("", master_port))
            except OSError as error:
                raise RequestError(
                    f"port {master_port} cannot be used", because=str(error.strerror), hint="leave --master-port out"
                ) from None


def launch(plan: Plan, plan_path: Path, asked: Settings, master_port: int | None) -> int:
    """Train on the plan's ranks; the exit code of the first that failed, or 0. Says so if one was killed."""
    code = start(plan, "frugal.training.run", ["--plan", str(plan_path), *asked.arguments()], master_port)
    number = ended_by(code)
    if number is None:
        return code
    saved = newest(asked.checkpoints)
    hint = f"\n\nhint: continue from {saved.name} with --resume" if saved is not None else ""
    click.echo(f"error: a rank was ended by {number.name}{hint}", err=True)
    return 128 + number


def start(
    plan: Plan, module: str, arguments: Sequence[str], master_port: int | None = None, *, stdout: int | None = None
) -> int:
    """Run `module` on the plan's ranks; see `start_ranks`."""
    return start_ranks(
        plan.cluster.devices[0].kind, plan.batch.world_size, module, arguments, master_port, stdout=stdout
    )


def start_ranks(
    kind: DeviceKind,
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    master_port: int | None = None,
    *,
    stdout: int | None = None,
) -> int:
    """Run `module` on ranks of this node under DeepSpeed's launcher; the exit code of the first that failed, or 0.

    `stdout` is a file descriptor for what they print; None: this process's standard output.
    """
    environment = {**os.environ, STARTER: str(os.getpid())}
    if kind == "cpu":
        environment |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(num_ranks)}  # the latter spares it asking numactl
    devices = list(range(num_ranks)) if kind == "cpu" else visible_gpus()[:num_ranks]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // num_ranks)))
    # What `deepspeed` itself would start on one node, without the seconds it takes to import DeepSpeed once more.
    command = [
        sys.executable, "-m", "deepspeed.launcher.launch", "--log_level=critical", f"--world_info={world}",
        f"--master_port={master_port or free_port()}", "--module", module, *arguments,
    ]  # fmt: skip
    came: list[int] = []  # interrupts while there is no process yet that could be ended
    before = signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    with (
        subprocess.Popen(command, env=environment, start_new_session=True, stdout=stdout) as process,
        _forwarding(process),
    ):
        signal.signal(signal.SIGINT, before)
        while True:
            try:
                if came:
                    came.clear()
                    raise KeyboardInterrupt
                return process.wait()
            except KeyboardInterrupt:
                if not _interrupt_ranks(process):
                    process.wait()
                    with suppress(ProcessLookupError):  # a rank that was just being started
                        os.killpg(process.pid, signal.SIGKILL)
                    raise


def ended_by(code: int) -> signal.Signals | None:
    """The signal that ended a process with this exit code, as Python, the shell or `sys.exit(-n)` say it."""
    for number in (-code, 256 - code, code - 128):
        if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
            return signal.Signals(number)
    return None


def _interrupt_ranks(process: subprocess.Popen[bytes]) -> bool:
    """SIGINT to the ranks, not to the launchers between them and us; whether there are ranks that will say so."""
    ranks = _ranks(process)
    for rank in ranks:
        rank.send_signal(signal.SIGINT)
    if not ranks:  # they have not been started yet
        os.killpg(process.pid, signal.SIGTERM)
    return bool(ranks)


def _ranks(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    tree = psutil.Process(process.pid).children(recursive=True)
    return [child for child in tree if "--local_rank" in " ".join(_words(child))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM and SIGUSR1 to us go to the ranks, which save and end; SIGHUP ends the session, a second signal kills it.

    Not to DeepSpeed's launcher, which would kill its ranks half a minute later and call that a failure.
    """
    told: list[int] = []

    def tell(number: int, _frame: FrameType | None) -> None:
        ranks = _ranks(process)
        if told:
            os.killpg(process.pid, signal.SIGKILL)
        elif not ranks or number == signal.SIGHUP:
            os.killpg(process.pid, signal.SIGTERM)
        else:
            for rank in ranks:
                rank.send_signal(number)
        told.append(number)

    with handled((*SIGNALS, signal.SIGHUP), tell):
        yield


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    found = [str(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else visible.split(",")[: len(found)]


def _cores() -> int:
    return len(os.sched_getaffinity(0))
