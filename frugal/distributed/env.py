"""The environment variables by which a launcher tells a rank its place, and where the ranks meet.

torchrun and DeepSpeed's launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. OpenMPI, MPICH and
SLURM number their processes under names of their own and do not set MASTER_ADDR, which is given beside them.
"""

import logging
import os
import resource
import socket
import warnings
from datetime import timedelta
from typing import NoReturn

import psutil  # type: ignore[import-untyped]  # has no types

from frugal.config.hardware import cuda_allocator
from frugal.config.hardware.cluster import MOST_RANKS, Cluster
from frugal.errors import RequestError, logger, refuse

_LAUNCHERS = (  # variables for: rank, world size, rank on its node, ranks on its node
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # of srun's tasks alone
)
DEFAULT_PORT = 29500
"""The port of the rendezvous, if none is given; torch's and DeepSpeed's default, too."""


_LEAST_AND_MOST = {
    "RANK": (0, MOST_RANKS - 1), "WORLD_SIZE": (1, MOST_RANKS), "LOCAL_RANK": (0, MOST_RANKS - 1),
    "LOCAL_SIZE": (1, MOST_RANKS), "LOCAL_WORLD_SIZE": (1, MOST_RANKS), "CROSS_RANK": (0, MOST_RANKS - 1),
    "MASTER_PORT": (1, 65535),
}  # fmt: skip
"""The numbers that launchers set."""


def rank() -> int:
    """Return this process's rank; 0 before it is one of several."""
    return _number("RANK") or 0


def local_rank() -> int:
    """Return this process's rank on its node."""
    return _number("LOCAL_RANK") or 0


def ranks_on_node() -> int | None:
    """Return the number of ranks on this node; None where the launcher does not set it."""
    return _number("LOCAL_WORLD_SIZE") or _number("LOCAL_SIZE")


def _number(name: str) -> int | None:
    """Return a launcher's number; None where it is not set, or is what `check` refuses."""
    text, (least, most) = os.environ.get(name, "").strip(), _LEAST_AND_MOST[name]
    is_number = text.isascii() and text.isdecimal() and len(text) < 10
    return int(text) if is_number and least <= int(text) <= most else None


def check() -> None:
    """Refuse an environment that is no rank's place in a run.

    Raises:
        RequestError: a variable is no number or none that can be, or there is none that says where rank 0 is.
    """
    for name, (least, most) in _LEAST_AND_MOST.items():
        if name in os.environ and _number(name) is None:
            _refuse(name, f"it is a number from {least} to {most}, which the launcher sets for each rank")
    world_size = _number("WORLD_SIZE") or 1
    on_node = max(_number("LOCAL_WORLD_SIZE") or 0, _number("LOCAL_SIZE") or 0)  # accelerate sets the first to 1 itself
    if "RANK" in os.environ and rank() >= world_size:
        _refuse("RANK", f"ranks count from 0, and WORLD_SIZE is {os.environ.get('WORLD_SIZE', 'not set')}")
    if on_node and local_rank() >= on_node:
        _refuse("LOCAL_RANK", f"a node's ranks count from 0, and this one has {on_node}")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 else ():
        if not os.environ.get(name, "").strip():
            _refuse(name, f"there are {world_size} ranks, as WORLD_SIZE says, which meet at rank 0's host")
    try:
        os.environ.get("MASTER_ADDR", "").encode("idna")
    except UnicodeError as error:
        _refuse("MASTER_ADDR", f"no host has such a name: {error}")


def _refuse(name: str, why: str) -> NoReturn:
    value = os.environ.get(name)
    os.environ["LOCAL_RANK"] = "0"  # every rank with a wrong variable reports it
    shown = "not set" if value is None else f"`{value if len(value) <= 40 else value[:40] + '...'}`"
    raise RequestError(
        f"the environment variable {name} is {shown}", because=why,
        hint=f"leave it to the launcher (frugal train, torchrun, deepspeed, srun, mpirun), or: unset {name}",
    )  # fmt: skip


def is_restarted_by_torchrun() -> bool:
    """Return whether torchrun has started its ranks before, with the same arguments (--max-restarts)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "") not in ("", "0")


MOST_DESCRIPTORS = 2**16
"""The limit on open files, where it may be raised: TCPStore keeps every connection, also a stranger's."""


def raise_descriptors(world_size: int) -> None:
    """Raise this process's limit on open files, which those it starts inherit.

    Rank 0 of a run on CPU ranks has 20 and 6 for each rank at its fullest (1, 2 and 4 ranks, gloo); 8 more are for what
    is open for a moment. GPUs need more, which is not measured.

    Raises:
        RequestError: it may not be raised as far as a rank needs.
    """
    needed, (now, most) = 28 + 6 * world_size, resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = [each for each in (most, max(needed, MOST_DESCRIPTORS)) if each != resource.RLIM_INFINITY]
    refuse(
        (
            min(limits) < needed,
            f"a process may have {most} open files here, and ranks need {needed}",
            f"rank 0 holds connections to all {world_size}" if world_size > 1 else "libraries and data are files",
            f"raise the limit: `ulimit -n {max(needed, 4096)}`, or nofile in /etc/security/limits.conf",
        )
    )
    if now != resource.RLIM_INFINITY and now < min(limits):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits), most))


