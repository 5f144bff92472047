"""BatchNorm's statistics: of a micro-batch, as torch takes them, or the running ones.

A mean over a micro-batch depends on which samples share it, so a gradient does, too. With running statistics (`frozen`)
it is exact for any split. torch's SyncBatchNorm takes those of all ranks' micro-batches, on GPUs: the split into
micro-steps still matters.
"""

from typing import Any

import torch.distributed as dist
from torch import nn

from frugal.config.request import BatchNormChoice
from frugal.errors import logger, refuse
from frugal.planning.plan import Plan
from frugal.planning.report import DRAWN_PARTS, SPLIT_MATTERS

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take statistics over a micro-batch, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KINDS)}


def check(model: nn.Module) -> None:
    """Refuse a model whose running statistics cannot be used.

    Raises:
        RequestError: there is nothing to do it to.
    """
    batch_norms = modules(model)
    without = [name for name, module in batch_norms.items() if module.running_mean is None]
    refuse(
        (
            not batch_norms,
            "--batch-norm frozen is for models with BatchNorm",
            f"{type(model).__name__} has none",
            "leave it out",
        ),
        (
            bool(without),
            "--batch-norm frozen needs running statistics",
            f"`{next(iter(without), None)}` keeps none (track_running_stats=False)",
            "leave it out",
        ),
    )


def apply(model: nn.Module, choice: BatchNormChoice | None) -> None:
    """Have `model` take its statistics as chosen.

    Raises:
        RequestError: there is nothing to do it to.
    """
    if choice == "frozen":
        check(model)
        for module in modules(model).values():
            module.register_forward_pre_hook(_use_running_statistics)


def apply_planned(model: nn.Module, plan: Plan) -> None:
    """Apply the planned choice; warn where BatchNorm makes the gradient depend on the split. Raises as `apply`, and
    where torch's SyncBatchNorm cannot run."""
    choice = plan.request.batch_norm
    notes = [note for note in plan.warnings if note.startswith((SPLIT_MATTERS, DRAWN_PARTS))]
    said_elsewhere = bool(notes) and plan.model.task != "own"  # by `frugal train`, in its opening
    if choice is None and not notes and (own := modules(model)):
        notes.append(
            f"{SPLIT_MATTERS}: {len(own)} BatchNorm modules take statistics over a micro-batch, which the plan does "
            "not know; planned with batch_norm='frozen' they use running ones"
        )
    across = [name for name, module in modules(model).items() if isinstance(module, nn.SyncBatchNorm)]
    refuse((
        bool(across) and choice != "frozen" and plan.cluster.devices[0].kind == "cpu",
        "torch's SyncBatchNorm runs on GPUs alone",
        f"`{next(iter(across), None)}` is one, and the plan is for CPU ranks",
        "use BatchNorm, or --batch-norm frozen",
    ))  # fmt: skip
    for note in notes if dist.get_rank() == 0 and not said_elsewhere else ():
        logger.warning(note)
    apply(model, choice)


def _use_running_statistics(module: nn.Module, _inputs: tuple[Any, ...]) -> None:
    """Switch off training before every forward: `model.train()` may have been called. Weight and bias still learn."""
    module.training = False
