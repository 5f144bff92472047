"""Hardware to run on: known cards, and assumptions about an unknown one.

Sources: peaks and bandwidths are the vendor's data sheets (dense, 16-bit with fp32 accumulation; fp32 without TF32,
as torch runs it by default). Memory is the capacity that PyTorch's own out-of-memory message names for the card, which
is less than what is printed on the box.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Literal

from frugal.config.hardware import context
from frugal.config.request import Precision
from frugal.errors import RequestError, refuse
from frugal.units import GIB, MIB, format_bytes

OPERATOR_SECONDS = 10e-6
"""Assumed host seconds of one operator in eager PyTorch: dispatch, autograd, launch. Today's CPUs take 5 to 20e-6."""

MOST_RANKS = 65_536
"""Maximum ranks over all nodes: a plan names every GPU."""


HOST_LINK_BANDWIDTH = 12e9
"""Assumed bytes/s between a GPU and pinned host memory: half of what PCIe 4.0 x16 promises."""

HOST_BANDWIDTH = 50e9
"""Assumed bytes/s that one node's CPUs reach in an optimizer, all its ranks together: a quarter of 8-channel DDR4."""

HOP_SECONDS = 20e-6
"""Assumed latency of one message between two GPUs, with the launch of its kernel."""

DeviceKind = Literal["cuda", "cpu"]

Capability = tuple[int, int]
"""CUDA's compute capability, such as `(8, 6)`."""

ASSUMED_CAPABILITY: Capability = (8, 6)
"""Assumed of a GPU of which only the memory is known."""


