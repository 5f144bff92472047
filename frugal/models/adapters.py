"""Adapters around a base model, by peft: the base is frozen, what is added is trained.

Adapters have the run's precision, as under DeepSpeed elsewhere: its engine casts all of a model to the run's precision,
and its optimizer keeps the fp32 copies that are updated. (peft alone would make adapters of a bf16 base fp32, and with
them their activations.) Their first weights depend on the seed, not on how the base came to be.
"""

import difflib
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugal.config.adapters import ALL_LINEAR, Lora
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.errors import RequestError, failure, refuse
from frugal.planning.plan import Plan

TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM", "sequence-classification": "SEQ_CLS"}
"""peft's names of our tasks; it needs no wrapper for others. With `SEQ_CLS` it trains the head, too."""


def add(
    model: nn.Module, lora: Lora, task: str, *, dtype: torch.dtype, device: torch.device, seed: int = 0,
    base: str | None = None,
) -> nn.Module:  # fmt: skip
    """Freeze `model` and add adapters to it; return peft's model around it.

    `base`: the folder or hub name of the model's weights, which is written beside saved adapters.

    Raises:
        RequestError: it has adapters already, or no modules of these names, or peft has no adapter for them.
    """
    import peft

    refuse(
        (
            are_in(model),
            "--lora was given for a model that has adapters already",
            f"its factory makes a {type(model).__name__} with peft's adapters",
            "leave --lora out: what its factory leaves trainable is trained",
        )
    )
    not_adaptable = _without_tensor_outputs(model)
    _check_targets(model, lora, not_adaptable)
    torch.manual_seed(seed)
    alpha: Any = int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha  # peft says int, and takes any
    what = f"peft cannot make the adapters of --lora {lora} for {type(model).__name__}"
    failing = failure(what, hint="name other modules: --lora r=16,targets=NAME,NAME")
    with failing, torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes transposed weights for what they are, and the like
        config = peft.LoraConfig(
            r=lora.rank,
            lora_alpha=alpha,
            lora_dropout=lora.dropout,
            target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
            exclude_modules=not_adaptable or None,
            use_dora=lora.dora,
            task_type=TASK_TYPES.get(task),
        )
        adapted: Any = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for parameter in adapted.parameters():  # peft gives them the base's dtype, but not on meta
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    made = adapted.peft_config["default"]
    if isinstance(made.target_modules, set):  # which would be written in another order each time
        made.target_modules = sorted(made.target_modules)
    if base is not None:
        made.base_model_name_or_path = str(Path(base).absolute()) if Path(base).exists() else base
    return adapted


def as_planned(model: nn.Module, plan: Plan) -> nn.Module:
    """Return `model` with the planned adapters, unless it was built with them. Raises as `add`."""
    lora = plan.request.lora
    if lora is None or are_in(model):
        return model
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return add(model, lora, plan.model.task, dtype=DTYPES[plan.request.precision], device=device)


def are_in(model: nn.Module) -> bool:
    """Return whether it has adapters of peft's."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return hasattr(model, "peft_config") or any(isinstance(module, BaseTunerLayer) for module in model.modules())


def _without_tensor_outputs(model: nn.Module) -> list[str]:
    """Return the names of linear layers whose forward returns no tensor, such as routers of experts."""
    without = []
    for name, module in model.named_modules():
        is_own = isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
        with torch.no_grad(), suppress(Exception):  # one of bitsandbytes; its forward may take more
            if is_own and not isinstance(module(module.weight[:1]), Tensor):
                without.append(name)
    return without


def _check_targets(model: nn.Module, lora: Lora, not_adaptable: Sequence[str]) -> None:
    """Refuse names that no module has, of which peft would only warn, and those of layers that it cannot adapt.

    Raises:
        RequestError: the first of them, with names that are near.
    """
    from transformers.pytorch_utils import Conv1D

    if lora.targets == (ALL_LINEAR,):
        return
    modules = dict(model.named_modules())
    last = {name: name if (end := name.rpartition(".")[2]).isdigit() else end for name in modules}
    for target in lora.targets:
        if name := next((name for name in not_adaptable if f".{name}".endswith(f".{target}")), None):
            raise RequestError(
                f"`{target}`, a target of --lora, cannot have adapters",
                because=f"the forward of {name}, a {type(modules[name]).__name__}, returns no tensor",
                hint=f"name other modules, or --lora r={lora.rank}: {ALL_LINEAR} leaves such layers out",
            )
        if target not in modules and not any(name.endswith(f".{target}") for name in modules):
            known = sorted({last[name] for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)})
            near = difflib.get_close_matches(target, known, n=1) or known[:8]
            raise RequestError(
                f"`{target}`, a target of --lora, is no module of {type(model).__name__}",
                because=f"its linear layers are called {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}",
                hint=f"use --lora r={lora.rank},targets={','.join(near)}, or {ALL_LINEAR}" if near else None,
            )
