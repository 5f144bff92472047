"""A layer's MLP over slices of the positions, so that only a slice of its intermediate results exists at once.

An MLP is four times as wide inside as the layer, and its gradient needs several results of that width: for a long
sequence they are the peak of a layer. Here it runs on a slice of the positions at a time, keeps its input alone, and
runs once more for each slice in backward, whose gradients of the parameters are summed in fp32 and returned once. The
idea is DeepSpeed's `TiledMLP` (deepspeed/runtime/sequence_parallel/ulysses_sp.py; Arctic Long Sequence Training,
https://arxiv.org/abs/2506.13996), which sums in the parameters' own type, and needs for each class of models a
function that computes its MLP. Here any module of a layer is taken that leaves positions apart (`positions`).

The result is that of the whole MLP but for the last bits of the gradients of its parameters, which are summed in
another order, and of products whose kernels depend on the number of rows.

ZeRO-3 gathers the parameters of each submodule while it runs, which would be once a slice: here all of an MLP's are
gathered once in forward and once in backward, as one module's (`zero3_graph.gather_as_one`).

Left out: selective activation checkpointing, which would keep the slices' products.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from frugal.deepspeed_adapter import zero3_graph
from frugal.errors import refuse
from frugal.models.activation_checkpointing import repeated_layers
from frugal.models.tiling import positions, slices


def apply(model: nn.Module) -> None:
    """Have the MLP of each layer run over slices of the positions.

    Raises:
        RequestError: no module of a layer leaves positions apart.
    """
    reasons: dict[str, None] = {}
    tiled = [each for layer in repeated_layers(model) for each in _mlps(layer, reasons)]
    refuse(
        (
            not tiled,
            f"{type(model).__name__} cannot take a tiled MLP",
            "; ".join(reasons) or "it has no list of layers with an MLP in each",
            "plan with --mlp plain",
        )
    )
    for module, width in tiled:
        module.forward = partial(_tiled, module.forward, module, width)
        zero3_graph.gather_as_one(module)


def _mlps(module: nn.Module, reasons: dict[str, None]) -> Iterator[tuple[nn.Module, int]]:
    """Yield the outermost modules inside `module` that may be tiled and are wider inside, with their widths.

    `reasons` gets why others may not be, those that look like an MLP: two matrices, at least, of another shape.
    """
    for child in module.children():
        if isinstance(child.forward, partial) and child.forward.func is _tiled:
            child.forward = child.forward.args[0]
        if len([each for each in child.parameters() if each.dim() == 2]) < 2:
            continue
        try:
            width, widest = positions.widths(child)
        except positions.PositionsMeetError as error:
            reasons[f"{type(child).__name__}: {error}"] = None
            yield from _mlps(child, reasons)
            continue
        if widest > width:
            yield child, width


def _tiled(run: Callable[..., Tensor], module: nn.Module, width: int, hidden: Tensor) -> Tensor:
    """Run `run`, the own forward of `module`, over slices of the positions of `hidden (..., positions, width)`."""
    num_positions = hidden.shape[-2]
    rows = slices.length(num_positions, width) * (hidden.numel() // (num_positions * hidden.shape[-1]))
    result: Tensor = _TiledRows.apply(run, rows, hidden, *module.parameters())
    return result


class _TiledRows(torch.autograd.Function):
    """`run` on `rows` rows of `hidden (..., positions, width)` at a time, of the same shape."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Tensor], Tensor], rows: int, hidden: Tensor, *parameters: nn.Parameter
    ) -> Tensor:
        ctx.run, ctx.rows, ctx.parameters = run, rows, parameters
        ctx.save_for_backward(hidden)
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        result = torch.empty_like(flat)
        for start in slices.starts(flat, 1, rows):
            result[:, start : start + rows] = run(flat[:, start : start + rows])
        return result.view(hidden.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        _, _, needs_hidden, *needs = ctx.needs_input_grad
        flat, grad = (tensor.detach().reshape(1, -1, hidden.shape[-1]) for tensor in (hidden, grads[0]))
        trained = [parameter for parameter, needed in zip(ctx.parameters, needs, strict=True) if needed]
        sums = [torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in trained]
        grad_hidden = torch.empty_like(flat) if needs_hidden else None
        for start in slices.starts(flat, 1, ctx.rows):
            rows = slice(start, start + ctx.rows)
            tile = flat[:, rows].detach().requires_grad_(needs_hidden)
            with torch.enable_grad():
                result = ctx.run(tile)
            gradients = list(torch.autograd.grad(result, [tile, *trained] if needs_hidden else trained, grad[:, rows]))
            del result
            if grad_hidden is not None:
                grad_hidden[:, rows] = gradients.pop(0)
            for total in sums:
                total += gradients.pop(0)
        of_parameters = (
            sums.pop(0).to(parameter.dtype) if needed else None
            for parameter, needed in zip(ctx.parameters, needs, strict=True)
        )
        return (None, None, None if grad_hidden is None else grad_hidden.view(hidden.shape), *of_parameters)