def kernel_class(capability: Capability) -> Capability:
    """The capability that stands for all whose attention kernels are chosen alike and take the same memory.

    Dry runs are made for one of five and kept under it. Tests hold it to torch's answers on ten capabilities.
    """
    if capability < (8, 0):
        return (7, 5)
    if capability[0] in (8, 12):  # from 12.0 on and from 8.6 on a processor has 100 KiB of shared memory
        return (8, 0) if capability == (8, 0) else (8, 6)
    return (capability[0], 0) if capability[0] in (9, 10) else (8, 0)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or one CPU rank.

    Attributes:
        name: for people.
        kind: `cuda` or `cpu`; decides which kernels a dry run assumes.
        memory_bytes: as the driver reports it; for a CPU rank, its budget.
        context_bytes: what the driver counts beyond tensors: CUDA context, kernels, NCCL buffers (`config.context`).
        margin_bytes: left free on purpose: how far the upper bound of what a run takes may lie above what is planned.
        matrix_flops: FLOP/s that large matrix products reach in the planned precision.
        memory_bandwidth: bytes/s that operators without products reach, read and written.
        operator_seconds: host time of one operator, however small.
        host_link_bandwidth: bytes/s to and from pinned host memory, while all ranks of the node copy.
        held_bytes: memory in use by other processes.
        compute_capability: of a GPU; decides which attention kernels it takes.
        measured_on: the date of the calibration that speeds and context are from; None: they are assumed.
        context_below_bytes: by how much the context may be smaller than planned.
        context_above_bytes: by how much it may be larger.
        resident_threads: that a GPU holds at once; decides what its sums need inside.
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    context_bytes: int
    margin_bytes: int
    matrix_flops: float
    memory_bandwidth: float
    operator_seconds: float = OPERATOR_SECONDS
    host_link_bandwidth: float = HOST_LINK_BANDWIDTH
    measured_on: str | None = None
    held_bytes: int = 0
    context_below_bytes: int = 0
    context_above_bytes: int = 0
    compute_capability: Capability | None = None
    resident_threads: int = 0

    def __post_init__(self) -> None:
        if self.usable_bytes <= 0:
            raise RequestError(
                f"{format_bytes(self.memory_bytes)} is less than a {self.kind} device needs before the first tensor",
                because=f"context takes {format_bytes(self.context_bytes)}, margin {format_bytes(self.margin_bytes)}"
                + (f", and other processes use {format_bytes(self.held_bytes)}" if self.held_bytes else ""),
                hint="give more with --mem; for ranks on the CPU add --device cpu" if self.kind == "cuda" else None,
            )

    @property
    def multiprocessors(self) -> int:
        """The processors of a GPU that holds `resident_threads`; 1 for a CPU rank."""
        capability = self.compute_capability or ASSUMED_CAPABILITY
        return max(1, self.resident_threads // PROCESSOR_THREADS.get(capability, MOST_THREADS))

    @property
    def usable_bytes(self) -> int:
        """Usable memory of tensors: memory minus context, margin and what other processes use."""
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
        """Index in `kinds` of each rank's device."""
        numbers = {device: number for number, device in enumerate(self.kinds)}
        return tuple(numbers[device] for device in self.devices)

    @property
    def kernel_class(self) -> Capability:
        """The kernels that dry runs are made for: those of the oldest GPU."""
        return min(kernel_class(device.compute_capability or ASSUMED_CAPABILITY) for device in self.kinds)

    @property
    def world_size(self) -> int:
        """Ranks, one a device."""
        return len(self.devices)

    @property
    def rank_noun(self) -> str:
        """Name of a rank in messages."""
        return "GPU" if self.devices[0].kind == "cuda" else "rank"


MATRIX_SHARE, HOPPER_SHARE = 0.7, 0.55
"""Share of its peak that a card reaches in the matrix products of training; from Hopper on power limits it.

Chosen so that whole steps come out as published, together with the bytes between the products: Llama 3 8B, 8192 tokens,
selective activation checkpointing, 2973 tokens/s on an A100 (torchtitan, docs/performance.md) and 5762 in eager mode
on an H100 with 2.4 TB/s (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). A calibration replaces both."""

MEMORY_SHARE = 0.85
"""Share of the memory's nominal bytes/s that operators reach; measured ones lie between 0.8 and 0.92."""

ALLOCATOR_BYTES, ALLOCATOR_SHARE = 40 * MIB, 0.007
"""The caching allocator's need beyond the plan, fixed and as a share of the memory; see
`frugal.planning.memory.breakdown`."""

KERNELS_SHARE, UNKNOWN_KERNELS_SHARE = 0.001, 0.005
"""The same for the kernels of a known card and of an unknown one."""

NOMINAL_SHARE = 0.02
"""Share by which a driver reports less than the whole number of GiB on the box: 2 % of 12, 1.5 % of 24, 1.1 % of 80
GiB. Data-centre cards with ECC in their memory (T4, A10, L4, A40, L40S) report 8 to 9 % less: name them."""


def margin_bytes(memory_bytes: int, context_above_bytes: int, *, is_known_card: bool) -> int:
    """Return the margin of a GPU: the distance from the planned memory to the upper bound of what it may become.

    It is the sum of what the context, the allocator and the kernels may take more, and, if the memory is a whole number
    of GiB (from a box, not from a driver), what the driver reports less.
    """
    share = ALLOCATOR_SHARE + (KERNELS_SHARE if is_known_card else UNKNOWN_KERNELS_SHARE)
    nominal = NOMINAL_SHARE if memory_bytes % GIB == 0 else 0.0
    return context_above_bytes + ALLOCATOR_BYTES + int(memory_bytes * (share + nominal))


@dataclass(frozen=True, kw_only=True)
class Card:
    """One model of GPU: bytes, peak FLOP/s in 16 bit and in fp32, bytes/s of its memory and of its links.

    `link_bandwidth` is what one GPU sends to another of the same node in a ring: NVLink, or PCIe x16.
    `host_link_bandwidth` is what it exchanges with its host.
    `resident_threads`: that it can hold at once, multiprocessors x threads of each; None: as many as the largest known
    card with no more memory. `kernels` and `nccl`: memory that they take beyond tensors.
    """

    name: str
    memory_bytes: int
    half_flops: float
    fp32_flops: float
    memory_bandwidth: float
    compute_capability: Capability
    link_bandwidth: float = 12e9
    host_link_bandwidth: float = HOST_LINK_BANDWIDTH
    matrix_share: float = MATRIX_SHARE
    resident_threads: int | None = None
    kernels: context.Range = context.KERNELS
    nccl: context.Range = context.NCCL_PCIE

    @property
    def has_bf16(self) -> bool:
        """True if its tensor cores support bf16."""
        return self.compute_capability >= (8, 0)

    def peak_flops(self, precision: Precision) -> float:
        """Return the data sheet's FLOP/s of matrix products."""
        return self.fp32_flops if precision == "fp32" else self.half_flops

    def threads(self, memory_bytes: int) -> int:
        """Return `resident_threads` of such a card of `memory_bytes`."""
        least = min(card.memory_bytes for card in CARDS.values())
        known = [card for card in CARDS.values() if card.memory_bytes <= max(memory_bytes, least)]
        return self.resident_threads or max(card.resident_threads or 0 for card in known)

    def context_range(self, memory_bytes: int, num_ranks: int) -> context.Range:
        """Return the memory beyond tensors on one of `num_ranks` such cards of `memory_bytes`."""
        nccl = context.among_ranks(num_ranks, self.nccl)
        return context.driver_and_kernels(self.threads(memory_bytes), self.kernels) + nccl

    def device(self, precision: Precision, *, num_gpus: int, memory_bytes: int | None = None) -> Device:
        """Return this card as a device among `num_gpus`; `memory_bytes` replaces the card's own.

        Raises:
            RequestError: the card does not know this precision.
        """
        refuse(
            (
                precision == "bf16" and not self.has_bf16,
                f"--gpu {self.name} cannot train in bf16",
                "its tensor cores know fp16 only: bf16 came with compute capability 8.0 (Ampere)",
                "use --precision fp16, or --precision fp32",
            )
        )
        memory = self.memory_bytes if memory_bytes is None else memory_bytes
        taken = self.context_range(memory, num_gpus)
        return Device(
            name=self.name,
            kind="cuda",
            memory_bytes=memory,
            context_bytes=taken.planned,
            context_below_bytes=taken.planned - taken.least,
            context_above_bytes=taken.most - taken.planned,
            margin_bytes=margin_bytes(memory, taken.most - taken.planned, is_known_card=self.name in CARDS),
            matrix_flops=self.matrix_share * self.peak_flops(precision),
            memory_bandwidth=MEMORY_SHARE * self.memory_bandwidth,
            host_link_bandwidth=self.host_link_bandwidth,
            compute_capability=self.compute_capability,
            resident_threads=self.threads(memory),
        )


PCIE = {7: 6e9, 8: HOST_LINK_BANDWIDTH, 9: 24e9, 10: 24e9, 12: 24e9}
"""Assumed bytes/s of PCIe x16 by generation of cards (3.0, 4.0, 5.0), to the host or to another GPU through it, while
all GPUs of the node are at it: two fifths of what the standard promises."""

NVLINK_SHARE = 0.8
"""Share of NVLink's bytes/s in one direction that a ring reaches."""


PROCESSOR_THREADS, MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}, 2048
"""Resident threads of a multiprocessor by compute capability, and of all others (CUDA C++ Programming Guide)."""


