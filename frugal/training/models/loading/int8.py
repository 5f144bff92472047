"""Weights in 8 bits, without outlier columns: bitsandbytes' LLM.int8 with a threshold of 0 (https://arxiv.org/abs/2208.07339).

Each row of a weight has one scale, its largest value over 127, and so has each token of what goes in. The product is
one of integers, times both scales; input gradients come from the whole weight in the run's precision, as in
bitsandbytes' `MatMul8bitLt`. Nothing is looked for in a micro-batch, so a sample's result does not depend on what else
is in it. (With a threshold columns with a value over it, in any row of a call, are computed apart.)

It is one computation on all devices: on CPUs bitsandbytes' own layers train with another, of whole weights and inputs
that are not rounded. What it lacks is the paper's answer to outliers: an input with values far from the others of its
token is rounded coarsely.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from frugal.training.models.loading import bitsandbytes_internals


def pack(weight: Tensor) -> nn.Parameter:
    """A weight of shape `(outputs, inputs)` in 8 bits, on the same device, with scales of shape `(outputs,)`, fp32."""
    bnb = bitsandbytes_internals.library()

    packed, scales, _ = bnb.functional.int8_vectorwise_quant(weight.contiguous().to(torch.float16))
    parameter: nn.Parameter = bnb.nn.Int8Params(packed, requires_grad=False, has_fp16_weights=False, SCB=scales)
    return parameter


def settle(module: Any, device: torch.device | None) -> None:
    """Have a layer of bitsandbytes compute as described above, with its scales on `device`; its weight has one name."""
    scales, state = module.weight.SCB if module.state.SCB is None else module.state.SCB, module.state
    if scales is not None and device is not None:
        scales = scales.to(device)
    state.SCB = module.weight.SCB = scales
    state.CB = module.weight.CB = None
    module.__class__ = _layer()


def dequantised(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What a weight stands for."""
    return weight.to(dtype, copy=True).mul_(scales.unsqueeze(1).mul(1.0 / 127.0))


@functools.cache
def _layer() -> Any:
    """bitsandbytes' layer with another forward: its own sets its weight anew each time, which undoes ZeRO-3.

    Its scales are in no checkpoint: they are of the frozen base, which is read and quantised again.
    """
    bnb = bitsandbytes_internals.library()

    def forward(self: Any, inputs: Tensor) -> Any:
        return _Product.apply(inputs, self.weight, self.state.SCB, self.bias)

    own = {"forward": forward, "_save_to_state_dict": nn.Linear._save_to_state_dict}
    return type("Linear8bitLt", (bnb.nn.Linear8bitLt,), own)


class _Product(torch.autograd.Function):
    """`inputs @ weight.T + bias`. The parameter is kept for backward, not its memory: ZeRO-3 gathers it again."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: nn.Parameter, scales: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight, ctx.scales = weight, scales
        ctx.shape, ctx.dtype = inputs.shape, inputs.dtype
        operators = torch.ops.bitsandbytes
        rows = inputs.reshape(-1, inputs.shape[-1])
        integers, scales_of_rows, _ = operators.int8_vectorwise_quant.default(rows.to(torch.float16))
        sums = operators.int8_linear_matmul.default(integers, weight.data)
        del integers
        output: Tensor = operators.int8_mm_dequant.default(sums, scales_of_rows, scales, dtype=inputs.dtype, bias=bias)
        return output.view(*inputs.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        (gradient,) = gradients
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_bias = rows.sum(0) if ctx.needs_input_grad[3] else None
        if not ctx.needs_input_grad[0]:
            return None, None, None, of_bias
        weight = dequantised(ctx.weight.data, ctx.scales, ctx.dtype)
        return torch.matmul(rows, weight).view(ctx.shape), None, None, of_bias
