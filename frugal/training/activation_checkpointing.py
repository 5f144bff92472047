"""Activation checkpointing, as the plan says.

DeepSpeed's `activation_checkpointing` JSON block switches nothing on for transformers models; the model itself must.
A transformers model has a switch. In any other module the repeated layers are made to recompute: the modules of one
class that stand together in an `nn.ModuleList` or `nn.Sequential`.
"""

from collections import Counter
from functools import partial
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

from frugal.errors import RequestError


def apply(model: nn.Module, mode: Literal["off", "full"]) -> None:
    """Make `model` recompute its layers in backward (`full`) or keep their activations (`off`).

    Non-reentrant checkpointing: exact for ZeRO 0-3, with dropout, and with inputs that need no gradient.

    Raises:
        RequestError: the model has no layers that could be recomputed.
    """
    if mode == "off":
        if getattr(model, "is_gradient_checkpointing", False):
            model.gradient_checkpointing_disable()  # type: ignore[operator]  # a transformers model
    elif _has_switch(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # a transformers model
    else:
        layers = repeated_layers(model)
        if not layers:
            raise RequestError(
                f"{type(model).__name__} does not support activation checkpointing",
                because="it has neither gradient_checkpointing_enable() nor a list of layers of one class",
                hint="plan with --activation-checkpointing off, or put its layers into an nn.ModuleList",
            )
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def is_supported(model: nn.Module) -> bool:
    """Whether `apply(model, "full")` would work."""
    return _has_switch(model) or bool(repeated_layers(model))


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The layers to recompute: in each outermost list or sequence, those of a class that occurs more than once.

    Modules without submodules are no layers: recomputing a single operator saves nothing.
    """
    if isinstance(model, nn.ModuleList | nn.Sequential):
        composed = [child for child in model if any(True for _ in child.children())]
        occurrences = Counter(map(type, composed))
        repeated = [child for child in composed if occurrences[type(child)] > 1]
        if repeated:
            return repeated
    return [layer for child in model.children() for layer in repeated_layers(child)]


def _has_switch(model: nn.Module) -> bool:
    has_method = hasattr(model, "gradient_checkpointing_enable")
    return has_method and bool(getattr(model, "supports_gradient_checkpointing", True))