def _card(
    name: str,
    gib: float,
    half: float,
    fp32: float,
    bandwidth: float,
    capability: Capability,
    processors: int = 0,
    nvlink: float = 0,
) -> Card:
    """Return a card from GiB, TFLOP/s, TFLOP/s, GB/s and its multiprocessors (0: not known).

    `nvlink` are GB/s in both directions, as in data sheets. Its generation gives the rest: PCIe, the share of its peak.
    """
    pcie = PCIE[capability[0]]
    is_hopper = capability[0] in (9, 10)
    nccl_of_nvlink = context.NCCL_HOPPER if is_hopper else context.NCCL_NVLINK
    return Card(
        name=name,
        memory_bytes=int(gib * GIB),
        half_flops=half * 1e12,
        fp32_flops=fp32 * 1e12,
        memory_bandwidth=bandwidth * 1e9,
        compute_capability=capability,
        link_bandwidth=nvlink / 2 * NVLINK_SHARE * 1e9 if nvlink else pcie,
        host_link_bandwidth=pcie,
        matrix_share=HOPPER_SHARE if is_hopper else MATRIX_SHARE,
        resident_threads=processors * PROCESSOR_THREADS.get(capability, MOST_THREADS) or None,
        kernels=context.KERNELS_HOPPER if is_hopper else context.KERNELS,
        nccl=nccl_of_nvlink if nvlink else context.NCCL_PCIE,
    )


