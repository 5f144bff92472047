"""Models that DeepSpeed trains wrongly, or crashes on: they are refused by name, in dry runs and in training.

The structure of a module is checked before its engine is made, its behaviour in the first forward, where DeepSpeed's
hooks run. `tests/deepspeed_adapter/test_refusals.py` shows the effect of each before it was refused.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from typing import Any

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.utils.torch import is_functorch_transforming
from torch import Tensor, nn
from torch.utils import checkpoint

from frugal import errors, torch_internals
from frugal.deepspeed_adapter import placement, zero3_graph
from frugal.deepspeed_adapter.stages import Zero
from frugal.errors import RequestError
from frugal.required import in_place_of, put

_LOWER = "use --zero-stage 2 or lower"


def refuse(model: nn.Module, zero_stage: int) -> None:
    """Refuse a module with parameters that cannot be trained, or not under this stage.

    Raises:
        RequestError: with the name of the first.
    """
    is_split = zero_stage == 3
    for name, parameter in model.named_parameters():
        errors.refuse(
            (
                parameter.requires_grad and parameter.is_complex(),
                f"the parameter `{name}` cannot be trained",
                f"it is complex ({parameter.dtype}), and DeepSpeed adds up real gradients only",
                "keep its real and imaginary parts in a real parameter of shape (..., 2), and take "
                "torch.view_as_complex of it in the forward",
            ),
            (
                is_split and not placement.num_elements(parameter),
                f"ZeRO-3 cannot gather the parameter `{name}`",
                f"it has no elements (shape {tuple(parameter.shape)})",
                f"leave the parameter out, or {_LOWER}",
            ),
        )
    for name, module in model.named_modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        errors.refuse(
            (
                is_embedding and module.sparse and module.weight.requires_grad,
                f"the gradient of `{name}` cannot be added up over ranks",
                f"{type(module).__name__}(sparse=True) makes it sparse, and DeepSpeed's buckets are dense",
                "use sparse=False: its gradient has the same values",
            ),
            (
                is_split and "_orig_mod" in dict(module.named_children()),
                f"ZeRO-3 cannot gather the parameters of `{name or 'the model'}`",
                "it is a wrapper that torch.compile made, whose parameters DeepSpeed's hooks do not find",
                f"compile it in place: module.compile() instead of torch.compile(module); or {_LOWER}",
            ),
            (
                isinstance(module, torch.jit.ScriptModule),
                f"the memory of `{name or 'the model'}` cannot be dry-run",
                "torch.jit has scripted or traced it, and it takes no hooks",
                "leave torch.jit out; module.compile() fuses kernels, too",
            ),
        )
    for one, other in _overlapping(model):
        raise RequestError(
            f"the parameters `{one}` and `{other}` are two, but lie in the same memory",
            because="DeepSpeed moves each to a place of its own, where they would be trained apart",
            hint=f"to tie them, assign the parameter itself ({other} = {one}); otherwise clone the second one",
        )


def _overlapping(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of parameters that share memory, one of which is trained."""
    by_storage: dict[int, dict[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.numel() and parameter.layout is torch.strided:
            by_storage.setdefault(torch_internals.address(parameter.data), {})[name] = parameter
    for kept in by_storage.values():
        for (name, one), (other_name, other) in combinations(kept.items(), 2):
            if (one.requires_grad or other.requires_grad) and _share(one, other):
                yield name, other_name


def _share(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    (first, end), (other_first, other_end) = _extent(one), _extent(other)
    if one.dtype != other.dtype or first >= other_end or other_first >= end:
        return first < other_end and other_first < end
    with torch_internals.without_modes():
        taken = torch.zeros(max(end, other_end), dtype=torch.bool, device="cpu")
        taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
        return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the place of the first element in the storage, and the one behind the last."""
    first = tensor.storage_offset()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(first), int(first) + 1 + sum((int(size) - 1) * int(step) for size, step in steps)


def refuse_while_running(zero: Zero) -> None:
    """Refuse, from now on, forwards that this stage cannot differentiate."""
    engine = zero.engine

    @in_place_of(engine, "_backward_prologue")
    def begin_backward(prologue: Callable[[], None]) -> None:
        if not engine._running_engine_backward and not is_functorch_transforming():
            raise RequestError(
                "the loss takes a gradient of the model's output before the step's backward pass (a gradient penalty?)",
                because="DeepSpeed takes that for the backward pass: it divides its gradients, or dies",
                hint="take it inside the module's forward, which may return a penalty beside its output, under "
                "ZeRO-0 to 2",
            )
        prologue()

    if zero.strategy.zero_stage != 3:
        return
    put(parameter_offload, "apply_to_tensors_only", zero3_graph.apply_to_tensors)
    offload = zero.optimizer.parameter_offload
    for each in zero3_graph.gathering(engine.module):
        each.register_forward_hook(partial(_refuse_after_forward, zero), prepend=True)

    @in_place_of(offload, "pre_sub_module_forward_function")
    def gather_for_forward(gather: Callable[[nn.Module], Any], module: nn.Module) -> Any:
        if is_functorch_transforming():
            raise RequestError(
                f"ZeRO-3 cannot run {_named(zero, module)} inside a transform of torch.func",
                because="vmap, grad and their like do not see the hooks that gather its parameters",
                hint=_LOWER,
            )
        if torch.is_inference_mode_enabled():
            raise RequestError(
                f"ZeRO-3 cannot run {_named(zero, module)} in torch.inference_mode",
                because="what is gathered there can be used in no backward",
                hint=f"use torch.no_grad instead, or {_LOWER}",
            )
        is_kept = any(type(mode).__module__ == checkpoint.__name__ for mode in torch_internals.modes())
        if is_kept and isinstance(module, nn.Linear) and module.bias is not None:
            raise RequestError(
                f"ZeRO-3 cannot run {_named(zero, module)} under torch's selective activation checkpointing",
                because="it adds the bias to a kept product in place, and again when the layer is recomputed",
                hint="leave context_fn out: --activation-checkpointing selective keeps the products, too; or " + _LOWER,
            )
        _refuse_others(zero, module)
        return gather(module)

    @in_place_of(offload, "pre_sub_module_backward_function")
    def gather_for_backward(gather: Callable[[nn.Module], Any], module: nn.Module) -> Any:
        if torch.is_grad_enabled() and not engine._running_engine_backward:
            raise RequestError(
                f"ZeRO-3 cannot differentiate {_named(zero, module)} twice",
                because="a gradient is taken with create_graph=True, and its parameters are let go after the first",
                hint=_LOWER,
            )
        return gather(module)


def _refuse_after_forward(zero: Zero, module: nn.Module, _inputs: Any, output: Any) -> None:
    """Refuse new parameters, and an output in which DeepSpeed cannot look for tensors. Raises: RequestError."""
    _refuse_others(zero, module)
    zero3_graph.apply_to_kept(module.pre_bwd_fn.apply, module)  # type: ignore[union-attr, arg-type]  # DeepSpeed's
    if output is not None and not isinstance(output, tuple | list | dict) and not hasattr(output, "__dict__"):
        raise RequestError(
            f"ZeRO-3 cannot run {_named(zero, module)}, which returns a {type(output).__name__}",
            because="DeepSpeed looks for tensors in tuples, lists, dicts and attributes of objects",
            hint=f"return one of these, such as a dataclass without slots, or {_LOWER}",
        )


def _refuse_others(zero: Zero, module: nn.Module) -> None:
    """Refuse a module that has other parameters than when the engine was made. Raises: RequestError."""
    # `parameters()` takes ten times as long, twice a module and forward
    if any(each is not None and not hasattr(each, "ds_status") for each in module._parameters.values()):
        raise RequestError(
            f"ZeRO-3 cannot run {_named(zero, module)} with other tensors than its parameters",
            because="forward has made some, or torch.func.functional_call has put them there, and DeepSpeed gathers "
            "only those of which the engine was made",
            hint=f"make them in __init__, or {_LOWER}",
        )


def _named(zero: Zero, module: nn.Module) -> str:
    name = next((name for name, each in zero.engine.module.named_modules() if each is module), "")
    return f"`{name}` ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
