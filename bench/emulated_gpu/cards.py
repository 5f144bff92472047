"""The cards that can be emulated: what torch, its attention kernels and DeepSpeed read of a device.

Sources. Multiprocessors, shared memory, threads and blocks: CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability", and the whitepapers of Turing, Ampere GA100 and GA102, Ada and Hopper. L2: the same whitepapers.
Memory: what the driver reports (`cudaMemGetInfo`), less than what is printed on the box: to the byte where someone
published it, else to the hundredth of a GiB that torch's out-of-memory messages name. A test holds it against
`frugal.config.hardware.cluster`, within 1 %.
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EmulatedCard:
    """One model of GPU, as its driver describes it. All sizes in bytes.

    Attributes:
        key: the name it is asked for by.
        frugal_name: the same card in `frugal.config.hardware.cluster`.
        driver_name: `torch.cuda.get_device_name()`.
        capability: compute capability.
        multiprocessors: streaming multiprocessors.
        memory_bytes: all of it, context included.
        shared_bytes: shared memory of a multiprocessor.
        shared_optin_bytes: the most of it that one block may ask for.
        l2_bytes: level 2 cache.
        threads: that can be resident on a multiprocessor.
        blocks: that can be resident on a multiprocessor.
    """

    key: str
    frugal_name: str
    driver_name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    shared_bytes: int
    shared_optin_bytes: int
    l2_bytes: int
    threads: int
    blocks: int


def _card(
    key: str,
    frugal_name: str,
    driver_name: str,
    capability: tuple[int, int],
    multiprocessors: int,
    memory_bytes: int,
    l2_mib: float,
) -> EmulatedCard:
    shared_kib, optin_kib, threads, blocks = OF_CAPABILITY[capability]
    return EmulatedCard(
        key=key,
        frugal_name=frugal_name,
        driver_name=driver_name,
        capability=capability,
        multiprocessors=multiprocessors,
        memory_bytes=memory_bytes,
        shared_bytes=shared_kib << 10,
        shared_optin_bytes=optin_kib << 10,
        l2_bytes=int(l2_mib * MIB),
        threads=threads,
        blocks=blocks,
    )


OF_CAPABILITY = {
    (7, 5): (64, 64, 1024, 16),
    (8, 0): (164, 163, 2048, 32),
    (8, 6): (100, 99, 1536, 16),
    (8, 9): (100, 99, 1536, 24),
    (9, 0): (228, 227, 2048, 32),
}
"""By compute capability: KiB of shared memory a multiprocessor, KiB one block may have; resident threads and blocks."""

CARDS = {
    card.key: card
    for card in (
        _card("t4", "t4-16g", "Tesla T4", (7, 5), 40, 15_655_829_504, 4),
        _card("rtx3060", "rtx3060-12g", "NVIDIA GeForce RTX 3060", (8, 6), 28, 12_622_168_064, 2.25),
        _card("rtx3090", "rtx3090-24g", "NVIDIA GeForce RTX 3090", (8, 6), 82, 25_429_803_008, 6),
        _card("rtx4090", "rtx4090-24g", "NVIDIA GeForce RTX 4090", (8, 9), 128, 25_386_352_640, 72),
        _card("a10", "a10-24g", "NVIDIA A10", (8, 6), 72, 22_589 * MIB, 6),
        _card("a100-40g", "a100-40g", "NVIDIA A100-SXM4-40GB", (8, 0), 108, 40_335 * MIB, 40),
        _card("a100-80g", "a100-80g", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 84_987_740_160, 40),
        _card("l40s", "l40s-48g", "NVIDIA L40S", (8, 9), 142, 45_455 * MIB, 96),
        _card("h100", "h100-80g", "NVIDIA H100 80GB HBM3", (9, 0), 132, 84_942_979_072, 50),
        _card("h200", "h200-141g", "NVIDIA H200", (9, 0), 132, 150_109_880_320, 60),
    )
}


def c_table() -> str:
    """The cards as rows of the array in `source/device.c`."""
    rows = (
        f'{{"{card.key}", "{card.driver_name}", {card.capability[0]}, {card.capability[1]}, {card.multiprocessors}, '
        f"{card.memory_bytes}ul, {card.shared_bytes}, {card.shared_optin_bytes}, {card.l2_bytes}, {card.threads}, "
        f"{card.blocks}}},"
        for card in CARDS.values()
    )
    return "\n".join(rows) + "\n"
