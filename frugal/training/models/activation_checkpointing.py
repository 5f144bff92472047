"""Activation checkpointing, as the plan says.

DeepSpeed's `activation_checkpointing` JSON block switches nothing on for transformers models; the model itself must.
A transformers model has a switch. In any other module the repeated layers are made to recompute: the modules of one
class that stand together in an `nn.ModuleList` or `nn.Sequential`.

| mode        | kept on the device until backward                    | recomputed                        |
|-------------|------------------------------------------------------|-----------------------------------|
| `off`       | everything that backward needs                       | nothing                           |
| `selective` | each layer's inputs and its expensive results        | the rest: `selective_recompute.py` |
| `full`      | each layer's inputs                                  | the layer                         |
| `offloaded` | nothing: each layer's own input waits in host memory | the layer                         |

A layer's own input is its first tensor, which it alone keeps. Masks, position biases and an encoder's states are
shared by the layers, so they stay. On a CPU rank there is nowhere to move it to, and `offloaded` is `full`.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from frugal.errors import RequestError
from frugal.planning.strategy import ActivationCheckpointing
from frugal.training.models import selective_recompute, transformers_internals


def apply(model: nn.Module, mode: ActivationCheckpointing) -> None:
    """Make `model` recompute its layers in backward, or keep their activations (`off`).

    Non-reentrant checkpointing: exact for ZeRO 0-3, with dropout, and with inputs that need no gradient.

    Raises:
        RequestError: the model has no layers that could be recomputed.
    """
    if mode == "off":
        if getattr(model, "is_gradient_checkpointing", False):
            model.gradient_checkpointing_disable()  # type: ignore[operator]  # a transformers model
    elif _has_switch(model):
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # a transformers model
        if not transformers_internals.recompute_layers(model, _RUN[mode]) and mode != "full":
            raise RequestError(
                f"{type(model).__name__} does not support activation checkpointing {mode}",
                because="it recomputes its layers in a way of its own",
                hint="plan with --activation-checkpointing full",
            )
    else:
        layers = repeated_layers(model)
        if not layers:
            raise RequestError(
                f"{type(model).__name__} does not support activation checkpointing",
                because="it has neither gradient_checkpointing_enable() nor a list of layers of one class",
                hint="plan with --activation-checkpointing off, or put its layers into an nn.ModuleList",
            )
        for layer in layers:
            if isinstance(layer.forward, partial) and layer.forward.func in _RUN.values():  # from another mode
                layer.forward = layer.forward.args[0]
            layer.forward = partial(_RUN[mode], layer.forward)


def _selective(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(layer, *args, use_reentrant=False, context_fn=selective_recompute.contexts, **kwargs)


def _offloaded(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _OwnInputOnHost():
        return checkpoint(layer, *args, use_reentrant=False, **kwargs)


_RUN: dict[ActivationCheckpointing, Callable[..., Any]] = {
    "selective": _selective,
    "full": partial(checkpoint, use_reentrant=False),
    "offloaded": _offloaded,
}


class _OwnInputOnHost(saved_tensors_hooks):
    """Moves the first tensor that `checkpoint` saves of a layer to pinned host memory, and back for backward.

    Inside the layer `checkpoint` has hooks of its own, so only the layer's positional arguments come here. The
    copies are asynchronous: torch's allocators keep the memory at both ends until they are done.
    """

    def __init__(self) -> None:
        self._is_first = True
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[torch.device, Tensor]:
        moves = self._is_first and tensor.device.type != "cpu"
        self._is_first = False
        if not moves:
            return tensor.device, tensor
        tensor = tensor.detach()
        on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, on_host.copy_(tensor, non_blocking=True)

    @staticmethod
    def _unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)


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
