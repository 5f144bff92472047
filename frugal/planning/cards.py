"""Known cards, and what is assumed of an unknown one.

Sources: peaks and bandwidths are the vendor's data sheets (dense, 16-bit with fp32 accumulation; fp32 without TF32,
as torch runs it by default). Memory is the capacity that PyTorch's own out-of-memory message names for the card, which
is less than what is printed on the box.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from frugal.errors import RequestError
from frugal.planning.cluster import HOST_LINK_BANDWIDTH, Device
from frugal.planning.request import Precision
from frugal.units import GIB, MIB

MATRIX_SHARE, HOPPER_SHARE = 0.7, 0.55
"""Share of its peak that a card reaches in the matrix products of training; from Hopper on power limits it.

Chosen so that whole steps come out as published, together with the bytes between the products: Llama 3 8B, 8192 tokens,
selective activation checkpointing, 2973 tokens/s on an A100 (torchtitan, docs/performance.md) and 5762 in eager mode
on an H100 with 2.4 TB/s (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). A calibration replaces both."""

MEMORY_SHARE = 0.85
"""Share of the memory's nominal bytes/s that operators reach; measured ones lie between 0.8 and 0.92."""

CUDA_CONTEXT_BYTES = 512 * MIB
"""Assumed: driver context, loaded kernels, cuBLAS workspace. 300-600 MiB depending on card and driver."""

NCCL_BYTES = 256 * MIB
"""Assumed: NCCL's channels and buffers, where there is more than one GPU."""

MARGIN = 0.05
"""Share of a GPU's memory left free: fragmentation, side streams, the gap between nominal and reported capacity."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One model of GPU: bytes, peak FLOP/s in 16 bit and in fp32, bytes/s of its memory and of its links.

    `link_bandwidth` is what one GPU sends to another of the same node in a ring: NVLink, or PCIe 4.0 x16 (12 GB/s).
    """

    name: str
    memory_bytes: int
    half_flops: float
    fp32_flops: float
    memory_bandwidth: float
    link_bandwidth: float = 12e9
    host_link_bandwidth: float = HOST_LINK_BANDWIDTH
    matrix_share: float = MATRIX_SHARE

    def device(self, precision: Precision, *, num_gpus: int, memory_bytes: int | None = None) -> Device:
        """This card as a device among `num_gpus`; `memory_bytes` replaces the card's own."""
        memory = self.memory_bytes if memory_bytes is None else memory_bytes
        return Device(
            name=self.name,
            kind="cuda",
            memory_bytes=memory,
            context_bytes=CUDA_CONTEXT_BYTES + (NCCL_BYTES if num_gpus > 1 else 0),
            margin_bytes=int(memory * MARGIN),
            matrix_flops=self.matrix_share * (self.fp32_flops if precision == "fp32" else self.half_flops),
            memory_bandwidth=MEMORY_SHARE * self.memory_bandwidth,
            host_link_bandwidth=self.host_link_bandwidth,
        )


def _card(name: str, gib: float, half: float, fp32: float, bandwidth: float, link: float = 12) -> Card:
    """From GiB, TFLOP/s, TFLOP/s, GB/s, GB/s."""
    return Card(
        name=name,
        memory_bytes=int(gib * GIB),
        half_flops=half * 1e12,
        fp32_flops=fp32 * 1e12,
        memory_bandwidth=bandwidth * 1e9,
        link_bandwidth=link * 1e9,
    )


CARDS = {
    card.name: card
    for card in (
        _card("rtx3060-12g", 11.76, 25.5, 12.7, 360),
        _card("rtx3090-24g", 23.69, 71, 35.6, 936),
        _card("rtx4090-24g", 23.64, 165, 82.6, 1008),
        _card("l4-24g", 22.03, 121, 30.3, 300),
        _card("l40s-48g", 44.39, 362, 91.6, 864),
        _card("a100-40g", 39.39, 312, 19.5, 1555, 240),
        _card("a100-80g", 79.15, 312, 19.5, 2039, 240),
        _card("h100-80g", 79.10, 989, 67, 3350, 360),
        _card("h200-141g", 139.80, 989, 67, 4800, 360),
    )
}

GENERIC = _card("generic card", 0, 100, 25, 700)
"""Where only the memory is known: between a 3090 and a 4090, on PCIe. Only the predicted seconds depend on it."""

INTER_NODE_BANDWIDTH = 10e9
"""Assumed between nodes: 100 Gbit/s, of which 80 % arrive. Bytes/s of one node."""


def find(name: str) -> Card:
    """The card called `name`.

    Raises:
        RequestError: no such card.
    """
    if name not in CARDS:
        close = get_close_matches(name, CARDS, n=1)
        raise RequestError(
            f"--gpu {name} is no known card",
            because=f"known are {', '.join(CARDS)}",
            hint=f"use --gpu {close[0]}, or give its memory: --mem 24G" if close else "give its memory: --mem 24G",
        )
    return CARDS[name]


def recognise(driver_name: str, memory_bytes: int) -> str | None:
    """The card that the driver calls `driver_name`, such as `NVIDIA A100-SXM4-80GB`, if it is a known one."""
    words = driver_name.lower().replace(" ", "")
    for name, card in CARDS.items():
        if name.split("-")[0] in words and abs(card.memory_bytes / memory_bytes - 1) < 0.05:
            return name
    return None


def cpu_rank(memory_bytes: int) -> Device:
    """A CPU rank. Its memory is a budget for tensors, so nothing is taken before the first one."""
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

DeviceKind = Literal["cuda", "cpu"]