CARDS = {
    card.name: card
    for card in (
        # Volta and Turing: whitepapers WP-08608 and WP-09183, data sheets of V100 and T4
        _card("v100-16g", 15.77, 125, 15.7, 900, (7, 0), 80, nvlink=300),
        _card("v100-32g", 31.74, 125, 15.7, 900, (7, 0), 80, nvlink=300),
        _card("t4-16g", 14.56, 65, 8.1, 320, (7, 5), 40),
        _card("rtx2080ti-11g", 10.75, 53.8, 13.4, 616, (7, 5), 68),
        # Ampere: whitepapers of A100 and GA102, data sheets of A10, A40, RTX A6000
        _card("rtx3060-12g", 11.76, 25.5, 12.7, 360, (8, 6), 28),
        _card("rtx3080-10g", 9.77, 59.5, 29.8, 760, (8, 6), 68),
        _card("rtx3090-24g", 23.69, 71, 35.6, 936, (8, 6), 82),
        _card("a10-24g", 22.06, 125, 31.2, 600, (8, 6), 72),
        _card("a40-48g", 44.42, 149.7, 37.4, 696, (8, 6), 84),
        _card("a6000-48g", 47.54, 154.8, 38.7, 768, (8, 6), 84),
        _card("a100-40g", 39.39, 312, 19.5, 1555, (8, 0), 108, nvlink=600),
        _card("a100-80g", 79.15, 312, 19.5, 2039, (8, 0), 108, nvlink=600),
        # Ada: whitepaper of AD102, product pages, data sheets of L4 and L40S
        _card("rtx4060ti-16g", 15.70, 44.1, 22.1, 288, (8, 9), 34),
        _card("rtx4070-12g", 11.73, 58.3, 29.1, 504, (8, 9), 46),
        _card("rtx4080-16g", 15.70, 97.5, 48.7, 717, (8, 9), 76),
        _card("rtx4090-24g", 23.64, 165, 82.6, 1008, (8, 9), 128),
        _card("l4-24g", 22.03, 121, 30.3, 300, (8, 9), 58),
        _card("l40s-48g", 44.39, 362, 91.6, 864, (8, 9), 142),
        # Hopper: data sheets of H100 SXM, H200 and GH200, which reaches its host over NVLink-C2C
        _card("h100-80g", 79.10, 989, 67, 3350, (9, 0), 132, nvlink=900),
        _card("h200-141g", 139.80, 989, 67, 4800, (9, 0), 132, nvlink=900),
        replace(_card("gh200-96g", 94.50, 989, 67, 4000, (9, 0), 132, nvlink=900), host_link_bandwidth=180e9),
        # Blackwell: whitepaper of GB202, data sheet of DGX B200
        _card("rtxpro6000-96g", 94.97, 503.8, 125, 1792, (12, 0), 188),
        _card("rtx5090-32g", 31.36, 209.5, 104.8, 1792, (12, 0), 170),
        _card("b200-180g", 178.35, 2250, 75, 8000, (10, 0), 148, nvlink=1800),
    )
}

GENERIC = _card("generic card", 0, 100, 25, 700, ASSUMED_CAPABILITY)
"""A card of which only the memory is known: between a 3090 and a 4090, on PCIe 4.0. Predicted seconds and attention
kernels depend on it."""


def of_driver(name: str, capability: Capability, resident_threads: int) -> Card:
    """Return a card that is not in the table, from its driver. Its speeds are those of `GENERIC`."""
    return replace(GENERIC, name=name, compute_capability=capability, resident_threads=resident_threads)


