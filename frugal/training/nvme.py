"""What lives on an NVMe disk while training: the folder of a run, and the asynchronous I/O of DeepSpeed."""

import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from frugal.errors import RequestError
from frugal.planning.plan import Plan


def is_used(plan: Plan) -> bool:
    """Whether anything of the plan lives on disk."""
    return "nvme" in (plan.strategy.offload_optimizer, plan.strategy.offload_parameters)


def with_own_folder(plan: Plan, votes: dist.ProcessGroup | None) -> Plan:
    """The plan with a folder of this run alone in the one it names: DeepSpeed empties what it uses. Collective.

    Raises:
        RequestError: the folder cannot be made, or DeepSpeed's I/O cannot be compiled.
    """
    check_io()
    names: list[Any] = [f"frugal-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(names, src=0, group=votes)
    folder = Path(str(plan.strategy.nvme_path)).expanduser() / names[0]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"cannot write to --nvme-path {plan.strategy.nvme_path}",
            because=str(error.strerror),
            hint="name a folder on a local disk of each node",
        ) from None
    return replace(plan, strategy=replace(plan.strategy, nvme_path=str(folder)))


def check_io() -> None:
    """Compile DeepSpeed's asynchronous I/O, or load what was compiled before: minutes the first time on a machine.

    Raises:
        RequestError: it cannot be compiled.
    """
    try:
        get_accelerator().create_op_builder("AsyncIOBuilder").load(verbose=False)
    except Exception as error:  # whatever a compiler, a linker or a missing library makes torch raise
        raise RequestError(
            "DeepSpeed's asynchronous I/O cannot be compiled here",
            because=str(error).strip().splitlines()[0],
            hint="install libaio with its headers (`apt install libaio-dev`), a C++ compiler and ninja; or plan "
            "without --nvme-path",
        ) from None


def remove_folder(plan: Plan) -> None:
    """Remove the folder of a run that is over; other ranks of the node may do the same."""
    shutil.rmtree(str(plan.strategy.nvme_path), ignore_errors=True)
