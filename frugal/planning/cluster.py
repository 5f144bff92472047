"""What there is to run on."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from frugal.errors import RequestError
from frugal.units import format_bytes

OPERATOR_SECONDS = 10e-6
"""Assumed host seconds of one operator in eager PyTorch: dispatch, autograd, launch. Today's CPUs take 5 to 20e-6."""

MOST_RANKS = 65_536
"""Over all nodes; beyond it a plan would be all names of GPUs."""


HOST_LINK_BANDWIDTH = 12e9
"""Assumed bytes/s between a GPU and pinned host memory: half of what PCIe 4.0 x16 promises."""

HOST_BANDWIDTH = 50e9
"""Assumed bytes/s that one node's CPUs reach in an optimizer, all its ranks together: a quarter of 8-channel DDR4."""

HOP_SECONDS = 20e-6
"""Assumed latency of one message between two GPUs, with the launch of its kernel."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one CPU rank.

    Attributes:
        name: for people.
        kind: `cuda` or `cpu`; decides which kernels a rehearsal assumes.
        memory_bytes: as the driver reports it; for a CPU rank, its budget.
        context_bytes: taken before the first tensor: CUDA context, cuBLAS workspace, NCCL buffers.
        margin_bytes: left free on purpose.
        matrix_flops: FLOP/s that large matrix products reach in the planned precision.
        memory_bandwidth: bytes/s that operators without products reach, read and written.
        operator_seconds: host time of one operator, however small.
        host_link_bandwidth: bytes/s to and from pinned host memory, while all ranks of the node copy.
        held_bytes: what other processes keep of its memory.
        measured_on: the date of the calibration that the last five and the context are from; None: they are assumed.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: int
    context_bytes: int
    margin_bytes: int
    matrix_flops: float
    memory_bandwidth: float
    operator_seconds: float = OPERATOR_SECONDS
    host_link_bandwidth: float = HOST_LINK_BANDWIDTH
    measured_on: str | None = None
    held_bytes: int = 0

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            raise RequestError(
                f"{format_bytes(self.memory_bytes)} is less than a {self.kind} device needs before the first tensor",
                because=f"context takes {format_bytes(self.context_bytes)}, margin {format_bytes(self.margin_bytes)}"
                + (f", and other processes hold {format_bytes(self.held_bytes)}" if self.held_bytes else ""),
            )

    @property
    def usable_bytes(self) -> int:
        """What tensors may take: memory minus context, margin and what others hold."""
        return self.memory_bytes - self.context_bytes - self.margin_bytes - self.held_bytes


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine: its devices, its host memory and free disk in bytes (None: not known, not checked)."""

    devices: tuple[Device, ...]
    host_memory_bytes: int | None = None
    host_disk_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All machines. `intra_bandwidth` is bytes/s between two devices of a node, `inter_bandwidth` between nodes.

    `hop_seconds` is the latency of a collective for each doubling of the ranks, `host_bandwidth` bytes/s that the CPUs
    of a node reach in an optimizer. `links_measured`: whether what is within a node is from a calibration.
    """

    nodes: tuple[Node, ...]
    intra_bandwidth: float
    inter_bandwidth: float
    links_measured: bool = False
    hop_seconds: float = HOP_SECONDS
    host_bandwidth: float = HOST_BANDWIDTH

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in rank order."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def kinds(self) -> tuple[Device, ...]:
        """The devices that differ, in the order of their first ranks."""
        return tuple(dict.fromkeys(self.devices))

    @cached_property
    def kind_of_rank(self) -> tuple[int, ...]:
        """Where in `kinds` each rank's device is."""
        numbers = {device: number for number, device in enumerate(self.kinds)}
        return tuple(numbers[device] for device in self.devices)

    @property
    def world_size(self) -> int:
        """Ranks, one a device."""
        return len(self.devices)
