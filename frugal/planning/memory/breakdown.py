"""The memory of a training run: of a device at its fullest moment, of a node's host, and of its disks.

Host memory is for the ranks' tensors and for what a process is without any. The resident set of a rank is

    a process that has trained a tiny model once + the tensors that live at the peak + 3 % for the allocator

which `bench/memory/host_memory.py` measures on CPU ranks, where host and device are one. The first part is the
interpreter, torch, DeepSpeed, transformers and what they load when they first work. It holds where large blocks go back
to the system when they are freed, which frugal sees to in a run that offloads
(`frugal.config.hardware.local_host`): with glibc's own settings, which keep blocks of up to 32 MiB, resident sets were
up to 16 % larger than their tensors.

Left out: the data, of which a rank holds its part of two global batches at a time, 16 bytes a token; worker
processes; shared pages, which are counted in every rank that maps them, as the kernel does in a resident set.

A node's disks hold states that live on NVMe while it trains, and saved checkpoints. Left out there: the cache of
tokenised data, and logs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

from frugal.config.hardware.cluster import Cluster, Device, Node
from frugal.config.request import Request
from frugal.planning.memory.interval import Bounds, Cause, widened
from frugal.planning.memory.loading import Loading
from frugal.planning.strategy import Strategy
from frugal.units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on one device at the peak, by category, and on one node's host.

    `slack` is what the caching allocator needs beyond the live tensors: rounding and blocks that do not fit the next
    request. `context` is what is gone before the first tensor. `phase` says when the peak occurs, `operator` what
    allocates there. `phase_peaks` has the most live bytes of each phase; only a dry run fills it in. `interval` has the
    bounds of `total_bytes`; None in a draft, which is a bound itself. `loading`: before the first step.
    `reserved_bytes`: the allocator's segments at their peak where the card has room for all that it would like to keep,
    which is more than is needed; 0: not known, as in a draft and on a CPU. `counts_lengths`: whether this is of
    micro-batches of the data's lengths, not of equal ones.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    communication: int
    temporary: int
    slack: int
    context: int
    total_bytes: int
    usable_bytes: int
    host_bytes_per_node: int
    phase: str
    operator: str
    phase_peaks: dict[str, int] = field(default_factory=dict)
    interval: Bounds | None = None
    loading: Loading | None = None
    reserved_bytes: int = 0
    counts_lengths: bool = False

    CATEGORIES = (
        "parameters", "gradients", "optimizer", "activations", "logits",
        "communication", "temporary", "slack", "context",
    )  # fmt: skip

    def __post_init__(self) -> None:
        assert self.total_bytes == sum(getattr(self, name) for name in self.CATEGORIES), "the parts are not the whole"
        assert all(getattr(self, f.name) >= 0 for f in fields(self) if f.name in self.CATEGORIES), self
        bounds = self.interval
        assert bounds is None or bounds.lower_bytes <= self.total_bytes <= bounds.upper_bytes, "outside of its interval"

    @property
    def live_bytes(self) -> int:
        """Bytes of live tensors at the peak: without slack and context."""
        return self.total_bytes - self.slack - self.context

    def device_in(self, cluster: Cluster) -> Device:
        """Return the device of this breakdown, found by its usable memory."""
        return min(
            (device for device in cluster.devices if device.usable_bytes == self.usable_bytes),
            key=lambda device: device.memory_bytes,
            default=cluster.devices[0],
        )

    def assuming(self, assumptions: Sequence[str]) -> "MemoryBreakdown":
        """Widen the bounds where a dry run assumed something of its data, which activations and temporary tensors
        depend on.
        """
        if self.interval is None:
            return self
        of_data = self.activations + self.temporary
        return replace(self, interval=widened(self.interval, self.total_bytes, of_data, assumptions))

    def with_lengths(self, more_bytes: int, more_reserved_bytes: int, room_bytes: int) -> "MemoryBreakdown":
        """Return the memory of micro-batches of the data's lengths, that need so many bytes more than equal ones.

        Where they would need more than the device has, they are what it may come to, not the promise. `room_bytes`: the
        most that segments can take.
        """
        needed = more_bytes if more_bytes <= self.headroom_bytes else 0
        total = self.total_bytes + needed
        assert self.interval is not None, "a draft knows no lengths"
        cause = Cause(below_bytes=needed, above_bytes=more_bytes - needed)
        return replace(
            self,
            slack=self.slack + needed,
            total_bytes=total,
            interval=Bounds.around(total, self.interval.causes | {"lengths": cause}),
            reserved_bytes=min(self.reserved_bytes + more_reserved_bytes, room_bytes),
            counts_lengths=True,
        )

    @property
    def may_exceed_with_lengths(self) -> bool:
        """True if some order of the data's lengths needs more than the device has."""
        return (
            self.interval is not None
            and "lengths" in self.interval.causes
            and (self.interval.causes["lengths"].above_bytes > 0)
        )

    @property
    def of_the_step(self) -> int:
        """The bytes of forward and backward, which keeping less could reduce, with what the allocator wastes."""
        return self.activations + self.logits + self.temporary + self.slack

    @property
    def headroom_bytes(self) -> int:
        """The usable memory that is left; negative: the shortfall. `usable_bytes` does not contain the context."""
        return self.usable_bytes - (self.total_bytes - self.context)

    @property
    def fits(self) -> bool:
        """True if the device holds it."""
        return self.headroom_bytes >= 0


