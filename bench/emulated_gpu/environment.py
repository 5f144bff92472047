"""The start of a process on emulated cards: its Python and its environment variables.

subprocess.run([python(), "-m", "frugal", "train", ...], env=environment("rtx3060", num_gpus=2))
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.emulated_gpu.cards import CARDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-emulated"
"""Where `python -m bench.emulated_gpu.setup` puts the virtual environment unless it is told otherwise."""

MOST_GPUS = 8
EXPANDABLE = "expandable_segments:True"


class NotSetUpError(RuntimeError):
    """There is no virtual environment with the emulation."""


def is_emulated(prefix: Path) -> bool:
    """Return whether a virtual environment has the emulated driver in the place where torch looks for CUDA's
    libraries."""
    return any(prefix.glob("lib/python3.*/site-packages/nvidia/cu13/lib/libcuda.so.1"))


def python(folder: Path | None = None) -> str:
    """The interpreter whose torch finds emulated cards: of `folder`, else this one, else of `FOLDER`.

    Raises:
        NotSetUpError: there is none; the message says how to get one.
    """
    if folder is None and is_emulated(Path(sys.prefix)):
        return sys.executable
    folder = folder or FOLDER
    if not is_emulated(folder):
        raise NotSetUpError(
            f"error: no emulated GPU in {folder}\n\nhint: python -m bench.emulated_gpu.setup --folder {folder}"
        )
    return str(folder / "bin" / "python")


def environment(
    card: str,
    *,
    num_gpus: int = 1,
    memory_bytes: int | None = None,
    expandable_segments: bool | None = None,
    kernels: Path | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment of a process that sees `num_gpus` of `card`, on top of `base` (else of this process's own).

    `memory_bytes` replaces what the card reports, its context included. `expandable_segments` sets or unsets the
    setting of torch's allocator; None leaves to the program what it does. `kernels` is a file that each process
    overwrites at its end with the kernels it launched, and how often. A rank's variables (RANK and so on) that this
    process may have are left out.
    """
    if card not in CARDS or not 1 <= num_gpus <= MOST_GPUS:
        raise ValueError(f"error: 1 to {MOST_GPUS} of {', '.join(CARDS)} can be emulated, not {num_gpus} of {card}")
    of_rank = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"}
    given = os.environ if base is None else base
    made = {name: value for name, value in given.items() if name not in of_rank}
    made |= {
        "EMULATED_GPU_CARD": card,
        "EMULATED_GPU_COUNT": str(num_gpus),
        "HF_HUB_OFFLINE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # NCCL's communicators and addresses without names are warned about
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), given.get("PYTHONPATH")])),
    }
    if memory_bytes is not None:
        made["EMULATED_GPU_MEM"] = str(memory_bytes)
    if kernels is not None:
        made["EMULATED_GPU_KERNELS"] = str(kernels)
    if expandable_segments is not None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            made.pop(name, None)
        if expandable_segments:
            made["PYTORCH_ALLOC_CONF"] = EXPANDABLE
    return made
