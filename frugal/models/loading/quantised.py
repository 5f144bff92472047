"""The frozen base of adapters in 4 bits: bitsandbytes' NF4 with quantised scales (QLoRA, https://arxiv.org/abs/2305.14314).

Which modules are quantised, and what becomes of their weights, is transformers' decision, as under its
`BitsAndBytesConfig`: all linear layers (and `Conv1D`) but the output head and what is tied to it. A quantised weight is
a parameter of bytes with two weights in each. Its scales (`Linear4bit.quant_state`) are tensors that are no parameters:
no ZeRO stage splits them, and every rank has them all.

Weights are computed with in the run's precision, which they are quantised from.

The product with a weight in 4 bits is one operator, which makes the whole weight in the type of its input and
multiplies. On a host it is Python that calls other operators; on a GPU C++ does the same (`backends/cuda/ops.py`,
`_dequant_linear_fallback`), but for few rows, where a fused kernel takes nothing. How few depends on the card, and is
at most 512 rows for weights of 4M elements or more: what is counted here is then too much, in forward alone. Backward
makes the whole weight always.

What backward needs of a packed weight is the parameter (`_of_parameters`). bitsandbytes keeps its memory instead, in
the context of the product: under ZeRO-3 that is what was gathered for forward, of every layer, until the graph ends.
DeepSpeed gathers the parameter again before backward.

Nothing else uses names of bitsandbytes beyond its documented interface.
"""

import copy
import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from frugal import memory_watch, required, torch_internals
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.errors import PlanMismatchError, refuse
from frugal.models import adapters, transformers_internals
from frugal.planning.model_facts import Packed
from frugal.planning.plan import Plan
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
    # DeepSpeed puts an autograd function around `F.linear`, which does the same here and takes three times as long
    return F.linear(inputs, weight, bias) if bias is not None else inputs.matmul(weight.t())


def inside_bytes(operator: Any, args: tuple[Any, ...]) -> int | None:
    """Return the bytes that quantising a tensor takes temporarily on a host; None: the operator does not quantise.

    `backends/default/ops.py`: of each element the fp32 value, the scaled one and its number in 32 bits, the number in a
    byte, and twice half of that. A GPU's kernel takes nothing.
    """
    if "bitsandbytes" not in sys.modules or operator is not torch.ops.bitsandbytes.quantize_4bit.default:
        return None
    tensor: Tensor = args[0]
    return tensor.numel() * (14 if tensor.element_size() < 4 else 10)


def config(dtype: torch.dtype) -> Any:
    """Return transformers' configuration of the quantisation; `dtype` is the run's precision.

    Raises:
        RequestError: bitsandbytes is not installed, or lacks what is used of it.
    """
    refuse(
        (
            sys.modules.get("bitsandbytes", importlib.util) is None or importlib.util.find_spec("bitsandbytes") is None,
            "--quantize needs bitsandbytes, which is not installed",
            "its kernels pack and unpack the weights",
            "pip install bitsandbytes",
        )
    )
    library()
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def apply(model: Any, *, reference: str, dtype: torch.dtype) -> nn.Module:
    """Quantise a model that is whole in this process or on meta, each weight where it is; the same model.

    Raises:
        RequestError: it is no model of transformers, or has nothing to quantise, or bitsandbytes is not installed.
    """
    from transformers.quantizers import AutoHfQuantizer

    refuse(
        (
            not isinstance(model, transformers.PreTrainedModel),
            f"--quantize is impossible for {reference}",
            f"a {type(model).__name__} is no model of transformers, which knows what of a model to quantise",
            "leave --quantize out, or quantise it in its factory",
        )
    )
    quantizer: Any = AutoHfQuantizer.from_config(config(dtype), pre_quantized=False)
    before = dict(model.named_modules())
    with torch_internals.without_modes():  # it makes modules on meta, which are nothing on a device
        quantizer.preprocess_model(model=model, device_map=None)
    for name, module in named(model):
        original: Any = before[name]
        module.weight = _packed(original.weight.data, module)
        module.bias = original.bias
        before[name] = original.weight = None  # no longer than it is needed
    quantizer.postprocess_model(model)
    refuse(
        (
            not are_in(model),
            f"--quantize is impossible for {reference}",
            f"a {type(model).__name__} has no linear layer besides its output head",
            "leave --quantize out",
        )
    )
    return settle(model)


