"""What started this rank, and what it says of the rank's place: every launcher's words in torch's.

torchrun and DeepSpeed's launcher set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. OpenMPI, MPICH and
SLURM number their processes under names of their own and say nothing of a place to meet, which is given beside them.

Other libraries' talk.
"""

import logging
import os
import socket
import warnings

import psutil  # type: ignore[import-untyped]  # has no types

from frugal.config.cluster import Cluster
from frugal.errors import RequestError

_NAMES = (  # rank, world size, rank on its node, ranks on its node
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # of srun's tasks alone
)
PORT = 29500
"""Where ranks meet if nobody names a port; torch's and DeepSpeed's default, too."""


def translate() -> None:
    """Set torch's variables from those of OpenMPI, MPICH or SLURM, where one of them started more than one rank.

    Raises:
        RequestError: it did not say where ranks meet.
    """
    if "RANK" in os.environ:
        return
    for rank, world_size, local_rank, local_size in _NAMES:
        if int(os.environ.get(world_size, "1")) > 1 and rank in os.environ:
            if "MASTER_ADDR" not in os.environ:
                raise RequestError(
                    "MASTER_ADDR is not set",
                    because=f"the launcher says that this is rank {os.environ[rank]} of {os.environ[world_size]}, and "
                    "not where rank 0 is",
                    hint="export MASTER_ADDR=HOST, the address of rank 0's host, to all ranks",
                )
            os.environ |= {
                "RANK": os.environ[rank], "WORLD_SIZE": os.environ[world_size],
                "LOCAL_RANK": os.environ[local_rank],
                "LOCAL_SIZE": os.environ.get(local_size, "1").partition("(")[0],  # SLURM: 4(x2) is 4 on each of 2 nodes
            }  # fmt: skip
            os.environ.setdefault("MASTER_PORT", str(PORT))
            return


def number_on_node(cluster: Cluster) -> None:
    """Set LOCAL_RANK to this rank's place on its node, where DeepSpeed's launcher started it.

    The launcher takes the rank modulo the slots of the node (0.19.8, launch.py): with 1 and 2 slots, the ranks of the
    second node come out as 1 and 0, and a node whose GPUs differ would run each micro-batch on the wrong one.
    """
    node = int(os.environ.get("CROSS_RANK", "0"))
    if 0 < node < len(cluster.nodes):
        before = sum(len(other.devices) for other in cluster.nodes[:node])
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) - before)


def share_cores() -> None:
    """Give each rank of this node its share of the cores, unless OMP_NUM_THREADS says otherwise. Before torch."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    if ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))


def choose_nic() -> None:
    """Have gloo talk over the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME names one.

    Otherwise gloo takes the one with the address of this host's name, which Debian and Ubuntu say is 127.0.1.1: ranks
    of several nodes then wait for each other until the timeout. NCCL looks for interfaces itself.
    """
    is_alone = os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE")) == os.environ["WORLD_SIZE"]
    if is_alone or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    nic = nic_towards(os.environ["MASTER_ADDR"]) or nic_towards(_ELSEWHERE)
    if nic is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = nic


_ELSEWHERE = "198.51.100.1"
"""An address that is nobody's (RFC 5737): what leads there is the default route."""


def nic_towards(address: str) -> str | None:
    """The interface of this host that leads to `address`; None where that is its loopback, or nothing."""
    try:
        kind, _, _, _, place = socket.getaddrinfo(address, PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(place)  # sends nothing
            own = sock.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo" and own in (found.address.split("%")[0] for found in addresses):
            return str(name)
    return None


def quiet() -> None:
    """Silence what DeepSpeed, transformers and datasets say about themselves."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore")
    for name in ("DeepSpeed", "transformers", "datasets", "accelerate", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
