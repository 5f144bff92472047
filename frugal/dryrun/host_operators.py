"""Operators on host tensors in a rehearsal: what they return, without reading or writing host memory.

Host tensors of a rehearsal are real but never touched, so their pages cost nothing. Small ones may hold numbers that
decide what the program does next; on those alone operators really run.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from frugal.dryrun.host_pages import untouched

aten = torch.ops.aten

UNTOUCHED_ELEMENTS = 1 << 14  # host tensors above this size are never read or written

_FACTORIES = {aten.zeros.default, aten.full.default, aten.ones.default, aten.empty.memory_format}
_CROSSING = {aten.copy_.default, aten._to_copy.default, *_FACTORIES}  # may lead from device to host


def is_untouched(value: Any) -> bool:
    """Whether it is a host tensor that must be neither read nor written."""
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() > UNTOUCHED_ELEMENTS


def stand_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's result if it reads or writes big host tensors, or copies between host and device.

    Nothing is copied and nothing written: outputs are uninitialised. `NotImplemented` where the operator may run.
    """
    return _result(func, args, kwargs) if func in _CROSSING or _reads_host(args) else NotImplemented


def _reads_host(args: tuple[Any, ...]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            if not value.is_meta:
                return True
        elif isinstance(value, (list, tuple)) and _reads_host(value):  # type: ignore[arg-type]  # of tensors or numbers
            return True
    return False


def _result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    if func is aten.copy_.default and args[0].device != args[1].device:
        return args[0]
    if func is aten._to_copy.default and to_host and args[0].is_meta:
        dtype = kwargs.get("dtype") or args[0].dtype
        return untouched(args[0].size(), args[0].stride(), dtype)
    if func in _FACTORIES and to_host and math.prod(args[0]) > UNTOUCHED_ELEMENTS:
        return untouched(args[0], None, kwargs.get("dtype") or torch.get_default_dtype())
    if not any(is_untouched(value) for value in _flat(args)):
        return NotImplemented
    arguments = func._schema.arguments
    if func._schema.is_mutable and arguments[0].alias_info is not None and arguments[0].alias_info.is_write:
        return args[0]
    if any(argument.alias_info is not None for argument in arguments):
        return NotImplemented  # a view
    return _uninitialised(func, args, kwargs, target)


def _uninitialised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
    """A result of the right shape: computed on meta, made where it belongs."""
    on_meta = func(*_to_meta(args), **{name: "meta" if name == "device" else value for name, value in kwargs.items()})
    if not isinstance(on_meta, Tensor):
        return NotImplemented
    device = "cpu" if target is None else torch.device(target).type
    if device == "cpu":
        return untouched(on_meta.size(), on_meta.stride(), on_meta.dtype)
    return torch.empty_strided(on_meta.size(), on_meta.stride(), dtype=on_meta.dtype, device=device)


def _to_meta(values: Any) -> Any:
    if isinstance(values, Tensor):
        return values.to("meta")
    return type(values)(map(_to_meta, values)) if isinstance(values, (tuple, list)) else values


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
