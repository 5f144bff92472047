"""The gradient that DeepSpeed applied, read off one step of SGD, and how far it is from another."""

import torch
from torch import nn

from frugal.training.engine import Engine

LEARNING_RATE = 1024.0  # so large that the rounding of weights hides nothing of the gradient
SGD = {"optimizer": "sgd", "learning_rate": LEARNING_RATE, "weight_decay": 0.0, "gradient_clipping": 0.0}
"""What a request needs so that a step takes off the gradient alone."""

Gradient = dict[str, torch.Tensor]


def weights(model: nn.Module) -> Gradient:
    """A copy of what the model starts with, fp64."""
    return {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}


def applied(engine: Engine, before: Gradient) -> Gradient:
    """(before - after) / learning rate, each parameter whole. Runs on ranks."""
    from deepspeed.utils import safe_get_full_fp32_param

    gradient = {}
    for name, parameter in engine.module.named_parameters():
        after = safe_get_full_fp32_param(parameter)
        after = parameter.detach() if after is None else after
        if not after.numel():  # frozen, and split by ZeRO-3
            continue
        gradient[name] = (before[name] - after.double().view_as(before[name])) / LEARNING_RATE
    return gradient


def relative_error(gradient: Gradient, reference: Gradient) -> float:
    """The norm of the difference, by that of the reference."""
    difference = sum(float(((gradient[n] - reference[n]) ** 2).sum()) for n in reference)
    return float((difference / sum(float((g**2).sum()) for g in reference.values())) ** 0.5)
