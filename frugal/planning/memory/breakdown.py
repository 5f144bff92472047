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

Loading comes before the first step. Pretrained weights are read tensor by tensor, each put in its place before the
next: a rank's host holds what becomes of one tensor, or of those that are put together, and the pages of the files they
are in, which the kernel can take back. Random weights are made whole by rank 0, on its host. What a user's factory
makes, every rank makes whole.

On a device no loading takes more than training does: it holds the parameters that stay there, and one on its way.

The bounds of what a device needs, and their causes:

| cause     | below                                              | above                                              |
|-----------|----------------------------------------------------|----------------------------------------------------|
| allocator | as above, at most all slack: live tensors must fit | 40 MiB, two segments of which a step begins none   |
|           |                                                    | in the dry run, and 0.7 % of all segments: other   |
|           |                                                    | requests and another order                         |
| kernels   | 0.1 % of the live tensors on a known card, 0.5 % on| the same                                           |
|           | one of which only the memory is known: workspaces, |                                                    |
|           | and which kernel is chosen                         |                                                    |
| context   | down to the least of                               | up to the most; 64 MiB once it has been measured   |
|           | `frugal.config.hardware.context`                   |                                                    |
| data      | activations and temporary tensors, where the dry   | 5 % of them: the code may take another branch on   |
|           | run took the fullest case of what depends on data  | its data than it did                               |
| lengths   | what the drawn runs of other lengths need more     | the same, where the device may not have it: a run  |
|           | than equal ones, where the device has it           | goes on in smaller micro-batches then              |

A CPU rank has no caching allocator and no context; its kernels are 0.5 % below and 0.2 % above, the bounds of
`python -m bench.memory.accuracy`. The others are from emulated cards, rounded up: allocated peaks were off by at most
0.044 %, the smallest capacity of a run's own requests was 0.4 % more than predicted, and 46 MiB or 1.8 % once, for a
small model. The row of data is a guess. `python -m bench.memory.coverage` counts what is inside.

The margin of a device is what all causes but the last two come to above a plan that fills it. So where a plan fits, its
upper bound fits, unless it is data that may exceed it; then the plan says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from frugal.config.hardware.cluster import (
    ALLOCATOR_BYTES,
    ALLOCATOR_SHARE,
    CARDS,
    KERNELS_SHARE,
    UNKNOWN_KERNELS_SHARE,
    Cluster,
    Device,
    Node,
)
from frugal.config.request import Request
from frugal.planning.model_facts import NOT_PACKED, ModelFacts, ModelSummary, Origin, Packed, Reading, Weights
from frugal.planning.strategy import Strategy
from frugal.units import GIB, MIB

