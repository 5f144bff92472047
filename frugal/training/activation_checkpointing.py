"""Activation checkpointing, as the plan says.

DeepSpeed's `activation_checkpointing` JSON block switches nothing on for transformers models; the model itself must.
"""

from typing import Literal

from torch import nn

from frugal.errors import RequestError


def apply(model: nn.Module, mode: Literal["off", "full"]) -> None:
    """Make `model` recompute its layers in backward (`full`) or keep their activations (`off`).

    Non-reentrant checkpointing: exact for ZeRO 0-3, with dropout, and with inputs that need no gradient.

    Raises:
        RequestError: the model has no way to switch it on.
    """
    if mode == "off":
        if getattr(model, "is_gradient_checkpointing", False):
            model.gradient_checkpointing_disable()  # type: ignore[operator]  # a transformers model
        return
    if not supported(model):
        raise RequestError(
            f"{type(model).__name__} does not support activation checkpointing",
            because="it has no gradient_checkpointing_enable() of the transformers kind",
            hint="plan with --activation-checkpointing off, or give the model that method",
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # a transformers model


def supported(model: nn.Module) -> bool:
    """Whether `apply(model, "full")` would work."""
    if not hasattr(model, "gradient_checkpointing_enable"):
        return False
    return bool(getattr(model, "supports_gradient_checkpointing", True))
