"""Runs on this machine, and what is common to a run on one host and on many: its folder, environment and report."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from frugal import temporary
from frugal.checkpoint.run_folder import START, make_folder
from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.cluster import Cluster, DeviceKind
from frugal.config.run_settings import RunSettings
from frugal.deepspeed_adapter import collectives
from frugal.deepspeed_adapter.json_config import write_plan
from frugal.distributed import env, first_failure
from frugal.distributed.connections import secret
from frugal.distributed.process_group import hold_port
from frugal.errors import PlanMismatchError, refuse
from frugal.launch import node
from frugal.launch.host_report import working_gpus
from frugal.planning.plan import Plan
from frugal.units import plural

RANK_MODULE = "frugal.engine.run"
"""The module that every rank runs, under every launcher."""


def check_machine(cluster: Cluster, master_port: int | None) -> None:
    """Refuse a plan for `cluster` that could not start here.

    Raises:
        PlanMismatchError: the plan is for other machines than this one.
        RequestError: the port is taken, or too few files may be open.
    """
    if len(cluster.nodes) > 1:
        raise PlanMismatchError(
            f"the plan is for {len(cluster.nodes)} nodes, and nothing names them",
            hint="name them with --hostfile HOSTS, a line `NAME slots=GPUS` for each; or start the ranks yourself: "
            "--print slurm, or torchrun, openmpi, no-ssh",
        )
    if cluster.devices[0].kind == "cuda":
        num_gpus = len(visible_gpus())
        if num_gpus < cluster.world_size:
            raise PlanMismatchError(
                f"the plan is for {plural(cluster.world_size, 'GPU')}, there are {num_gpus} here",
                hint="plan for what is here: frugal plan --gpus N, or --device cpu --gpus N --mem 2G for CPU processes",
            )
    env.raise_descriptors(cluster.world_size)
    if master_port is not None:
        hold_port("", master_port).close()


def run_reported(
    plan: Plan, settings: RunSettings, start_ranks: Callable[[list[str], dict[str, str]], int]
) -> tuple[int, first_failure.FailureReport | None]:
    """Start a run's ranks and wait; return 0 if it came to its end, otherwise an exit code and the first failure.

    `start_ranks` gets the arguments of every rank and the variables that are added to its environment. An exit code of
    0 does not end a run whose ranks did not report that it is done.
    """
    make_folder(settings, settings.out)
    # In the run's folder, which all hosts see; the system's folder for temporary files is cleaned after some days.
    with temporary.folder(settings.out, START) as folder:
        written, _ = write_plan(plan, folder)
        variables = {first_failure.REPORT_FOLDER: str(folder.absolute())}
        code = start_ranks(["--plan", str(written), *settings.arguments()], variables)
        if first_failure.is_done(folder, code):
            return 0, None
        return code or 1, first_failure.read_report(folder)


def run(
    plan: Plan, settings: RunSettings, *, master_port: int | None = None
) -> tuple[int, first_failure.FailureReport | None]:
    """Train on this machine; see `run_reported`."""
    return run_reported(plan, settings, partial(start, plan, RANK_MODULE, master_port=master_port))


def start(
    plan: Plan, module: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None, *,
    master_port: int | None = None, to_stderr: bool = False,
) -> int:  # fmt: skip
    """Run `module` on the plan's ranks; see `start_ranks`."""
    allocator = cuda_allocator.settings(plan.cluster, os.environ, plan.strategy.expandable_segments)
    kind, num_ranks = plan.cluster.devices[0].kind, plan.batch.world_size
    return start_ranks(
        kind, num_ranks, module, arguments, master_port, variables={**(variables or {}), **allocator},
        to_stderr=to_stderr,
    )  # fmt: skip


def start_ranks(
    kind: DeviceKind, num_ranks: int, module: str, arguments: Sequence[str], master_port: int | None = None, *,
    variables: Mapping[str, str] | None = None, to_stderr: bool = False,
) -> int:  # fmt: skip
    """Run `module` on ranks of this machine; return the exit code of the first that failed, or 0.

    `variables` are added to their environment. With `to_stderr` they print to this process's standard error.
    """
    environment = rank_environment(kind, num_ranks, {**(variables or {}), secret.SECRET: secret.make()})
    devices: list[int | str] = [*range(num_ranks)] if kind == "cpu" else [*visible_gpus()[:num_ranks]]
    launch = node.Launch(
        devices=[devices], port=master_port or 0, module=module, arguments=[*arguments], environment=environment
    )
    return node.run(launch, to_stderr=to_stderr)


def rank_environment(kind: DeviceKind, num_ranks: int, variables: Mapping[str, str]) -> dict[str, str]:
    """Return this environment for the `num_ranks` ranks of a machine, with `variables` added."""
    environment = {**os.environ, **variables, **(collectives.ON_CPU if kind == "cpu" else {})}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    return environment


def visible_gpus() -> list[str]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    numbers = [str(number) for number in range(torch.cuda.device_count())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return numbers if visible is None else visible.split(",")[: len(numbers)]


def working_devices(plan: Plan) -> list[int]:
    """Return the numbers of a plan's devices on this machine that still work; hide the others from later starts.

    Raises:
        RequestError: none does.
    """
    if plan.cluster.devices[0].kind == "cpu":
        return [*range(plan.batch.world_size)]
    gpus = visible_gpus()[: plan.batch.world_size]
    working = working_gpus(gpus)
    refuse((not working, "no GPU of this machine works any more", "", "continue with --resume later"))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(working)
    return [number for number, gpu in enumerate(gpus) if gpu in working]
