"""A pretended GPU for code that says `cuda`: its tensors are meta tensors that report the device `cuda:0`.

`PretendedCard` sees every function of torch before it runs. It replaces `cuda` by `meta` where a device is named, and
`meta` by `cuda` where one is returned. torch's own decisions follow from that: optimizers take their foreach and
fused forms, `GradScaler` and `torch.utils.checkpoint` work for a GPU, and nothing looks for a driver.

It does not see functions that C++ calls itself; they work on the tensors they get.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from frugal import torch_internals
from frugal.tools.own_loop import autocast, torch_cuda
from frugal.tools.own_loop.tracker import LoopTracker, asks_for_deepspeed, is_deepspeed

CARD = torch.device("cuda", 0)
META = torch.device("meta")
DEFAULT = torch.device("meta", 0)
"""Stands for the card where a default device is asked for: torch passes it on to us as if the script had named it, and
ignores the index. A script that names the meta device gives none."""

Rule = Callable[["PretendedCard", Any, tuple[Any, ...], dict[str, Any]], Any]


class ValuesNeededError(Exception):
    """An error of a script that reads values of tensors on the card, which a dry run does not have."""


class PretendedCard(TorchFunctionMode):
    """A mode that runs functions of torch as if there were a GPU."""

    def __init__(self, tracker: LoopTracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one function, with its own rule if there is one."""
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, func, args, kwargs)
        if func in _PROPERTIES or getattr(func, "__name__", "") in _ONLY_NAMES_A_DEVICE:
            return func(*args, **kwargs)
        return self.on_card(func, args, kwargs)

    def on_card(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function with the devices that it names replaced by those that exist."""
        named = [kwargs["device"]] if kwargs.get("device") is not None else []
        named += [value for value in args if isinstance(value, torch.device)]
        if not named and not (args and any(isinstance(value, str) for value in args)):
            return func(*args, **kwargs)
        is_elsewhere = any(map(_is_elsewhere, (*named, *args)))  # before they are replaced
        args = tuple(map(_placed, args))
        if "device" in kwargs:
            kwargs = kwargs | {"device": placed(kwargs["device"])}
        if is_elsewhere and not asks_for_deepspeed(sys._getframe(1)):
            with self.tracker.elsewhere():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def is_on_card(self, tensor: Any) -> bool:
        """Return whether `tensor` is a tensor on the card."""
        return isinstance(tensor, Tensor) and self.tracker.is_on_card(tensor)


def is_card(device: Any) -> bool:
    """Return whether `device` names the card."""
    if isinstance(device, torch.device):
        return device.type == "cuda" or device == DEFAULT
    return device is not None and not isinstance(device, bool) and (isinstance(device, int) or _is_name(device))


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))


def _is_elsewhere(device: Any) -> bool:
    """Return whether `device` is torch's own meta device."""
    if isinstance(device, torch.device):
        return device.type == "meta" and device.index is None
    return isinstance(device, str) and device == "meta"


def placed(device: Any) -> Any:
    """Return the device that stands for the named one."""
    return META if is_card(device) else device


def _placed(value: Any) -> Any:
    """Replace a positional argument that names the card. Numbers are not devices there."""
    return META if (isinstance(value, torch.device) and is_card(value)) or _is_name(value) else value


# Functions with a rule of their own


def _device(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real = func(*args)
    return CARD if real.type == "meta" and not is_deepspeed(sys._getframe(2)) and card.is_on_card(args[0]) else real


def _is_cuda(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return card.is_on_card(args[0])


def _is_meta(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    on_card = card.is_on_card(args[0]) and not is_deepspeed(sys._getframe(2))
    return bool(func(*args)) and not on_card


def _get_device(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return 0 if card.is_on_card(args[0]) else -1


def _cuda(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _to(card, Tensor.to, (args[0], CARD), {k: v for k, v in kwargs.items() if k in ("non_blocking",)})


def _to(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move a tensor. One on torch's own meta device also comes to the card, as if it had values."""
    tensor, *rest = args
    rest = [CARD if type(value) is int else value for value in rest[:1]] + rest[1:]
    goes_to_card = any(map(is_card, (*rest[:1], kwargs.get("device")))) or (
        rest and isinstance(rest[0], Tensor) and card.is_on_card(rest[0])
    )
    if goes_to_card and tensor.is_meta and not card.is_on_card(tensor):
        dtype = kwargs.get("dtype") or next((v for v in rest if isinstance(v, torch.dtype)), tensor.dtype)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=META)
    return card.on_card(func, (tensor, *rest), kwargs)


def _empty_like(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_card(kwargs.get("device")) and args[0].is_meta and not card.is_on_card(args[0]):  # `Module.to_empty`
        like = args[0]
        return torch.empty_strided(like.size(), like.stride(), dtype=kwargs.get("dtype") or like.dtype, device=META)
    return card.on_card(func, args, kwargs)


def _backward(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False)) | kwargs
    with card:  # recomputation in backward runs the script's code, too
        torch.autograd.backward(
            args[0],
            given.get("gradient"),
            given.get("retain_graph"),
            given.get("create_graph", False),
            inputs=given.get("inputs"),
        )


def _values(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if card.is_on_card(args[0]):
        raise ValuesNeededError(f"Tensor.{func.__name__}() reads the values of a tensor on the card")
    return func(*args, **kwargs)


def _is_false(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return whether numbers are NaN or infinite, and whether any is, and remember that none is."""
    out: Tensor = card.on_card(func, args, kwargs)
    if func in _NOT_FINITE or torch_internals.address(args[0]) in card.tracker.false:
        card.tracker.false.add(torch_internals.address(out))
    return out


def _format(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    tensor, spec = args
    return format(tensor.item(), spec) if card.is_on_card(tensor) and tensor.dim() == 0 else str(func(*args))


def _itself(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _nothing(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    card.tracker.note(torch_cuda.SIDE_STREAMS)


def _softmax(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run fp16 to fp32 in one kernel, see `autocast.HALF_TO_FLOAT`."""
    value, dtype = args[0], kwargs.get("dtype") or next((v for v in args if isinstance(v, torch.dtype)), None)
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if card.is_on_card(value) and autocast.is_half_to_float(value, dtype) and dim is not None:
        is_log = func in (F.log_softmax, Tensor.log_softmax, torch.log_softmax)
        kernel = torch.ops.aten._log_softmax.default if is_log else torch.ops.aten._softmax.default
        return kernel(value, dim, True)
    return card.on_card(func, args, kwargs)


def _ctc_loss(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the loss with lengths that may be on the host."""
    return card.on_card(func, tuple(each.to(META) if isinstance(each, Tensor) else each for each in args), kwargs)


def _set_data(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Set `tensor.data` across devices, which torch does not allow between a host and its meta device."""
    tensor, value = args
    if tensor.is_meta == value.is_meta:
        return func(*args)
    value = value.detach()
    if isinstance(tensor, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
    torch_internals.exchange(tensor, value)
    return None


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_setter = Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor, whatever the stubs say

_NOT_FINITE = (torch.isnan, torch.isinf, Tensor.isnan, Tensor.isinf)

_RULES: dict[Any, Rule] = {
    **dict.fromkeys((*_NOT_FINITE, torch.any, Tensor.any), _is_false),
    _getter("device"): _device, _getter("is_cuda"): _is_cuda, _getter("is_meta"): _is_meta,
    Tensor.get_device: _get_device, Tensor.cuda: _cuda, Tensor.to: _to, torch.empty_like: _empty_like,
    Tensor.backward: _backward, Tensor.tolist: _values, Tensor.numpy: _values, Tensor.__array__: _values,
    Tensor.__format__: _format, Tensor.pin_memory: _itself, Tensor.record_stream: _nothing,
    _setter: _set_data, F.ctc_loss: _ctc_loss, F.softmax: _softmax, F.log_softmax: _softmax, torch.softmax: _softmax,
    torch.log_softmax: _softmax, Tensor.softmax: _softmax, Tensor.log_softmax: _softmax,
}  # fmt: skip

_PROPERTIES = {_getter(name) for name in ("shape", "dtype", "grad", "requires_grad", "is_leaf", "data", "grad_fn")}
"""Frequently read properties, none of which names a device."""

_ONLY_NAMES_A_DEVICE = ("device", "_parse_to")  # `torch.device`, and what `Module.to` asks


# The world around a script


@contextmanager
def pretended_card(tracker: LoopTracker, *, name: str, total_bytes: int, capability: tuple[int, int]) -> Iterator[None]:
    """Run a script inside the `with` block on a card of `total_bytes`.

    `Module.cuda` keeps its parameters, so that ties and optimizers hold, as from a host to a GPU: between a host and a
    meta device torch makes new ones, unless it is to swap.
    """
    autograd = torch.autograd
    phases = {"backward": _marked(tracker, autograd.backward), "grad": _marked(tracker, autograd.grad)}
    with (
        torch_cuda.on_pretended_card(tracker, name=name, total_bytes=total_bytes, capability=capability),
        _default_devices(tracker),
        _grouping(),
        patch.object(torch.__future__, "get_swap_module_params_on_conversion", lambda: True),
        patch.object(torch.utils, "swap_tensors", _move),
        patch.multiple(autograd, **phases),
        _attention(),
        patch.dict(torch_internals.DETERMINISM_CHECKS, default=_shape_and_type),
        autocast.on_meta(),
        tracker,
        PretendedCard(tracker),
    ):
        yield


def _default_devices(tracker: LoopTracker) -> AbstractContextManager[Any]:
    """Patch the mode of `with torch.device(...)` and `torch.set_default_device`, which torch asks after ours."""
    context = torch_internals.DEVICE_CONTEXT
    begin, enter, leave = context.__init__, context.__enter__, context.__exit__

    def init(self: Any, device: Any) -> None:
        begin(self, DEFAULT if is_card(device) else device)
        is_elsewhere = _is_elsewhere(device) and not asks_for_deepspeed(sys._getframe(1))
        self.elsewhere = tracker.elsewhere() if is_elsewhere else nullcontext()

    def enter_elsewhere(self: Any) -> Any:
        self.elsewhere.__enter__()
        return enter(self)

    def leave_elsewhere(self: Any, *exception: Any) -> Any:
        self.elsewhere.__exit__(None, None, None)
        return leave(self, *exception)

    return patch.multiple(context, __init__=init, __enter__=enter_elsewhere, __exit__=leave_elsewhere)


def _grouping() -> AbstractContextManager[Any]:
    """Patch the grouping of tensors by device, which optimizers and clipping do in C++."""
    group = torch_internals.grouped

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {
            (CARD if device.type == "meta" else device, dtype): value
            for (device, dtype), value in group(*args, **kwargs).items()
        }

    return patch(torch_internals.GROUPING, grouped)


def _move(old: Tensor, new: Tensor) -> None:
    """Make a parameter that was moved the new tensor. On one device, from a type to another, the old tensor ends at
    once, as in `param.data = ...`."""
    if old.device.type == new.device.type:
        old.data = new
    else:
        torch_internals.exchange(old, new)


def _marked(tracker: LoopTracker, run: Callable[..., Any]) -> Callable[..., Any]:
    def backward(*args: Any, **kwargs: Any) -> Any:
        with tracker.backward():
            return run(*args, **kwargs)

    return backward


def _shape_and_type(tensor: Tensor) -> dict[str, Any]:
    """Return what activation checkpointing compares of a recomputed tensor: not its device, of which hooks within
    autograd functions, such as DeepSpeed's under ZeRO-3, see the real one."""
    return {"shape": tensor.shape, "dtype": tensor.dtype}


def _attention() -> AbstractContextManager[Any]:
    """Cast the inputs of attention under autocast, whichever kernel it calls."""
    chosen = F.scaled_dot_product_attention

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kw: Any
    ) -> Any:
        if not torch.is_autocast_enabled("cuda"):
            return chosen(query, key, value, attn_mask, *args, **kw)
        dtype = autocast.lower_precision()
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
        value, key, query = (each.to(dtype) for each in (value, key, query))
        with torch_internals.without_autocast():
            return chosen(query, key, value, attn_mask, *args, **kw)

    return patch.object(F, "scaled_dot_product_attention", attention)
