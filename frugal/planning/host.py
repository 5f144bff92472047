"""What a training run takes of a node's host memory: its ranks' tensors, and what a process is without any.

The resident set of a rank is

    a process that has trained a tiny model once + the tensors that live at the peak + 3 % for the allocator

which `bench/host_memory.py` measures on CPU ranks, where host and device are one. The first part is the interpreter,
torch, DeepSpeed, transformers and what they load when they first work. It holds where large blocks go back to the
system when they are freed, which frugal sees to in a run that offloads (`frugal.training.host`): with glibc's own
settings, which keep blocks of up to 32 MiB, resident sets were up to 16 % larger than their tensors.

Left out: the data, of which a rank holds its part of two global batches at a time, 16 bytes a token; worker
processes; shared pages, which are counted in every rank that maps them, as the kernel does in a resident set.
"""

from frugal.planning.cluster import Cluster, Node
from frugal.planning.memory import MemoryBreakdown
from frugal.units import GIB, MIB

PROCESS_BYTES = {"cpu": 372 * MIB, "cuda": 2 * GIB}
"""A rank without tensors. On the CPU measured, with torch 2.13 (bench/host_memory.py). With CUDA assumed:
its libraries and context take 1 to 2 GiB of the host, depending on the driver; not measured yet."""

ALLOCATOR_SHARE = 0.03
"""Of the tensors: heap that small blocks keep, page ends, and memory that kernels take and return inside one call."""


def rank_bytes(tensor_bytes: int, kind: str) -> int:
    """The resident set of a rank whose tensors on the host take `tensor_bytes` at their peak."""
    return PROCESS_BYTES[kind] + int(tensor_bytes * (1 + ALLOCATOR_SHARE))


def node_bytes(tensor_bytes: int, kind: str, ranks_per_node: int) -> int:
    """That of all ranks of a node, the tensors of the fullest taken for each.

    A CPU rank's tensors are planned as those of its device, so nothing is counted twice: 0.
    """
    return 0 if kind == "cpu" else ranks_per_node * rank_bytes(tensor_bytes, kind)


def needed_bytes(memory: MemoryBreakdown, node: Node, cluster: Cluster) -> int:
    """What the ranks of `node` take of its host memory, each as much as the fullest.

    On CPU ranks the device is the host: their tensors are those of `memory`.
    """
    if node.devices[0].kind == "cpu":
        return len(node.devices) * rank_bytes(memory.live_bytes, "cpu")
    most_ranks = max(len(other.devices) for other in cluster.nodes)
    return memory.host_bytes_per_node // most_ranks * len(node.devices)
