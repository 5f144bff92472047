"""Ranks on this machine: DeepSpeed's launcher is started, signalled and ended.

The launcher and its ranks run in a session of their own, so that Ctrl-C reaches them through us: the ranks are
interrupted and end with 130, and the launchers above them pass that on without a traceback.
"""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import psutil  # type: ignore[import-untyped]  # has no types

from frugal.config.cluster import DeviceKind
from frugal.config.run_settings import RunSettings
from frugal.deepspeed_adapter import collectives
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed import first_failure
from frugal.distributed.connections import secret
from frugal.distributed.env import STOP_SIGNALS, handled
from frugal.distributed.process_group import STARTER, free_port
from frugal.distributed.rank_logs import to_console
from frugal.errors import PlanMismatchError, RequestError
from frugal.launch.host_report import working_gpus
from frugal.launch.restart import Start, signal_of
from frugal.planning.plan import Plan
from frugal.training.checkpoint.manifest import newest_checkpoint


def check_machine(plan: Plan, master_port: int | None) -> None:
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
        num_gpus = len(visible_gpus())
        if num_gpus < plan.batch.world_size:
            raise PlanMismatchError(
                f"the plan is for {plan.batch.world_size} GPUs, there are {num_gpus} here",
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


def launch(plan: Plan, plan_path: Path, settings: RunSettings, master_port: int | None) -> int:
    """Train on the plan's ranks; the exit code of the first that failed, or 0. Says so if one was killed."""
    words = ["--plan", str(plan_path), *settings.rank_words(plan_path.parent)]
    code = start(plan, "frugal.training.run", words, master_port)
    number = signal_of(code)
    if number is None:
        return code
    saved = newest_checkpoint(settings.checkpoints)
    hint = f"\n\nhint: continue from {saved.name} with --resume" if saved is not None else ""
    to_console(f"error: a rank was ended by {number.name}{hint}")
    return 128 + number


def starter(master_port: int | None) -> Start:
    """Starts runs on this machine. An exit code of 0 does not end a run whose ranks did not report that it is done."""

    def run(plan: Plan, settings: RunSettings) -> tuple[int, first_failure.FailureReport | None]:
        with TemporaryDirectory(prefix="frugal-") as folder:
            written, _ = write_plan(plan, Path(folder))
            words = ["--plan", str(written), *settings.rank_words(Path(folder))]
            os.environ[first_failure.REPORT_FOLDER] = folder
            try:
                code = start(plan, "frugal.training.run", words, master_port)
            finally:
                del os.environ[first_failure.REPORT_FOLDER]
            is_done = first_failure.is_done(Path(folder))
            return (0 if is_done else code or 1), first_failure.read_report(Path(folder))

    return run


def start(
    plan: Plan, module: str, arguments: Sequence[str], master_port: int | None = None, *, to_stderr: bool = False
) -> int:
    """Run `module` on the plan's ranks; see `start_ranks`."""
    return start_ranks(
        plan.cluster.devices[0].kind, plan.batch.world_size, module, arguments, master_port, to_stderr=to_stderr
    )


def start_ranks(
    kind: DeviceKind,
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    master_port: int | None = None,
    *,
    to_stderr: bool = False,
) -> int:
    """Run `module` on ranks of this node under DeepSpeed's launcher; the exit code of the first that failed, or 0.

    `to_stderr`: what they print goes to this process's standard error, not its standard output.
    """
    environment = {**os.environ, STARTER: str(os.getpid()), secret.SECRET: secret.make()}
    if kind == "cpu":
        environment |= {**collectives.ON_CPU, "LOCAL_SIZE": str(num_ranks)}  # the latter spares it asking numactl
    devices = list(range(num_ranks)) if kind == "cpu" else visible_gpus()[:num_ranks]
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // num_ranks)))
    command = collectives.launcher(
        {"localhost": devices}, master_port=master_port or free_port(), module=module, arguments=arguments
    )
    early_interrupts: list[int] = []  # while there is no process yet that could be ended
    before = signal.signal(signal.SIGINT, lambda number, _frame: early_interrupts.append(number))
    with (
        subprocess.Popen(command, env=environment, start_new_session=True, stdout=2 if to_stderr else None) as process,
        _forwarded_signals(process),
    ):
        signal.signal(signal.SIGINT, before)
        while True:
            try:
                if early_interrupts:
                    early_interrupts.clear()
                    raise KeyboardInterrupt
                return process.wait()
            except KeyboardInterrupt:
                if not _interrupt_ranks(process):
                    process.wait()
                    with suppress(ProcessLookupError):  # a rank that was just being started
                        os.killpg(process.pid, signal.SIGKILL)
                    raise


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
    return [child for child in tree if collectives.RANK_FLAG in " ".join(_command_line(child))]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@contextmanager
def _forwarded_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """SIGTERM and SIGUSR1 to us go to the ranks, which save and end; SIGHUP ends the session, a second signal kills it.

    Not to DeepSpeed's launcher, which would kill its ranks half a minute later and call that a failure.
    """
    received: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        ranks = _ranks(process)
        if received:
            os.killpg(process.pid, signal.SIGKILL)
        elif not ranks or number == signal.SIGHUP:
            os.killpg(process.pid, signal.SIGTERM)
        else:
            for rank in ranks:
                rank.send_signal(number)
        received.append(number)

    with handled((*STOP_SIGNALS, signal.SIGHUP), forward):
        yield


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    numbers = [str(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return numbers if visible is None else visible.split(",")[: len(numbers)]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def num_working_devices(plan: Plan) -> int:
    """How many of a plan's devices on this machine still work; those that do not are hidden from later starts."""
    if plan.cluster.devices[0].kind == "cpu":
        return plan.batch.world_size
    working = working_gpus(visible_gpus())
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(working)
    return min(len(working), plan.batch.world_size)
