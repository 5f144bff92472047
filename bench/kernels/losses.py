"""The loss of a head by each way: whole logits, frugal's tiled loss before and now, and those of others.

The tiled loss before is that of revision `BEFORE`, read from git. Liger's is its fused linear cross entropy; TRL's the
one that SFTTrainer 1.16 computes, with Liger's layers and without, which runs the head's product once more in backward;
torchtune's runs the head and cross entropy in `CHUNKS` parts of the tokens, compiled.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.kernels.layers import Family
from frugal.models import tiled_loss

BEFORE = "3a219e7e"
ROOT = Path(__file__).parents[2]
CHUNKS = 8
"""torchtune's `num_output_chunks`."""

TRL, TORCHTUNE = "TRL's", "torchtune's"
WAYS = ("plain", "tiled before", "tiled now, plain", "tiled now, liger", "Liger's fused linear", TRL, TORCHTUNE)


class _Model(nn.Module):
    """A model that is nothing but its output head."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.head = nn.Linear(family.width, family.vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)

    def get_output_embeddings(self) -> nn.Module:
        """The only module."""
        return self.head


def loss(family: Family, way: str) -> tuple[nn.Linear, Callable[[Tensor, Tensor], Tensor]]:
    """The head, and a function from `hidden (samples, positions, width)` and targets to the summed loss."""
    model = _Model(family)
    head: Any = model.head
    if way == "plain":
        return head, lambda hidden, targets: F.cross_entropy(
            head(hidden).view(-1, family.vocabulary).float(), targets.view(-1), reduction="sum"
        )
    if way == "Liger's fused linear":
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def fused(hidden: Tensor, targets: Tensor) -> Tensor:
            given = hidden.view(-1, family.width), head.weight, targets.view(-1)
            # sum, and fp32 for the head's gradient, as frugal's
            made: Tensor = LigerFusedLinearCrossEntropyFunction.apply(
                *given, None, None, -100, 0.0, 0.0, "sum", None, False, torch.float32
            )[0]
            return made

        return head, fused
    if way == TRL:
        from trl.kernels import ChunkedLogProbFunction  # type: ignore[import-not-found]  # in the emulated environment

        def of_trl(hidden: Tensor, targets: Tensor) -> Tensor:
            given = hidden.view(-1, family.width), head.weight, None, targets.view(-1)
            # temperature, classes at once, no soft cap, no scale, and what SFTTrainer logs beside the loss
            logged = ("log_probs", "entropy", "is_top1")
            made: Tensor = ChunkedLogProbFunction.apply(*given, 1.0, 32768, None, 1.0, logged)[0]
            return -made.sum()

        return head, of_trl
    if way == TORCHTUNE:

        @torch.compile(dynamic=False)
        def of_chunk(hidden: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(head(hidden).float(), targets, reduction="sum")

        def of_torchtune(hidden: Tensor, targets: Tensor) -> Tensor:
            parts = zip(hidden.view(-1, family.width).chunk(CHUNKS), targets.view(-1).chunk(CHUNKS), strict=True)
            return torch.stack([of_chunk(*part) for part in parts]).sum()

        return head, of_torchtune
    if way == "tiled before":
        _before().apply(model)
    else:
        tiled_loss.apply(model, "liger" if way == "tiled now, liger" else "plain")

    def tiled(hidden: Tensor, targets: Tensor) -> Tensor:
        head.forward.targets = targets
        made: Tensor = head(hidden)
        return made

    return head, tiled


def _before() -> Any:
    """`frugal.models.tiled_loss` of revision `BEFORE`."""
    command = ["git", "show", f"{BEFORE}:frugal/models/tiled_loss.py"]
    source = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    module = ModuleType("tiled_loss_before")
    exec(compile(source, "tiled_loss_before.py", "exec"), vars(module))
    return module