CPU_BELOW, CPU_ABOVE = 0.005, 0.002
DATA_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class Cause:
    """By how many bytes something may make the total smaller or larger."""

    below_bytes: int
    above_bytes: int

    def __post_init__(self) -> None:
        assert self.below_bytes >= 0 and self.above_bytes >= 0, self


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of the memory that one device needs, and what each cause has to do with them."""

    lower_bytes: int
    upper_bytes: int
    causes: dict[str, Cause]

    @classmethod
    def around(cls, total_bytes: int, causes: dict[str, Cause]) -> "Bounds":
        """Return bounds as far from `total_bytes` as all causes together may lead."""
        return cls(
            lower_bytes=max(0, total_bytes - sum(cause.below_bytes for cause in causes.values())),
            upper_bytes=total_bytes + sum(cause.above_bytes for cause in causes.values()),
            causes=causes,
        )


def of_tensors(live_bytes: int, capacity_bytes: int, *, on_cpu: bool, is_known_card: bool) -> dict[str, Cause]:
    """Return the causes without context and data: `live_bytes` at the peak, `capacity_bytes` with the allocator's
    slack.
    """
    if on_cpu:
        return {"kernels": Cause(below_bytes=int(CPU_BELOW * live_bytes), above_bytes=int(CPU_ABOVE * live_bytes))}
    other_order = ALLOCATOR_BYTES + int(ALLOCATOR_SHARE * capacity_bytes)
    off = int(live_bytes * (KERNELS_SHARE if is_known_card else UNKNOWN_KERNELS_SHARE))
    return {
        "allocator": Cause(below_bytes=max(0, min(capacity_bytes - live_bytes, other_order)), above_bytes=other_order),
        "kernels": Cause(below_bytes=off, above_bytes=off),
    }


def of_device(live_bytes: int, capacity_bytes: int, device: Device) -> Bounds:
    """Return the bounds of tensors and context on `device`."""
    on_cpu = device.kind == "cpu"
    causes = of_tensors(live_bytes, capacity_bytes, on_cpu=on_cpu, is_known_card=device.name in CARDS)
    if not on_cpu:
        causes["context"] = Cause(below_bytes=device.context_below_bytes, above_bytes=device.context_above_bytes)
    return Bounds.around(capacity_bytes + device.context_bytes, causes)


def widened(interval: Bounds, total_bytes: int, of_data_bytes: int, assumptions: Sequence[str]) -> Bounds:
    """Widen bounds where a dry run assumed something of its data, which `of_data_bytes` may depend on."""
    if not assumptions:
        return interval
    data = Cause(below_bytes=of_data_bytes, above_bytes=int(DATA_SHARE * of_data_bytes))
    return Bounds.around(total_bytes, interval.causes | {"data": data})


Way = Literal["by-tensor", "by-rank-0", "by-every-rank"]
"""How ranks get their weights: each reads what it keeps, rank 0 makes all and sends them, or each makes all."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Bytes while weights are loaded.

    Attributes:
        way: how ranks get them.
        rank_0_bytes: the peak of rank 0's tensors on its host, and of what it touches of files.
        rank_bytes: the same for any other rank.
        device_bytes: the most that is on a device. Where the host is the device, it is part of the former.
    """

    way: Way
    rank_0_bytes: int
    rank_bytes: int
    device_bytes: int


def way_of(strategy: Strategy, origin: Origin, *, is_quantised: bool = False) -> Way:
    """Return how ranks get weights of this origin. With parameters on NVMe DeepSpeed splits only what every rank has.

    Random weights that are quantised, which nobody trains, are made by every rank: scales are not sent.
    """
    if origin == "pretrained":
        return "by-tensor"
    is_sent = origin == "random" and strategy.offload_parameters != "nvme" and not is_quantised
    return "by-rank-0" if is_sent else "by-every-rank"


def loading_of(
    weights: Weights,
    strategy: Strategy,
    *,
    precision: str,
    parameters: int,
    largest_parameter: int,
    world_size: int,
    kind: str,
    packed: Packed = NOT_PACKED,
) -> Loading:
    """Return the memory that loading takes of a model with `parameters` elements.

    Left out: buffers, and what DeepSpeed makes of parameters afterwards, which is part of training's first phase.
    """
    is_quantised = packed.elements > 0
    element, way = 4 if precision == "fp32" else 2, way_of(strategy, weights.origin, is_quantised=is_quantised)
    largest, whole = element * largest_parameter, packed.weight_bytes(parameters, element)
    kept = packed.scales_bytes + (whole if strategy.zero_stage < 3 else -(-whole // world_size))
    on_device = kept if strategy.offload_parameters == "none" else 0
    on_host = kept if kind == "cpu" or strategy.offload_parameters == "cpu" else 0
    if way == "by-tensor":
        reading = weights.reading.get(precision, Reading(passing_bytes=2 * largest, keeping_bytes=2 * largest + whole))
        host = reading.keeping(on_host, whole + packed.scales_bytes)
        return Loading(way=way, rank_0_bytes=host, rank_bytes=host, device_bytes=on_device)
    arriving = largest if strategy.zero_stage == 3 else 0  # whole, before the rank takes its part
    if is_quantised:  # all of it is made before it is packed
        whole += element * parameters
    if kind == "cpu":  # what is made stays there, or makes room for the parts
        makes, waits = max(whole + arriving // world_size, kept + arriving), kept + arriving
    else:
        makes, waits = whole + on_host, on_host
    rank = makes if way == "by-every-rank" else waits
    return Loading(way=way, rank_0_bytes=makes, rank_bytes=rank, device_bytes=on_device + arriving)


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes on one device at the peak, by category, and on one node's host.

    `slack` is what the caching allocator needs beyond the live tensors: rounding and blocks that do not fit the next
    request. `context` is what is gone before the first tensor. `phase` says when the peak occurs, `operator` what
    allocates there. `phase_peaks` has the most live bytes of each phase; only a dry run fills it in. `interval` has the
    bounds of `total_bytes`; None in a draft, which is a bound itself. `loading`: before the first step.
    `reserved_bytes`: the allocator's segments at their peak where the card has room for all that it would like to keep,
    which is more than is needed; 0: not known, as in a draft and on a CPU. `counts_lengths`: whether this is of
    micro-batches of the data's lengths, not of equal ones; then another order of the data may reserve up to
    `reserved_above_bytes` more, which is by how much the drawn runs differ.
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
    reserved_above_bytes: int = 0

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

    def with_lengths(
        self, more_bytes: int, more_reserved_bytes: int, spread_bytes: int, room_bytes: int
    ) -> "MemoryBreakdown":
        """Return the memory of micro-batches of the data's lengths, that need so many bytes more than equal ones.

        Where they would need more than the device has, they are what it may come to, not the promise. `spread_bytes`:
        between the segments of different runs; `room_bytes`: the most that segments can take.
        """
        needed = more_bytes if more_bytes <= self.headroom_bytes else 0
        total = self.total_bytes + needed
        reserved = min(self.reserved_bytes + more_reserved_bytes, room_bytes)
        assert self.interval is not None, "a draft knows no lengths"
        cause = Cause(below_bytes=needed, above_bytes=more_bytes - needed)
        return replace(
            self,
            slack=self.slack + needed,
            total_bytes=total,
            interval=Bounds.around(total, self.interval.causes | {"lengths": cause}),
            reserved_bytes=reserved,
            counts_lengths=True,
            reserved_above_bytes=min(spread_bytes, room_bytes - reserved),
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

HEAP_SHARE = 0.03
"""The part beside tensors: heap kept by small blocks, page ends, and memory that kernels take and return in a call."""


def rank_host_bytes(tensor_bytes: int, kind: str) -> int:
    """Return the resident set of a rank whose tensors on the host take `tensor_bytes` at their peak."""
    return PROCESS_BYTES[kind] + int(tensor_bytes * (1 + HEAP_SHARE))


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


def nvme_bytes(
    request: Request, strategy: Strategy, model: ModelFacts | ModelSummary, node: Node, cluster: Cluster
) -> int:
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
        a_rank += request.element_bytes * model.parameters / cluster.world_size
    return int(a_rank * len(node.devices))


def saved_parameters(request: Request, model: ModelFacts | ModelSummary) -> int:
    """Return the elements that a run saves as its model: all, or those of adapters without their base."""
    return model.parameters if request.lora is None else model.trainable_parameters


def checkpoint_bytes(request: Request, strategy: Strategy, model: ModelFacts | ModelSummary) -> int:
    """Return the bytes of one saved checkpoint, of all ranks together.

    The optimizer's states and the master weights, which only plain fp32 training (ZeRO-0) does without; beside
    them the parameters as they are trained, of which ZeRO-3 saves only those that are not trained, and nobody the base
    of adapters. DeepSpeed saves each element once, whatever the world size. Held against real checkpoints in
    tests/checkpoint/test_space.py.
    """
    master = (
        0 if strategy.zero_stage == 0 and request.precision == "fp32" else request.optimizer.master_bytes_per_element
    )
    states = request.optimizer.state_bytes_per_element
    beside = saved_parameters(request, model) - (model.trainable_parameters if strategy.zero_stage == 3 else 0)
    return int(request.element_bytes * beside + (master + states) * model.trainable_parameters)
