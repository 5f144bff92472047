"""A module without values, to be run where only what happens to shapes matters."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from frugal import torch_internals


def meta_copy(module: nn.Module, *, without_layers: bool = False) -> Any:
    """A copy on meta that needs no gradients, and if asked without the layers that stand in lists.

    The module may be on any device, also with parameters that ZeRO-3 has divided; it is not changed.
    """
    known: dict[int, Any] = {}
    if without_layers:
        known |= {id(child): nn.ModuleList() for child in module.modules() if isinstance(child, nn.ModuleList)}
    with torch_internals.without_modes():  # a dry run is not to see it
        for parameter in module.parameters():
            known[id(parameter)] = nn.Parameter(_like(parameter), requires_grad=False)
        for buffer in module.buffers():
            known[id(buffer)] = _like(buffer)
        return copy.deepcopy(module, known)


def _like(tensor: Tensor) -> Tensor:
    shape = getattr(tensor, "ds_shape", tensor.shape)  # of a parameter that ZeRO-3 has divided
    return torch.empty(shape, dtype=tensor.dtype, device="meta")