def as_planned(model: nn.Module, plan: Plan) -> nn.Module:
    """Return `model` quantised as planned, unless it was built so. Raises as `apply`, and:

    Raises:
        PlanMismatchError: it has adapters around a base that is not quantised.
    """
    kind = plan.request.quantize
    if kind is None or are_in(model):
        return model
    if adapters.are_in(model):
        raise PlanMismatchError(
            f"the plan keeps the base of adapters in {kind}, and that of this model is not quantised",
            hint="give the model without adapters, or with a base that is quantised",
        )
    return apply(model, reference=type(model).__name__, dtype=DTYPES[plan.request.precision])


def _packed(weight: Tensor, module: Any) -> nn.Parameter:
    """Return the packed weight of a module, on the same device; on meta its shapes. A `Conv1D`'s is transposed."""
    bnb = library()
    weight = weight if module.source_cls is nn.Linear else weight.T
    names = ("quant_type", "quant_storage", "compress_statistics", "blocksize")
    settings = {name: getattr(module.weight, name) for name in names}
    packed, scales = bnb.functional.quantize_4bit(weight.contiguous(), **settings)
    module.quant_state = scales
    kind = _on_meta() if packed.is_meta else bnb.nn.Params4bit
    return kind(packed, requires_grad=False, quant_state=scales, module=module, bnb_quantized=True, **settings)


@functools.cache
def _on_meta() -> Any:
    """Return bitsandbytes' class of weights, made to be copied on meta. It has the same name: peft looks at it."""
    bnb = library()

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        kept = {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        return type(self)(copy.deepcopy(self.data, memo), requires_grad=self.requires_grad, **kept)

    return type("Params4bit", (bnb.nn.Params4bit,), {"__deepcopy__": deepcopy})


def on(device: torch.device | None) -> AbstractContextManager[None]:
    """Move weights that `from_pretrained` quantises inside the block to `device` first; None: it quantises none.

    A GPU takes milliseconds for what a CPU takes seconds for, and its scales have to be there.
    """
    return nullcontext() if device is None else transformers_internals.quantising(device, _packed)


def settle(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Have scales where they are used, tables once a model, and packed bytes as they are; the same model.

    ZeRO-3 takes parameters alone to their `device`. And on CPUs with AVX-512 BF16 bitsandbytes packs weights in another
    order, in place, at the first evaluation: training after it would continue with other weights.
    """
    tables: dict[str, Tensor] = {}
    for _, module in named(model):
        module.support_avx512bf16_for_cpu = False
        state = module.quant_state
        if state is not None:
            if device is not None:
                state.to(device)
            state.code = tables.setdefault("values", state.code)
            if state.nested:
                state.state2.code = tables.setdefault("scales", state.state2.code)
    return model


def are_in(model: nn.Module) -> bool:
    """Return whether some of its weights are quantised."""
    return next(named(model), None) is not None


def named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return quantised modules, with their names."""
    if "bitsandbytes" in sys.modules:  # otherwise nobody has made any
        layer = library().nn.Linear4bit
        yield from ((name, module) for name, module in model.named_modules() if isinstance(module, layer))


def scales(model: nn.Module) -> list[Tensor]:
    """Return the tensors that quantised weights have besides parameters, each once: every rank has them all."""
    tensors = [tensor for _, module in named(model) for tensor in _scales(module.weight)]
    return list({id(tensor): tensor for tensor in tensors}.values())


def _scales(parameter: Any) -> list[Tensor]:
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    return [state.absmax, state.code, *([state.offset, state.state2.absmax, state.state2.code] if state.nested else ())]


def scales_bytes(parameter: Any) -> int:
    """Return the bytes of a parameter's scales."""
    return sum(tensor.nbytes for tensor in _scales(parameter))


def elements(parameter: Any) -> int:
    """Count the weights in a parameter, quantised or not, split by ZeRO-3 or not."""
    state = getattr(parameter, "quant_state", None)
    return getattr(parameter, "ds_numel", parameter.numel()) if state is None else int(state.shape.numel())


def packed(model: nn.Module) -> Packed:
    """Return how much of the model is quantised."""
    weights = [module.weight for _, module in named(model)]
    return Packed(
        elements=sum(map(elements, weights)),
        packed_bytes=sum(weight.nbytes for weight in weights),
        scales_bytes=sum(tensor.nbytes for tensor in scales(model)),
    )


def dequantised(module: Any) -> Tensor:
    """Return the weight of a quantised module as it is computed with, shape `(outputs, inputs)`."""
    return library().functional.dequantize_4bit(module.weight.data, module.quant_state)