def adopt_launcher_variables() -> None:
    """Set torch's variables from those of OpenMPI, MPICH or SLURM, where one of them started more than one rank.

    Raises:
        RequestError: MASTER_ADDR is not set, or what the launcher says is no place in a run.
    """
    for names in _LAUNCHERS if "RANK" not in os.environ else ():
        rank, world_size, local_rank, local_size = (os.environ.get(name) for name in names)
        if rank is None or world_size in (None, "", "0", "1"):
            continue
        refuse(
            (
                "MASTER_ADDR" not in os.environ,
                "MASTER_ADDR is not set",
                f"the launcher says that this is rank {rank} of {world_size}, and not where rank 0 is",
                "export MASTER_ADDR=HOST, the address of rank 0's host, to all ranks",
            )
        )
        os.environ |= {
            "RANK": rank, "WORLD_SIZE": world_size or "", "LOCAL_RANK": local_rank or "",
            "LOCAL_SIZE": (local_size or "1").partition("(")[0],  # SLURM: 4(x2) is 4 on each of 2 nodes
        }  # fmt: skip
        os.environ.setdefault("MASTER_PORT", str(DEFAULT_PORT))
        break
    check()


def correct_local_rank(cluster: Cluster) -> None:
    """Set LOCAL_RANK to this rank's number on its node, where DeepSpeed's launcher started it.

    The launcher takes the rank modulo the slots of the node (0.19.8, launch.py): with 1 and 2 slots, the ranks of the
    second node come out as 1 and 0, and a node whose GPUs differ would run each micro-batch on the wrong one.
    """
    node = _number("CROSS_RANK") or 0
    if 0 < node < len(cluster.nodes):
        before = sum(len(other.devices) for other in cluster.nodes[:node])
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) - before)


LOOPBACK = "127.0.0.1"


def is_on_one_host() -> bool:
    """Return whether all ranks are on this host, according to the launcher."""
    number = ranks_on_node()
    is_loopback = os.environ.get("MASTER_ADDR") in (LOOPBACK, "localhost", "::1")
    return is_loopback or (number is not None and str(number) == os.environ.get("WORLD_SIZE"))


def adopt_segments(cluster: Cluster, expandable_segments: bool) -> None:
    """Have torch's allocator for GPUs make the segments that were planned, and say where the environment has others.

    torch reads the variable when CUDA is initialised. If it is already, torch gets the settings for later segments.
    """
    if not (changed := cuda_allocator.settings(cluster, os.environ, expandable_segments)):
        return
    for note in cuda_allocator.notes(expandable_segments, cluster, os.environ) if rank() == 0 else ():
        logger.warning(note)
    os.environ |= changed
    import torch

    if torch.cuda.is_initialized():
        from frugal.torch_internals import set_allocator_settings

        set_allocator_settings(*changed.values())


def choose_interfaces() -> None:
    """Have gloo and NCCL listen on this host's loopback alone where all ranks are on it.

    Of several hosts gloo uses the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME names one; `lo`, which an
    engine of this process alone has left there, leads to none. Otherwise it takes the one with the address of this
    host's name, which Debian and Ubuntu say is 127.0.1.1: ranks of several nodes then wait for each other until the
    timeout. NCCL looks for interfaces itself.
    """
    if is_on_one_host():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif os.environ.get("GLOO_SOCKET_IFNAME", "lo") == "lo":
        interface = interface_towards(os.environ["MASTER_ADDR"]) or interface_towards(_UNUSED_ADDRESS)
        if interface is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


_UNUSED_ADDRESS = "198.51.100.1"
"""Reserved for documentation (RFC 5737): the interface that leads there is that of the default route."""


def interface_towards(address: str) -> str | None:
    """Return the interface of this host that leads to `address`; None where that is its loopback, or nothing."""
    try:
        family, _, _, _, socket_address = socket.getaddrinfo(address, DEFAULT_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(socket_address)  # sends nothing
            own = sock.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo" and own in (each.address.split("%")[0] for each in addresses):
            return str(name)
    return None


def silence_libraries() -> None:
    """Suppress what DeepSpeed, transformers, datasets and what they import say about themselves."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "transformers", "datasets", "accelerate", "bitsandbytes", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed sets its level when it is imported, and prints to the standard output, where --json has its own.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def timeout() -> timedelta:
    """Return the time that a rank waits for the others before it gives up, which DeepSpeed's variable sets."""
    return timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", 30)))
