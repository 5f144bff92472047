"""The frozen base of adapters in 4 bits: bitsandbytes' NF4 with quantised scales (QLoRA, https://arxiv.org/abs/2305.14314).

Which modules are quantised, and what becomes of their weights, is transformers' decision, as under its
`BitsAndBytesConfig`: all linear layers (and `Conv1D`) but the output head and what is tied to it. A quantised weight is
a parameter of bytes with two weights in each. Its scales (`Linear4bit.quant_state`) are tensors that are no parameters:
no ZeRO stage splits them, and every rank has them all.

Weights are computed with in the run's precision, which they are quantised from.
"""

import copy
import functools
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.errors import PlanMismatchError, RequestError
from frugal.models import adapters, transformers_internals
from frugal.models.loading import bitsandbytes_internals
from frugal.planning.model_facts import Packed
from frugal.planning.plan import Plan


def config(dtype: torch.dtype) -> Any:
    """Return transformers' configuration of the quantisation; `dtype` is the run's precision.

    Raises:
        RequestError: bitsandbytes is not installed, or lacks what is used of it.
    """
    if sys.modules.get("bitsandbytes", importlib.util) is None or importlib.util.find_spec("bitsandbytes") is None:
        raise RequestError(
            "--quantize needs bitsandbytes, which is not installed",
            because="its kernels pack and unpack the weights",
            hint="pip install bitsandbytes",
        )
    bitsandbytes_internals.library()
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def apply(model: Any, *, reference: str, dtype: torch.dtype) -> nn.Module:
    """Quantise a model that is whole in this process or on meta, each weight where it is; the same model.

    Raises:
        RequestError: it is no model of transformers, or has nothing to quantise, or bitsandbytes is not installed.
    """
    from transformers import PreTrainedModel
    from transformers.quantizers import AutoHfQuantizer

    if not isinstance(model, PreTrainedModel):
        raise RequestError(
            f"--quantize is impossible for {reference}",
            because=f"a {type(model).__name__} is no model of transformers, which knows what of a model to quantise",
            hint="leave --quantize out, or quantise it in its factory",
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
    if not are_in(model):
        raise RequestError(
            f"--quantize is impossible for {reference}",
            because=f"a {type(model).__name__} has no linear layer besides its output head",
            hint="leave --quantize out",
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
    bnb = bitsandbytes_internals.library()

    weight = weight if module.source_cls is nn.Linear else weight.T
    settings = {"quant_type": module.weight.quant_type, "quant_storage": module.weight.quant_storage}
    settings["compress_statistics"] = module.weight.compress_statistics
    settings["blocksize"] = module.weight.blocksize
    packed, scales = bnb.functional.quantize_4bit(weight.contiguous(), **settings)
    module.quant_state = scales
    kind = _on_meta() if packed.is_meta else bnb.nn.Params4bit
    return kind(packed, requires_grad=False, quant_state=scales, module=module, bnb_quantized=True, **settings)


@functools.cache
def _on_meta() -> Any:
    """Return bitsandbytes' class of weights, made to be copied on meta. It has the same name: peft looks at it."""
    bnb = bitsandbytes_internals.library()

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
        layer = bitsandbytes_internals.library().nn.Linear4bit
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
    return bitsandbytes_internals.library().functional.dequantize_4bit(module.weight.data, module.quant_state)
