"""The ranks of one of several nodes, for what starts one process on each: SLURM, Kubernetes, a loop of your own.

    srun --ntasks-per-node 1 python -m frugal.launch.one_node --plan run/plan.json --data corpus --steps 100 --out run

The scheduler says which node this is (`NUMBERS`), and MASTER_ADDR where the first one is. If the run's folder has a
checkpoint, the run is resumed: a job that is queued again begins with the same command. Signals reach the ranks as
from `frugal train`; a run that was asked to stop and has saved its step ends with 128 + the signal's number, so that
the scheduler can tell it from one that is done.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from frugal.checkpoint.manifest import newest_checkpoint
from frugal.config.hardware import cuda_allocator
from frugal.config.run_settings import RunSettings
from frugal.config.schema import parse
from frugal.config.setting import build, settings_of
from frugal.distributed import env, stop
from frugal.distributed.rank_logs import to_console
from frugal.errors import FrugalError, PlanMismatchError, refuse
from frugal.launch import local, node
from frugal.planning.plan import Plan

NUMBERS = ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
"""Environment variables for the node's number, from 0; the first that is set counts."""


def run(words: Sequence[str]) -> int:
    """Run this node's ranks with the arguments of a rank; return the exit code.

    Raises:
        RequestError: the environment does not say which node this is, or where the first one is.
        PlanMismatchError: the plan has no such node, or more GPUs on it than there are.
    """
    given = parse(words, {"plan": Path}, settings_of(RunSettings), needed=["plan"])
    plan = Plan.read(given.pop("plan"))
    settings = build(RunSettings, given)
    number, kind = _number(len(plan.cluster.nodes)), plan.cluster.devices[0].kind
    devices: list[list[int | str]] = [[*range(len(each.devices))] for each in plan.cluster.nodes]
    if kind == "cuda":
        visible, wanted = local.visible_gpus(), len(devices[number])
        if len(visible) < wanted:
            raise PlanMismatchError(
                f"the plan is for {wanted} GPUs on node {number}, there are {len(visible)}",
                hint="ask the scheduler for as many, or plan for what it gives: frugal plan --nodes N --gpus M",
            )
        devices[number] = [*visible[:wanted]]
    address = os.environ.get("MASTER_ADDR", "").strip()
    refuse(
        (
            len(devices) > 1 and not address,
            "MASTER_ADDR is not set",
            f"the plan has {len(devices)} nodes, whose ranks meet on the first",
            "export MASTER_ADDR=HOST, the first node's address, on all of them",
        )
    )
    newest = newest_checkpoint(settings.checkpoints)
    if newest is not None and not settings.resume:
        to_console(f"resuming from {newest}: the run's folder has it")
        words = [*words, "--resume"]
    allocator = cuda_allocator.settings(plan.cluster, os.environ, plan.strategy.expandable_segments)
    launch = node.Launch(
        devices=devices,
        number=number,
        address=address or env.LOOPBACK,
        port=int(os.environ.get("MASTER_PORT") or env.DEFAULT_PORT),
        module=local.RANK_MODULE,
        arguments=[*words],
        environment=local.rank_environment(kind, len(devices[number]), allocator),
    )
    code, signal = node.run(launch), stop.requested()
    return 128 + signal if code == 0 and signal is not None else code


def _number(num_nodes: int) -> int:
    name = next((name for name in NUMBERS if name in os.environ), None)
    refuse(
        (
            name is None and num_nodes > 1,
            "the number of this node is not known",
            f"the plan has {num_nodes} nodes, and none of {', '.join(NUMBERS)} is in the environment",
            "export NODE_RANK=0 on the first node, 1 on the second, and so on",
        )
    )
    text = "0" if name is None else os.environ[name].strip()
    if not text.isdecimal() or int(text) >= num_nodes:
        raise PlanMismatchError(
            f"{name}={text} is no node of the plan",
            because=f"it has {num_nodes}, whose numbers count from 0",
            hint="plan for as many as the scheduler starts: frugal plan --nodes N",
        )
    return int(text)


def main() -> None:
    """Run this node's ranks and exit."""
    try:
        sys.exit(run(sys.argv[1:]))
    except FrugalError as error:
        to_console(f"error: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
