"""BatchNorm's statistics: of a rank's own micro-batch, as torch takes them, of all ranks', or the running ones.

A mean over a micro-batch depends on which samples share it, so a gradient does, too. With running statistics (`frozen`)
it is exact for any split. Statistics over all ranks (`sync`) are those of all samples of a micro-step: the same on any
number of ranks while micro-steps hold the same samples, but not those of the whole global batch. torch's SyncBatchNorm
does that for tensors of GPUs only; here the same is written in collectives that gloo has, too.
"""

import logging
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from frugal.config.request import BatchNormChoice
from frugal.errors import refuse
from frugal.planning.plan import Plan
from frugal.planning.report import DRAWN_PARTS, SPLIT_MATTERS

logger = logging.getLogger("frugal")

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take statistics over a micro-batch, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KINDS)}


def check(model: nn.Module, choice: BatchNormChoice) -> None:
    """Refuse what `apply` could not do.

    Raises:
        RequestError: there is nothing to do it to.
    """
    batch_norms = modules(model)
    without = [name for name, module in batch_norms.items() if module.running_mean is None]
    refuse(
        (
            not batch_norms,
            f"--batch-norm {choice} is for models with BatchNorm",
            f"{type(model).__name__} has none",
            "leave it out",
        ),
        (
            choice == "frozen" and without,
            "--batch-norm frozen needs running statistics",
            f"`{next(iter(without), None)}` keeps none (track_running_stats=False)",
            "leave it out, or use --batch-norm sync",
        ),
    )


def apply(model: nn.Module, choice: BatchNormChoice | None) -> None:
    """Have `model` take its statistics as chosen.

    Raises:
        RequestError: there is nothing to do it to.
    """
    if choice is None:
        return
    check(model, choice)
    for module in modules(model).values():
        if choice == "frozen":
            module.register_forward_pre_hook(_use_running_statistics)
        else:
            module.forward = partial(_synchronised, module)  # hooks on the module still run


def apply_planned(model: nn.Module, plan: Plan) -> None:
    """Apply the planned choice; warn where BatchNorm makes the gradient depend on the split. Raises as `apply`."""
    choice = plan.request.batch_norm
    notes = [note for note in plan.warnings if note.startswith((SPLIT_MATTERS, DRAWN_PARTS))]
    said_elsewhere = bool(notes) and plan.model.task != "own"  # by `frugal train`, in its opening
    if choice is None and not notes and (own := modules(model)):
        notes.append(
            f"{SPLIT_MATTERS}: {len(own)} BatchNorm modules take statistics over a micro-batch, which the plan does "
            "not know; planned with batch_norm='frozen' they use running ones"
        )
    for note in notes if dist.get_rank() == 0 and not said_elsewhere else ():
        logger.warning(note)
    apply(model, choice)


def _use_running_statistics(module: nn.Module, _inputs: tuple[Any, ...]) -> None:
    """Switch off training before every forward: `model.train()` may have been called. Weight and bias still learn."""
    module.training = False


def _synchronised(norm: Any, x: Tensor) -> Tensor:
    """Run a BatchNorm with mean and variance over all ranks' inputs `x (samples, channels, ...)`."""
    if not norm.training and norm.running_mean is not None:
        return torch.nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, eps=norm.eps
        )
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    wide = x.float()
    count = torch.full((1,), x.numel() / x.shape[1], device=x.device)
    total, number = all_reduce(torch.cat([wide.sum(dims), count])).tensor_split([x.shape[1]])
    mean = total / number
    centred = wide - mean.view(shape)
    variance = all_reduce(centred.square().sum(dims)) / number
    if norm.training and norm.track_running_stats:
        with torch.no_grad():  # as BatchNorm does: the running variance is the unbiased one
            norm.num_batches_tracked += 1
            share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            unbiased = variance * number / max(1.0, float(number) - 1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
    normed = centred * torch.rsqrt(variance + norm.eps).view(shape)
    if norm.affine:
        normed = normed * norm.weight.float().view(shape) + norm.bias.float().view(shape)
    return normed.to(x.dtype)