def resized(device: Device, *, memory_bytes: int, num_ranks: tuple[int, int]) -> Device:
    """Return `device` with another memory, among the second number of ranks instead of the first.

    Context and margin are those of such a device. What a calibration measured stays; NCCL's buffers are added where it
    was made with one rank.
    """
    if device.kind == "cpu":
        return replace(device, memory_bytes=memory_bytes)
    card = of_driver(device.name, device.compute_capability or ASSUMED_CAPABILITY, device.resident_threads)
    card = {**CARDS, GENERIC.name: GENERIC}.get(device.name, card)  # that the device was made of
    old = card.context_range(device.memory_bytes, num_ranks[0])
    new = card.context_range(memory_bytes, num_ranks[1])
    if device.measured_on is not None:  # only what NCCL takes is assumed
        old, new = (context.among_ranks(number, card.nccl) for number in num_ranks)
    above = device.context_above_bytes + (new.most - new.planned) - (old.most - old.planned)
    below = device.context_below_bytes + (new.planned - new.least) - (old.planned - old.least)
    is_known_card = device.name in CARDS
    extra = device.margin_bytes - margin_bytes(
        device.memory_bytes, device.context_above_bytes, is_known_card=is_known_card
    )
    return replace(
        device,
        memory_bytes=memory_bytes,
        context_bytes=max(0, device.context_bytes + new.planned - old.planned),
        context_below_bytes=max(0, below),
        context_above_bytes=max(0, above),
        margin_bytes=max(0, margin_bytes(memory_bytes, max(0, above), is_known_card=is_known_card) + extra),
        resident_threads=card.threads(memory_bytes),
    )


INTER_NODE_BANDWIDTH = 10e9
"""Assumed between nodes: 100 Gbit/s, of which 80 % arrive. Bytes/s of one node."""


def similar_cards(name: str) -> list[str]:
    """Return the cards whose names have `name` in them, whatever stands between its letters and numbers."""
    word = "".join(filter(str.isalnum, name.lower()))
    return [card for card in CARDS if len(word) > 1 and word in card.replace("-", "")]


def find_card(name: str) -> Card:
    """Return the card called `name`; without its memory if only one is called so.

    Raises:
        RequestError: no such card, or several.
    """
    of_name = [card for card in CARDS if f"{card}-".startswith(f"{name}-")]
    if len(of_name) != 1:
        close = of_name or similar_cards(name) or get_close_matches(name.lower(), CARDS, n=1)
        raise RequestError(
            f"--gpu {name} is no known card",
            because=f"known are {', '.join(CARDS)}",
            hint=f"use --gpu {' or '.join(close)}, or give its memory: --mem 24G"
            if close
            else "give its memory: --mem 24G",
        )
    return CARDS[of_name[0]]


def unlike(planned: Device, name: str, capability: Capability, resident_threads: int) -> str | None:
    """Return a note if a GPU is not what a plan assumed and may take more memory; None otherwise."""
    assumed = planned.compute_capability or ASSUMED_CAPABILITY
    if kernel_class(assumed) == kernel_class(capability) and resident_threads <= planned.resident_threads:
        return None
    of_plan, here = (
        f"compute capability {major}.{minor} and {threads:,} threads at once"
        for (major, minor), threads in ((assumed, planned.resident_threads), (capability, resident_threads))
    )
    return (
        f"the plan is for a {planned.name} with {of_plan}, this is {name} with {here}: memory may differ, "
        "`frugal plan` on this machine plans for it"
    )


def recognise_card(driver_name: str, memory_bytes: int) -> str | None:
    """Return the known card that the driver calls `driver_name`, such as `NVIDIA A100-SXM4-80GB`."""
    words = driver_name.lower().replace(" ", "")
    for name, card in CARDS.items():
        if name.split("-")[0] in words and abs(card.memory_bytes / memory_bytes - 1) < 0.05:
            return name
    return None


def cpu_rank(memory_bytes: int) -> Device:
    """Return a CPU rank, whose memory is a budget for tensors alone."""
    return Device(
        name="CPU rank",
        kind="cpu",
        memory_bytes=memory_bytes,
        context_bytes=0,
        margin_bytes=0,
        matrix_flops=5e10,
        memory_bandwidth=1e10,
    )


CPU_LINK_BANDWIDTH = 2e9
"""Assumed between two processes of one host through gloo, bytes/s."""
