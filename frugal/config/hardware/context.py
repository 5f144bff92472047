"""GPU memory beyond the tensors of a process: the driver's context, loaded kernels, and NCCL's buffers.

All of it is **assumed** until `frugal measure --calibrate` has measured it on the card. Each part has three numbers:
the least, what is planned with, and the most. They are fitted to figures that others published; docs/facts/cuda.md has
the table with their sources. Most of these are torch's own out-of-memory messages, where

    context = memory in use by the process - allocated by PyTorch - reserved but unallocated, to 0.01 GiB each

**Driver.** The context reserves a stack (`cudaLimitStackSize`, 1 KiB) for each thread that the card can hold at once,
and about as much again. So it grows with multiprocessors x threads: 2 KiB a thread gives 426 MiB for an RTX 6000 Ada
(measured 426), 528 for an H100 (540), 384 for an RTX 4090 (398), 216 for an A10 (225). Fitted, not derived.

**Kernels.** Since CUDA 11.7 they are loaded when they are first used (`CUDA_MODULE_LOADING=LAZY`, torch's default from
1.13 on), and so grow while a process trains. Processes that trained or inferred had 0 to 150 MiB above a bare context.

**NCCL.** A communicator allocates its buffers for each channel and each neighbour in rings and trees: 4 MiB (Simple),
4.7 MiB (LL128) and 0.5 MiB (LL), 10 MiB with rounding, and 2 MiB for the other direction. PCIe has 2 to 4 channels,
NVLink 16 to 32. Beyond two nodes it does not grow any more (NVIDIA/nccl#864). Connections are made when an algorithm is
first used. frugal's engine has two communicators beyond one rank: that of the process group, on which it only waits
at barriers, and DeepSpeed's copy of it, split off, which ZeRO talks through. Published figures are of processes with
one or two. NCCL's own kernels come to it. A GPU that trains alone has none of this: see
`frugal.deepspeed_adapter.collectives.init_alone`.

Left out: cuDNN, whose workspaces torch's allocator holds and whose kernels are those of the table; all-to-all, which
connects every pair of ranks (3.3 GB on eight H100, NVIDIA/nccl#1685) and which frugal's engine does not use; a
desktop, which `held` says; and GPU Direct buffers towards other nodes.
"""

from dataclasses import dataclass

from frugal.units import KIB, MIB


@dataclass(frozen=True, kw_only=True)
class Range:
    """Planned bytes, and the least and the most that they may be."""

    least: int
    planned: int
    most: int

    def __post_init__(self) -> None:
        assert 0 <= self.least <= self.planned <= self.most, self

    def __add__(self, other: "Range") -> "Range":
        """Both together."""
        return Range(least=self.least + other.least, planned=self.planned + other.planned, most=self.most + other.most)


NOTHING = Range(least=0, planned=0, most=0)

KERNELS = Range(least=0, planned=128 * MIB, most=192 * MIB)
"""Modules of torch, cuBLAS and DeepSpeed; the most with those of evaluation and saving. Measured 4 MiB (RTX 6000 Ada),
73 to 136 (RTX 4090), 130 (RTX 4080 class)."""

KERNELS_HOPPER = Range(least=0, planned=240 * MIB, most=304 * MIB)
"""On an H200: 146 MiB after products and attention, and a bare context 91 above what its threads give
(`python -m bench.gpu.context`)."""

LATER_KERNELS_BYTES = 64 * MIB
"""Kernels that evaluation, saving and rarer shapes may load after a calibration: as much as a training step loads."""

NCCL_PCIE = Range(least=64 * MIB, planned=176 * MIB, most=352 * MIB)
"""Eight RTX 3080: 100 to 165 MiB (huggingface/trl#3436); eight cards of 24 GB: about 177 (torchtune#2071)."""

NCCL_NVLINK = Range(least=384 * MIB, planned=960 * MIB, most=1440 * MIB)
"""Before Hopper. A100: 544 MiB a communicator of two, 688 of four (NVIDIA/nccl#964), 400 to 590 in all between two
(torchrec#3580), 700 to 820 under DeepSpeed between eight cards of 80 GB (LLaMA-Factory#9510)."""

NCCL_HOPPER = Range(least=512 * MIB, planned=1168 * MIB, most=2032 * MIB)
"""Eight H100: 1.60 GiB in all, of which 540 MiB are the bare context of the same machine (unsloth, DDP). The most are
two such communicators."""


def driver_and_kernels(resident_threads: int, kernels: Range = KERNELS) -> Range:
    """Return the memory beyond tensors of a process without NCCL."""
    stack = resident_threads * KIB
    return Range(least=int(1.8 * stack), planned=2 * stack, most=2 * stack + 16 * MIB) + kernels


def among_ranks(num_ranks: int, nccl: Range) -> Range:
    """Return what NCCL takes of each of `num_ranks` GPUs, where communicators of several take `nccl`."""
    return nccl if num_ranks > 1 else NOTHING