PROCESS_BYTES = {"cpu": 372 * MIB, "cuda": 2 * GIB}
"""A rank without tensors. On the CPU measured, with torch 2.13 (bench/memory/host_memory.py). With CUDA assumed:
its libraries and context take 1 to 2 GiB of the host, depending on the driver; not measured yet."""

ALLOCATOR_SHARE = 0.03
"""The part beside tensors: heap kept by small blocks, page ends, and memory that kernels take and return in a call."""


def rank_host_bytes(tensor_bytes: int, kind: str) -> int:
    """Return the resident set of a rank whose tensors on the host take `tensor_bytes` at their peak."""
    return PROCESS_BYTES[kind] + int(tensor_bytes * (1 + ALLOCATOR_SHARE))


def node_host_bytes(tensor_bytes: int, kind: str, ranks_per_node: int) -> int:
    """Return the resident sets of all ranks of a node, each with the tensors of the fullest.

    A CPU rank's tensors are planned as those of its device, so nothing is counted twice: 0.
    """
    return 0 if kind == "cpu" else ranks_per_node * rank_host_bytes(tensor_bytes, kind)


def needed_host_bytes(memory: MemoryBreakdown, node: Node, cluster: Cluster) -> int:
    """Return the host memory that the ranks of `node` need, each as much as the fullest, training or loading.

    On CPU ranks the device is the host: their tensors are those of `memory`.
    """
    return max(training_host_bytes(memory, node, cluster), loading_host_bytes(memory, node, cluster))


def loading_host_bytes(memory: MemoryBreakdown, node: Node, cluster: Cluster) -> int:
    """Return the host memory that they need while weights are loaded; 0: unknown."""
    if memory.loading is None:
        return 0
    return ranks_loading_bytes(
        memory.loading, node.devices[0].kind, len(node.devices), has_rank_0=node == cluster.nodes[0]
    )


def ranks_loading_bytes(loading: Loading, kind: str, num_ranks: int, *, has_rank_0: bool) -> int:
    """Return the host memory that `num_ranks` of a node need while weights are loaded."""
    rank_0, other = loading.rank_0_bytes, loading.rank_bytes
    return rank_host_bytes(rank_0, kind) * has_rank_0 + rank_host_bytes(other, kind) * (num_ranks - has_rank_0)


def training_host_bytes(memory: MemoryBreakdown, node: Node, cluster: Cluster) -> int:
    """Return the host memory that they need from the first step on."""
    if node.devices[0].kind == "cpu":
        return len(node.devices) * rank_host_bytes(memory.live_bytes, "cpu")
    return memory.host_bytes_per_node // max(len(other.devices) for other in cluster.nodes) * len(node.devices)


class Sizes(Protocol):
    """Elements of a model."""

    @property
    def parameters(self) -> int: ...
    @property
    def trainable_parameters(self) -> int: ...


def nvme_bytes(request: Request, strategy: Strategy, model: Sizes, node: Node, cluster: Cluster) -> int:
    """Return the bytes that the ranks of `node` keep on its NVMe disk.

    Each rank keeps its share of what ZeRO-3 splits: master weights and the optimizer's states in fp32 and the summed
    gradients, where the optimizer is offloaded; the parameters, where they are. Left out: that DeepSpeed aligns each
    file to a block, a few KiB for each of a model's parameters.
    """
    a_rank = 0.0
    if strategy.offload_optimizer == "nvme":
        states = request.optimizer.master_bytes_per_element + request.optimizer.state_bytes_per_element
        a_rank += (states + 4) * model.trainable_parameters / cluster.world_size
    if strategy.offload_parameters == "nvme":
        a_rank += (4 if request.precision == "fp32" else 2) * model.parameters / cluster.world_size
    return int(a_rank * len(node.devices))


def saved_parameters(request: Request, model: Sizes) -> int:
    """Return the elements that a run saves as its model: all, or those of adapters without their base."""
    return model.parameters if request.lora is None else model.trainable_parameters


def checkpoint_bytes(request: Request, strategy: Strategy, model: Sizes) -> int:
    """Return the bytes of one saved checkpoint, of all ranks together.

    The optimizer's states and the master weights, which only plain fp32 training (ZeRO-0) does without; beside
    them the parameters as they are trained, of which ZeRO-3 saves only those that are not trained, and nobody the base
    of adapters. DeepSpeed saves each element once, whatever the world size. Held against real checkpoints in
    tests/checkpoint/test_space.py.
    """
    element = 4 if request.precision == "fp32" else 2
    master = (
        0 if strategy.zero_stage == 0 and request.precision == "fp32" else request.optimizer.master_bytes_per_element
    )
    states = request.optimizer.state_bytes_per_element
    beside = saved_parameters(request, model) - (model.trainable_parameters if strategy.zero_stage == 3 else 0)
    return int(element * beside + (master + states) * model.trainable_parameters)
