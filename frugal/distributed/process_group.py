"""A rank's way into its process group."""

import errno
import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from frugal.config.hardware.cluster import DeviceKind
from frugal.deepspeed_adapter import collectives
from frugal.distributed import env, rank_logs
from frugal.errors import PlanMismatchError, RequestError
from frugal.planning.plan import Plan

if TYPE_CHECKING:
    import torch


def join(plan: Plan, out: Path | None = None) -> "torch.device":
    """Enter the process group that the launcher describes, or one of this process alone; the device to work on.

    What each of several ranks prints goes to its file in `out`, if it is given.

    Raises:
        PlanMismatchError: the plan is for other devices or another number of ranks, or ranks differ in what they hold.
        RequestError: the port where ranks meet is taken, some rank does not come, or too few files may be open.
    """
    env.adopt_launcher_variables()
    kind = plan.cluster.devices[0].kind
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != plan.batch.world_size:
        raise PlanMismatchError(
            f"the plan is for {plan.batch.world_size} ranks, this run has {world_size}",
            hint=f"plan again for {world_size} GPUs, or start {plan.batch.world_size} processes",
        )
    env.raise_descriptors(world_size)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses that have no name, for one
    env.correct_local_rank(plan.cluster)
    if (ranks := env.ranks_on_node() or 1) > 1:  # before torch
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    if world_size > 1 and out is not None:
        rank_logs.redirect(out, env.rank())
    env.adopt_segments(plan.cluster, plan.strategy.expandable_segments)
    import torch

    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanMismatchError(
            "the plan is for GPUs, and there is none here", hint="plan for this machine's CPU: frugal plan --device cpu"
        )
    device = use_device(kind)  # before DeepSpeed is imported
    from frugal.distributed import rendezvous

    env.silence_libraries()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else tokenizers warn of every fork
    if world_size > 1:
        rendezvous.rendezvous(plan)
    form()
    return device


def use_device(kind: DeviceKind) -> "torch.device":
    """Have torch and DeepSpeed use this rank's device, and return it.

    Raises:
        PlanMismatchError: more ranks were started here than there are GPUs.
    """
    import torch

    if kind == "cpu":
        os.environ |= collectives.ON_CPU
        return torch.device("cpu")
    device = torch.device(kind, env.local_rank())
    if device.index >= torch.cuda.device_count():
        ranks = env.ranks_on_node() or device.index + 1
        raise PlanMismatchError(
            f"{socket.gethostname()} has fewer GPUs than ranks",
            because=f"of its GPUs {torch.cuda.device_count()} can be used, and {ranks} ranks were started",
            hint="give its line in the hostfile as many slots, and plan again; under SLURM, let each task see all GPUs "
            "of its node (--gpus-per-node, not --gpus-per-task)",
        )
    torch.cuda.set_device(device)
    return device


def form() -> None:
    """Enter the process group that a launcher describes, or one of this process alone; if in one, stay. Collective.

    Raises:
        RequestError: the port where ranks meet is taken.
    """
    import torch.distributed as dist

    from frugal.deepspeed_adapter import contract
    from frugal.distributed import first_failure, rendezvous
    from frugal.distributed.connections import listeners

    first_failure.end_for_threads()
    contract.verify()  # before modules are imported that name what may be missing

    if not (is_formed := dist.is_initialized()):
        env.check()
    alone = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    if not is_formed and os.environ["WORLD_SIZE"] == "1":
        env.choose_interfaces()
        collectives.init_alone()
    elif not is_formed:
        rendezvous.join_store()
    is_gloo = not dist.is_initialized() and collectives.ON_CPU.items() <= os.environ.items()
    with listeners.closed_afterwards(rendezvous.server) if is_gloo else nullcontext():
        collectives.init_distributed(rendezvous.METHOD, env.timeout())


def free_port() -> int:
    """Return a TCP port that is in use on no address of this host."""
    with hold_port("", 0) as sock:
        return int(sock.getsockname()[1])


def hold_port(address: str, port: int) -> socket.socket:
    """Bind a port (0: any that is free) without listening: nobody else gets it but a rank 0 that then listens there.

    Raises:
        RequestError: it is in use, or may not be used.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as rank 0's has
    for own in (address, ""):  # the address may be another's, which passes on to this host
        try:
            sock.bind((own, port))
            return sock
        except OSError as error:
            why = error
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                break
    sock.close()
    raise RequestError(
        f"port {port} cannot be used", because=why.strerror or str(why),
        hint="start again without --master-port: a free port is chosen",
    )  # fmt: skip
