"""Starts DeepSpeed's launcher on this node, and ends with it.

The launcher and its ranks run in a session of their own, so that Ctrl-C reaches them through us: the ranks are
interrupted and end with 130, and the launchers above them pass that on without a traceback.

`frugal train --max-restarts`: starts a run again when it ended for something that may not happen again.

Launchers do not always pass on how a rank ended, so a run is judged by what its ranks reported (`training.failure`)
before the exit code counts. Not started again: what is done or was told to stop, what ended with a message for the
user, and what ended at the same step in the same way as the time before.
"""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import click
import msgspec
import psutil  # type: ignore[import-untyped]  # has no types

from frugal.config.cluster import DeviceKind
from frugal.config.run import METRICS, Settings
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed import first_failure
from frugal.distributed.process_group import STARTER, free_port
from frugal.distributed.signals import STOP_SIGNALS, handled
from frugal.errors import INTERRUPTED, PlanMismatchError, RequestError
from frugal.launch.host_report import working_gpus
from frugal.planning.plan import Plan
from frugal.training.checkpoint.manifest import newest_checkpoint


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
    saved = newest_checkpoint(asked.checkpoints)
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

    with handled((*STOP_SIGNALS, signal.SIGHUP), tell):
        yield


def visible_gpus() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    found = [str(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else visible.split(",")[: len(found)]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


FOR_THE_USER = (2, 3, 4, 5, 6, 7, INTERRUPTED)  # exit codes of `frugal.errors`: these would come again

Start = Callable[[Plan, Settings], tuple[int, "first_failure.FailureReport | None"]]
"""Starts a run and waits: 0 if it came to its end, otherwise an exit code and what the rank said that failed first."""


@dataclass(frozen=True)
class End:
    """How a run ended: after `step`, with `checkpoint` as its newest, for the reason `why`, in words.

    `is_final`: whether it would be no use to start it again.
    """

    code: int
    why: str
    is_final: bool
    step: int
    checkpoint: str | None


def supervise(
    start: Start, plan: Plan, asked: Settings, max_restarts: int, plan_for_rest: Callable[[Plan], Plan]
) -> int:
    """Run a plan until it is done, starting it again at most `max_restarts` times; the last exit code.

    `plan_for_rest` gives the plan to go on with, for the devices that are left.
    """
    before: End | None = None
    for restart in range(max_restarts + 1):
        end = ended(*start(plan, asked), asked)
        if end.is_final:
            return end.code
        if before is not None and (end.why, end.step, end.checkpoint) == (before.why, before.step, before.checkpoint):
            click.echo(f"error: {end.why} again, after step {end.step} as before: not started again", err=True)
            return end.code
        if restart == max_restarts:
            hint = f"\n\nhint: continue from {end.checkpoint} with --resume" if end.checkpoint else ""
            click.echo(f"error: {end.why}, and all {max_restarts} restarts are used up{hint}", err=True)
            return end.code
        where = f"going on from {end.checkpoint}" if end.checkpoint else "starting anew, as there is no checkpoint"
        click.echo(f"restart {restart + 1} of {max_restarts}: {end.why} after step {end.step}; {where}", err=True)
        asked = replace(asked, resume=end.checkpoint is not None)
        plan, failed = plan_for_rest(plan), plan
        before = end if plan.digest == failed.digest else None  # the same again on other devices is another failure
    raise AssertionError("the loop returns")


def on_this_machine(master_port: int | None) -> Start:
    """Starts ranks here; a run that is told to be over by an exit code, and not by its ranks, is not."""

    def run(plan: Plan, asked: Settings) -> tuple[int, first_failure.FailureReport | None]:
        with TemporaryDirectory(prefix="frugal-") as folder:
            written, _ = write_plan(plan, Path(folder))
            os.environ[first_failure.REPORT_FOLDER] = folder
            try:
                code = start(plan, "frugal.training.run", ["--plan", str(written), *asked.arguments()], master_port)
            finally:
                del os.environ[first_failure.REPORT_FOLDER]
            is_done = first_failure.is_done(Path(folder))
            return (0 if is_done else code or 1), first_failure.read_report(Path(folder))

    return run


def ended(code: int, report: "first_failure.FailureReport | None", asked: Settings) -> End:
    """What an exit code and the report of the rank that failed first amount to."""
    saved = newest_checkpoint(asked.checkpoints)
    step, checkpoint = _last_step(asked.out / METRICS), None if saved is None else saved.name
    if code == 0:
        return End(0, "", True, step, checkpoint)
    if report is not None and report.code in FOR_THE_USER:
        return End(report.code, "", True, step, checkpoint)
    if number := ended_by(code):
        return End(128 + number, f"a rank was ended by {number.name}", False, step, checkpoint)
    if report is not None:
        return End(report.code, _why(report), False, step, checkpoint)
    if code in FOR_THE_USER:  # refused before there was a rank
        return End(code, "", True, step, checkpoint)
    return End(code, "the run ended without a word from its ranks", False, step, checkpoint)


def _why(report: "first_failure.FailureReport") -> str:
    """A message for people is about a rank that is gone; of a traceback the exception, above its last line."""
    lines = report.text.splitlines()
    if lines[0].startswith("error: "):
        return lines[0].removeprefix("error: ")
    return f"rank {report.rank} failed ({lines[max(0, len(lines) - 2)]})"


def _last_step(metrics: Path) -> int:
    """The last step that was logged; 0 if none was."""
    step = 0
    if metrics.exists():
        for line in metrics.read_bytes().splitlines():
            try:
                step = max(step, int(msgspec.json.decode(line)["step"]))
            except (msgspec.DecodeError, KeyError):  # half a line, of a run that was killed
                continue
    return step


def devices_left(plan: Plan) -> int:
    """How many of a plan's devices on this machine still work; those that do not are hidden from what is started."""
    if plan.cluster.devices[0].kind == "cpu":
        return plan.batch.world_size
    left = working_gpus(visible_gpus())
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(left)
    return min(len(left), plan.batch.world_size)
