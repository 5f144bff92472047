"""A pretended GPU for code that says `cuda`: its tensors are meta tensors that report the device `cuda:0`.

`PretendedCard` sees every function of torch before it runs. It replaces `cuda` by `meta` where a device is named, and
`meta` by `cuda` where one is returned. torch's own decisions follow from that: optimizers take their foreach and
fused forms, `GradScaler` and `torch.utils.checkpoint` work for a GPU, and nothing looks for a driver.

It does not see functions that C++ calls itself; they work on the tensors they get.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from frugal import torch_internals
from frugal.config.hardware.cluster import MOST_THREADS, PROCESSOR_THREADS, Capability, Device
from frugal.tools.own_loop import autocast
from frugal.tools.own_loop.tracker import LoopTracker, asks_for_deepspeed, imports_a_library, package_of

CARD = torch.device("cuda", 0)
META = torch.device("meta")
DEFAULT = torch.device("meta", 0)
"""Stands for the card where a default device is asked for: torch passes it on to us as if the script had named it, and
ignores the index. A script that names the meta device gives none."""

SIDE_STREAMS = "work on side streams is counted as if all of it were on one"
OTHER_CARDS = "another card than cuda:0 is named: what is on it is counted on this one"
COMPILED = "torch.compile is counted as eager: compiled kernels may take less"

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
        if func in _PROPERTIES:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _ONLY_NAMES_A_DEVICE:
            named = {name: _numbered(value) if name == "device" else value for name, value in kwargs.items()}
            return func(*map(_numbered, args[:1]), *args[1:], **named)
        return self.on_card(func, args, kwargs)

    def on_card(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function with the devices that it names replaced by those that exist."""
        named = [kwargs["device"]] if kwargs.get("device") is not None else []
        named += [value for value in args if isinstance(value, torch.device)]
        if not named and not (args and any(isinstance(value, str) for value in args)):
            return func(*args, **kwargs)
        is_elsewhere = any(map(_is_elsewhere, (*named, *args)))  # before they are replaced
        if any(
            is_card(each) and str(each) not in ("cuda", "cuda:0", str(DEFAULT))
            for each in (*named, *args)
            if isinstance(each, (torch.device, str))
        ):
            self.tracker.note(OTHER_CARDS)
        # numbers that are given by position are no devices
        args = tuple(META if isinstance(each, (torch.device, str)) and is_card(each) else each for each in args)
        if is_card(kwargs.get("device")):
            kwargs = kwargs | {"device": META}
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
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    return isinstance(device, int) and not isinstance(device, bool)


def _numbered(device: Any) -> Any:
    """Return the card that has a number; a device that has none as it is."""
    return torch.device("cuda", device) if type(device) is int else device


def _is_elsewhere(device: Any) -> bool:
    """Return whether `device` is torch's own meta device."""
    if isinstance(device, torch.device):
        return device.type == "meta" and device.index is None
    return isinstance(device, str) and device == "meta"


# Functions with a rule of their own


