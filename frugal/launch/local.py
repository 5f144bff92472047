"""Runs on this machine: what could not start is refused, and a run is judged by how its ranks ended."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from frugal import temporary
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.cluster import DeviceKind
from frugal.config.run_settings import RunSettings
from frugal.deepspeed_adapter import collectives
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed import first_failure
from frugal.distributed.connections import secret
from frugal.distributed.process_group import check_descriptors, hold_port
from frugal.distributed.rank_logs import to_console
from frugal.errors import PlanMismatchError
from frugal.launch import node
from frugal.launch.host_report import working_gpus
from frugal.launch.node import LaunchedNode
from frugal.launch.restart import Start, name_signal, signal_of
from frugal.planning.plan import Plan
from frugal.training.checkpoint.manifest import newest_checkpoint
from frugal.training.checkpoint.run_folder import START, make_folder


def check_machine(plan: Plan, master_port: int | None) -> None:
    """Refuse what could not start here.

    Raises:
        PlanMismatchError: the plan is for other machines than this one.
        RequestError: the port is taken, or too few files may be open.
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
    check_descriptors(plan.batch.world_size)
    if master_port is not None:
        hold_port("", master_port).close()


def launch(plan: Plan, plan_path: Path, settings: RunSettings, master_port: int | None) -> int:
    """Train on the plan's ranks; the exit code of the first that failed, or 0. Says so if one was killed."""
    words = ["--plan", str(plan_path), *settings.rank_words(plan_path.parent)]
    code = start(plan, "frugal.training.run", words, master_port)
    number = signal_of(code)
    if number is None or code > 0:  # otherwise the rank has said why it ended
        return code
    saved = newest_checkpoint(settings.checkpoints)
    hint = f"\n\nhint: continue from {saved.name} with --resume" if saved is not None else ""
    to_console(f"error: a rank was ended by {name_signal(number)}{hint}")
    return 128 + number


def starter(master_port: int | None) -> Start:
    """Starts runs on this machine. An exit code of 0 does not end a run whose ranks did not report that it is done."""

    def run(plan: Plan, settings: RunSettings) -> tuple[int, first_failure.FailureReport | None]:
        make_folder(settings, settings.out)
        # In the run's folder: the system's one for temporary files is emptied of what is some days old.
        with temporary.folder(settings.out, START) as folder:
            written, _ = write_plan(plan, folder)
            words = ["--plan", str(written), *settings.rank_words(folder)]
            os.environ[first_failure.REPORT_FOLDER] = str(folder)
            try:
                code = start(plan, "frugal.training.run", words, master_port)
            finally:
                del os.environ[first_failure.REPORT_FOLDER]
            is_done = first_failure.is_done(folder, code)
            return (0 if is_done else code or 1), first_failure.read_report(folder)

    return run


def start(
    plan: Plan, module: str, arguments: Sequence[str], master_port: int | None = None, *, to_stderr: bool = False
) -> int:
    """Run `module` on the plan's ranks; see `start_ranks`."""
    variables = cuda_allocator.settings(plan.cluster, os.environ, plan.strategy.expandable_segments)
    kind, num_ranks = plan.cluster.devices[0].kind, plan.batch.world_size
    return start_ranks(kind, num_ranks, module, arguments, master_port, variables=variables, to_stderr=to_stderr)


def start_ranks(
    kind: DeviceKind,
    num_ranks: int,
    module: str,
    arguments: Sequence[str],
    master_port: int | None = None,
    *,
    variables: Mapping[str, str] | None = None,
    to_stderr: bool = False,
) -> int:
    """Run `module` on ranks of this machine; the exit code of the first that failed, or 0.

    `variables` are added to their environment. `to_stderr`: what they print goes to this process's standard error, not
    its standard output.
    """
    environment = {**os.environ, **(variables or {}), secret.SECRET: secret.make()}
    if kind == "cpu":
        environment |= collectives.ON_CPU
    devices = list(range(num_ranks)) if kind == "cpu" else visible_gpus()[:num_ranks]
    environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // num_ranks)))
    return node.run(
        LaunchedNode(devices=[devices], port=master_port or 0),
        module,
        arguments,
        environment,
        to_stderr=to_stderr,
    )


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
