"""Names of bitsandbytes beyond its documented interface, and what its operators take inside: nothing else uses them.

The product with a weight in 4 bits is one operator, which makes the whole weight in the type of its input and
multiplies. On a host it is Python that calls other operators; on a GPU C++ does the same (`backends/cuda/ops.py`,
`_dequant_linear_fallback`), but for few rows, where a fused kernel takes nothing. How few depends on the card, and is
at most 512 rows for weights of 4M elements or more: what is counted here is then too much, in forward alone. Backward
makes the whole weight always.

What backward needs of a packed weight is the parameter (`_of_parameters`). bitsandbytes keeps its memory instead, in
the context of the product: under ZeRO-3 that is what was gathered for forward, of every layer, until the graph ends.
DeepSpeed gathers the parameter again before backward.
"""

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal import memory_watch, required, torch_internals
from frugal.required import needed

NAMES = (
    *needed(
        "bitsandbytes.nn",
        "packed weights and their scales",
        "Linear4bit.__init__:quant_state",
        "Linear4bit.__init__:support_avx512bf16_for_cpu",
        "Params4bit.__new__:bnb_quantized",
    ),
    *needed(
        "bitsandbytes.autograd._functions:MatMul4Bit",
        "which weights backward reads",
        "forward(ctx, A, B, out, bias, quant_state)",
        "forward:tensors",
    ),
    *needed("bitsandbytes", "the product of a layer", "matmul_4bit(A, B, quant_state, out, bias)"),
    *needed("bitsandbytes.functional", "the table of scales", "name2qmap", "create_dynamic_map"),
    *needed("bitsandbytes.functional:QuantState", "what each rank has whole", "to(self, device)"),
    *needed(
        "bitsandbytes.backends.default.ops",
        "what the product with packed weights makes inside",
        "_gemm_4bit_default_impl(A, B, shapeB, absmax, blocksize, quant_type, bias, absmax_8bit, absmax_code, "
        "absmax_offset)",
    ),
)


def import_uncompiled() -> None:
    """Import bitsandbytes, as peft does, without compiling its kernels in Python, of which dry runs execute none.

    It calls torch.compile when imported, which imports Inductor: a second of each process that plans for adapters.
    """
    with patch.object(torch, "compile", lambda function, **_options: function), suppress(ImportError):
        import bitsandbytes  # noqa: F401  # for what the import leaves behind


@functools.cache
def library() -> Any:
    """Return bitsandbytes, which has to be installed.

    From then on memory is watched inside its operators, too, and its layers keep parameters for backward.
    """
    # On some CPUs it asks for a package of kernels that are for inference alone, in a warning.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes
    from bitsandbytes import functional
    from bitsandbytes.backends.default import ops

    required.verify("bitsandbytes", NAMES)
    with torch_internals.without_modes(), torch.device("cpu"):  # made once a process, also where all else is on meta
        functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())
    product = torch.ops.bitsandbytes.gemm_4bit.default
    memory_watch.INSIDE[product] = {"cpu": ops._gemm_4bit_default_impl, "cuda": _on_gpu}
    bitsandbytes.matmul_4bit = _of_parameters(bitsandbytes.matmul_4bit)  # `Linear4bit.forward` looks it up here
    return bitsandbytes


def _of_parameters(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Have bitsandbytes' product with packed weights keep a layer's parameter for backward, not its memory."""
    from bitsandbytes.autograd._functions import MatMul4Bit

    class Product(MatMul4Bit):
        """Theirs but for what its context keeps."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            output: Tensor = MatMul4Bit.forward(ctx, *args)
            ctx.tensors = None, args[1]
            return output

    @functools.wraps(theirs)
    def product(
        inputs: Tensor, weight: Tensor, quant_state: Any, out: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        is_kept = isinstance(weight, nn.Parameter) and torch.is_grad_enabled() and inputs.requires_grad and out is None
        is_as_stored = not getattr(quant_state, "packing_format_for_cpu", False)
        if is_kept and is_as_stored and quant_state.shape[1] == inputs.shape[-1]:
            return Product.apply(inputs, weight, None, bias, quant_state)
        return theirs(inputs, weight, quant_state, out, bias)

    return product


def _on_gpu(
    inputs: Tensor,
    packed: Tensor,
    shape: list[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    *nested: Tensor,
) -> Tensor:
    """Run the operators of `_dequant_linear_fallback`, whose scales live to its end.

    `nested`: of scales that are quantised themselves, the scales in 8 bits, their code and their offset.
    """
    operators = torch.ops.bitsandbytes
    if nested:
        absmax_8bit, code, offset = nested
        scales = operators.dequantize_blockwise.default(absmax_8bit, absmax, code, 256, torch.float32)
        absmax = scales + offset
    weight = operators.dequantize_4bit.default(packed, absmax, blocksize, quant_type, shape, inputs.dtype)
    return F.linear(inputs, weight, bias)


def inside_bytes(operator: Any, args: tuple[Any, ...]) -> int | None:
    """Return the bytes that quantising a tensor takes temporarily on a host; None: the operator does not quantise.

    `backends/default/ops.py`: of each element the fp32 value, the scaled one and its number in 32 bits, the number in a
    byte, and twice half of that. A GPU's kernel takes nothing.
    """
    if "bitsandbytes" not in sys.modules:
        return None
    tensor: Any = args[0] if args else None
    if operator is not torch.ops.bitsandbytes.quantize_4bit.default:
        return None
    return int(tensor.numel()) * (14 if tensor.element_size() < 4 else 10)