def _device(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    real = func(*args)
    is_shown = real.type == "meta" and package_of(sys._getframe(2)) != "deepspeed"
    return CARD if is_shown and card.is_on_card(args[0]) else real


def _is_meta(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    on_card = card.is_on_card(args[0]) and package_of(sys._getframe(2)) != "deepspeed"
    return bool(func(*args)) and not on_card


def _to(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Move a tensor. One on torch's own meta device also comes to the card, as if it had values."""
    tensor, *rest = args
    rest = [*map(_numbered, rest[:1]), *rest[1:]]
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


def _nothing(card: PretendedCard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    card.tracker.note(SIDE_STREAMS)


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


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_setter = Tensor.data.__set__  # type: ignore[attr-defined]  # a descriptor, whatever the stubs say

_NOT_FINITE = (torch.isnan, torch.isinf, Tensor.isnan, Tensor.isinf)

_RULES: dict[Any, Rule] = {
    **dict.fromkeys((*_NOT_FINITE, torch.any, Tensor.any), _is_false),
    _getter("is_cuda"): lambda card, _, args, __: card.is_on_card(args[0]),
    Tensor.get_device: lambda card, _, args, __: 0 if card.is_on_card(args[0]) else -1,
    Tensor.pin_memory: lambda _, __, args, ___: args[0],
    _getter("device"): _device, _getter("is_meta"): _is_meta,
    Tensor.cuda: lambda card, _, args, kwargs: _to(
        card, Tensor.to, (args[0], CARD if args[1:2] in ((), (None,)) else args[1]),
        {name: value for name, value in kwargs.items() if name == "non_blocking"},
    ),
    Tensor.to: _to, torch.empty_like: _empty_like,
    Tensor.backward: _backward, Tensor.tolist: _values, Tensor.numpy: _values, Tensor.__array__: _values,
    Tensor.__format__: _format, Tensor.record_stream: _nothing,
    _setter: _set_data, F.ctc_loss: _ctc_loss,
}  # fmt: skip

_PROPERTIES = {_getter(name) for name in ("shape", "dtype", "grad", "requires_grad", "is_leaf", "data", "grad_fn")}
"""Frequently read properties, none of which names a device."""

_ONLY_NAMES_A_DEVICE = ("device", "_parse_to")  # `torch.device`, and what `Module.to` asks


# The world around a script


@contextmanager
def pretended_card(tracker: LoopTracker, device: Device, capability: Capability) -> Iterator[None]:
    """Run a script inside the `with` block on a card like `device`.

    `Module.cuda` keeps its parameters, so that ties and optimizers hold, as from a host to a GPU: between a host and a
    meta device torch makes new ones, unless it is to swap.
    """
    with (
        _on_torch_cuda(tracker, device, capability),
        _default_devices(tracker),
        _grouping(),
        patch.object(torch.__future__, "get_swap_module_params_on_conversion", lambda: True),
        patch.object(torch.utils, "swap_tensors", _move),
        patch.multiple(
            torch.autograd,
            backward=_marked(tracker, torch.autograd.backward),
            grad=_marked(tracker, torch.autograd.grad),
        ),
        _attention(),
        # of a recomputed tensor activation checkpointing is not to compare the device, of which hooks within autograd
        # functions, such as DeepSpeed's under ZeRO-3, see the real one
        patch.dict(
            torch_internals.DETERMINISM_CHECKS, default=lambda tensor: {"shape": tensor.shape, "dtype": tensor.dtype}
        ),
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


# `torch.cuda`: fixed answers that need no driver. Other names stay torch's own, which fail on a build without CUDA.


class PretendedStream(AbstractContextManager["PretendedStream"]):
    """A CUDA stream, or an event on one, that never waits."""

    cuda_stream = 0
    device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", 0)

    def __exit__(self, *_: Any) -> None:
        return None

    def elapsed_time(self, _end: Any) -> float:
        """Return milliseconds."""
        return 1.0

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    record = wait = synchronize = wait_event = wait_stream = is_capturing = _nothing

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or PretendedStream()


class PretendedGenerator(torch.Generator):
    """A generator of random numbers, which is the host's whatever device it says."""

    def __new__(cls, device: Any = "cpu") -> Any:
        """Make one; torch's own would ask for a driver."""
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self.named = torch.device("cuda", 0) if str(device).partition(":")[0] == "cuda" else torch.device(device)

    device = property(lambda self: self.named)


@contextmanager
def _on_torch_cuda(tracker: LoopTracker, device: Device, capability: Capability) -> Iterator[None]:
    """Replace names of `torch.cuda`, and others of torch, inside the `with` block."""
    total_bytes = device.memory_bytes
    properties = SimpleNamespace(
        name=device.name, total_memory=total_bytes, major=capability[0], minor=capability[1],
        multi_processor_count=device.multiprocessors, gcnArchName="", warp_size=32, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=PROCESSOR_THREADS.get(capability, MOST_THREADS),
        shared_memory_per_block=48 << 10, shared_memory_per_multiprocessor=164 << 10, is_integrated=0,
        L2_cache_size=40 << 20,
    )  # fmt: skip
    constant: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": 1, "current_device": 0,
        "get_device_name": device.name,
        "get_device_capability": capability, "get_device_properties": properties,
        "init": None, "synchronize": None, "set_device": None,
        "ipc_collect": None, "manual_seed": None, "manual_seed_all": None, "seed": None,
        "set_per_process_memory_fraction": None,
        "reset_accumulated_memory_stats": None, "memory_summary": "", "get_arch_list": ["sm_80", "sm_90"],
        "utilization": 0, "set_rng_state": None, "_lazy_init": None, "set_stream": None,
        "is_current_stream_capturing": False, "can_device_access_peer": False,
    }  # fmt: skip
    table: dict[str, Any] = {key: _always(value) for key, value in constant.items()}
    table |= {
        "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
        "mem_get_info": lambda *_: (total_bytes - device.context_bytes - tracker.current[1], total_bytes),
        "empty_cache": tracker.empty_cache,
        "memory_allocated": lambda *_: tracker.current[0],
        "max_memory_allocated": lambda *_: tracker.peaks[0],
        "memory_reserved": lambda *_: tracker.current[1],
        "max_memory_reserved": lambda *_: tracker.peaks[1],
        "reset_peak_memory_stats": tracker.reset_peaks, "reset_max_memory_allocated": tracker.reset_peaks,
        "reset_max_memory_cached": tracker.reset_peaks,
        "memory_stats": lambda *_: defaultdict(int, {
            f"{what}_bytes.all.{when}": value
            for when, (allocated, reserved) in (("current", tracker.current), ("peak", tracker.peaks))
            for what, value in (("allocated", allocated), ("active", allocated), ("reserved", reserved))
        }),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "Stream": PretendedStream, "Event": PretendedStream, "device": PretendedStream, "stream": PretendedStream,
        "current_stream": PretendedStream, "default_stream": PretendedStream,
    }  # fmt: skip

    def compile_nothing(model: Any = None, **_: Any) -> Any:
        if not imports_a_library(sys._getframe(1)):  # which compiles functions of its own
            tracker.note(COMPILED)
        return model if model is not None else lambda function: function

    loading = torch.load

    def load(file: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Load onto a meta device what goes to the card, and record it."""
        is_card = isinstance(map_location, str | torch.device) and str(map_location).startswith("cuda")
        loaded = loading(file, "meta" if is_card else map_location, *args, **kwargs)
        with torch_internals.without_functions():
            torch_internals.tree_map(
                lambda each: tracker.hold([each] if getattr(each, "is_meta", False) else []), loaded
            )
        return loaded

    accelerator = {
        "current_accelerator": torch.device("cuda"), "device_count": 1, "current_device_index": 0, "synchronize": None,
        "set_device_index": None, "current_stream": PretendedStream(),
    }  # fmt: skip
    replaced: dict[Any, dict[str, Any]] = {
        torch.cuda: table,
        torch.cuda.nvtx: dict.fromkeys(("range_push", "range_pop", "range_start", "range_end", "mark"), _always(0)),
        torch.accelerator: {name: _always(value) for name, value in accelerator.items()}
        | {"is_available": lambda: package_of(sys._getframe(1)) != "torch"},  # its threads cannot pin memory for it
        torch: {"compile": compile_nothing, "Generator": PretendedGenerator, "load": load}
        | {name: _asked_of_card(getattr(torch, name)) for name in _OF_AUTOCAST},
        torch.nn.Module: {"compile": lambda *_, **__: tracker.note(COMPILED)},
        "torch._C": {"_cuda_getCurrentRawStream": _always(0)},  # bitsandbytes takes it at import where there is a card
    }
    with ExitStack() as stack:
        for owner, names in replaced.items():
            stack.enter_context(patch.multiple(owner, create=owner == "torch._C", **names))
        yield


_OF_AUTOCAST = ("autocast", "is_autocast_enabled", "get_autocast_dtype")


def _asked_of_card(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of autocast for which DeepSpeed's device, meta, is the card: it runs under the script's."""

    def ask(*args: Any, **kwargs: Any) -> Any:
        named = {name: "cuda" if value == "meta" else value for name, value in kwargs.items()}
        return function(*("cuda" if each == "meta" else each for each in args), **named)

    return ask


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value
