"""Records every storage that a rehearsal makes, on the pretended device and on the host.

Meta tensors stand for the device, CPU tensors for the host. Host tensors of a rehearsal are real but never touched,
so their pages cost nothing; operators on them only make the outputs that they would make.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from frugal.dryrun import data_dependent, memo
from frugal.dryrun.attention import cuda_workspace
from frugal.dryrun.categories import DEEPSPEED, MODEL, Shapes, asked_by_transformers, asker, owned
from frugal.dryrun.host_pages import untouched
from frugal.planning.timeline import PARAMETERS, TEMPORARY, Recording
from frugal.planning.work import Counts
from frugal.training.measure import BACKWARD, FORWARD, INITIALISATION
from frugal.training.storage_watch import StorageWatch
from frugal.training.traffic import cpu_pace

aten = torch.ops.aten
SIDE_WORKS_IN_FLIGHT = 2
"""How many pieces of work on a side stream may be unfinished when the host frees what they used; see `side_stream`."""

UNTOUCHED_ELEMENTS = 1 << 14  # host tensors above this size are never read or written

_FACTORIES = {aten.zeros.default, aten.full.default, aten.ones.default, aten.empty.memory_format}
_CROSSING = {aten.copy_.default, aten._to_copy.default, *_FACTORIES}  # may lead from device to host
_FUSED_OPTIMIZERS = {
    overload
    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_")
    for overload in (getattr(aten, name).default, getattr(aten, name).tensor_lr)
}


class Tracker(StorageWatch):
    """The recording of one rehearsal in the making.

    On kind `cpu` the host is the device, so everything is recorded and `host_peak_bytes` stays 0.
    """

    def __init__(self, kind: Literal["cuda", "cpu"], integer: int | None = None) -> None:
        """`integer`: what a model that reads one from its data is told; None: the longest dimension of a batch."""
        super().__init__()
        self.kind = kind
        self.phase = INITIALISATION
        self.host_live_bytes = self.host_peak_bytes = 0
        self._counted: Counter[str] = Counter()  # fields of `Counts`, but for operators
        self._recomputed_from: int | None = None  # operators before the layer that is now recomputed
        self._sizes: list[int] = []
        self._categories: list[int] = []
        self._operators: list[int] = []
        self._modules: list[int] = []
        self._names: dict[str, int] = {"": 0}
        self._events: list[int] = []
        self._phases: list[tuple[str, int]] = [(INITIALISATION, 0)]
        self._storage: dict[int, int] = {}  # address of a live device storage -> its index
        self._host: set[int] = set()  # addresses of live host storages
        self._is_pinning = False
        self._pinned: set[int] = set()  # addresses of live pinned storages
        self._free_pinned: Counter[int] = Counter()  # bytes of a pinned block -> how many are kept for reuse
        self._side_stream = ""  # the one that works now
        self._side_idle = True  # nothing was made yet in the block that works now
        self._side_works: dict[str, int] = {}  # side stream -> pieces of work begun
        self._of_side: dict[int, str] = {}  # address of a live storage made on a side stream -> that stream
        self._unfinished: dict[str, list[tuple[int, int]]] = {}  # stream -> (work when it was freed, storage's index)
        self._shapes: Shapes | None = None
        self._model: nn.Module | None = None
        self._running: list[str] = [""]  # names of the modules that run now, innermost last
        self._own_metadata = False
        self._assumptions: dict[str, str] = {}  # what is assumed -> the first module that makes it necessary
        self._integer = integer
        self.was_asked_for_integers = False
        self._building = kind == "cuda"  # a model is built on the host
        self._forward_from = 0  # operators before the phase
        self._alone = False  # whether there is no DeepSpeed whose operators are not to be counted
        self._waiting: dict[int, int] = {}  # address -> bytes of the model's storages still on the host

    # What happened

    def recording(self, micro_batch: int) -> Recording:
        """Everything so far."""
        return Recording(
            micro_batch=micro_batch,
            sizes=tuple(self._sizes),
            categories=tuple(self._categories),
            operators=tuple(self._operators),
            modules=tuple(self._modules),
            names=tuple(self._names),
            events=tuple(self._events),
            phases=tuple(self._phases),
        )

    def mark(self, phase: str) -> None:
        """From now on it is `phase`."""
        if phase != BACKWARD:  # the end of a backward waits for all streams (stage_1_and_2.py:1027, stage3.py:1414)
            for stream, works in self._side_works.items():
                self._finish(stream, works)
        if self.phase == FORWARD:
            self._counted["num_forward"] += self.num_operators - self._forward_from
        self._forward_from = self.num_operators
        self.phase = phase
        self._phases.append((phase, len(self._events)))

    def watch(self, model: nn.Module) -> None:
        """Tell gradients and logits by the shapes of `model`, and name what its modules make."""
        self._shapes = Shapes(model)
        self._model = model
        self._building = False
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _module, _args, name=name: self._enter(name))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    @contextmanager
    def side_stream(self, name: str) -> Iterator[None]:
        """Inside the `with` block DeepSpeed works on a CUDA stream beside the one that computes.

        What is made there, or freed there, is freed before that work is done, and the allocator keeps it until then
        (`record_stream` in stage_1_and_2.py:1531 and 2430, stage3.py:1639, partition_parameters.py:327). The computing
        stream waits for the work before (stage_1_and_2.py:1608), so one piece of it is under way, and the host, which
        runs ahead, may not have seen the end of one more: what was freed lives until the second next begins. ZeRO-3
        lets it run no further ahead (`max_param_reduce_events`, stage3.py:1666). A piece of work makes something: a
        reduced bucket, a gathered parameter. Copies into a bucket belong to the next one.
        """
        before = self._side_stream, self._side_idle
        self._side_stream, self._side_idle = name, True
        self._side_works.setdefault(name, 0)
        self._unfinished.setdefault(name, [])
        try:
            yield
        finally:
            self._side_stream, self._side_idle = before

    def _begin_side_work(self) -> None:
        """A first storage is made inside a `side_stream` block."""
        stream = self._side_stream
        self._side_idle = False
        self._side_works[stream] += 1
        self._finish(stream, self._side_works[stream] - SIDE_WORKS_IN_FLIGHT)

    @contextmanager
    def pinning(self) -> Iterator[None]:
        """What is made on the host inside the `with` block is pinned.

        torch keeps a pinned block that is freed, for the next one of its size (CachingHostAllocator.h:358).
        """
        self._is_pinning = True
        try:
            yield
        finally:
            self._is_pinning = False

    def _finish(self, stream: str, work: int) -> None:
        """All of a side stream's work up to number `work` is done, so what it held is free."""
        held = self._unfinished[stream]
        self._events += [index for number, index in held if number <= work]
        self._unfinished[stream] = [(number, index) for number, index in held if number > work]

    def expect(self, batch: dict[str, Tensor]) -> None:
        """Batches like this one will come."""
        if self._integer is None:
            self._integer = max((size for tensor in batch.values() for size in tensor.shape[1:]), default=1)

    def arrive(self, *tensors: Tensor) -> None:
        """The model's `tensors` move from the host to the device, where they are not there already."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            if address in self._waiting:
                size_bytes = self._waiting.pop(address)
                self.host_live_bytes -= size_bytes
                self._storage[address] = self._record(size_bytes, PARAMETERS, "to device")

    def relabel(self, optimizer: Any = None) -> None:
        """Give what lives now the category of its owner."""
        assert self._model is not None, "watch a model first"
        seen: set[int] = set()
        with _disable_current_modes():  # looking is no operator
            for tensor, category in owned(self._model, optimizer):
                index = self._storage.get(tensor.untyped_storage()._cdata)
                if index is not None and index not in seen:
                    seen.add(index)
                    self._categories[index] = category

    @property
    def _recomputing(self) -> bool:
        """Whether backward runs a module's forward again. Not seen by `is_grad_enabled`, which a `Function` clears."""
        return self.phase == BACKWARD and len(self._running) > 1

    def _enter(self, name: str) -> None:
        self._running.append(name)
        if self.phase == BACKWARD and len(self._running) == 2:
            self._recomputed_from = self.num_operators

    def _leave(self) -> None:
        self._running.pop()
        if self._recomputed_from is not None and len(self._running) == 1:
            self._counted["num_recomputed"] += self.num_operators - self._recomputed_from
            self._recomputed_from = None

    # Births and deaths

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Record it, on the device or on the host."""
        if self._own_metadata:
            return
        if self._building or (self.kind == "cuda" and tensor.device.type == "cpu"):
            if self._building and tensor.is_meta:
                self._waiting[address] = size_bytes
            else:
                self._host.add(address)
            if self._is_pinning:
                self._pinned.add(address)
                if self._free_pinned[size_bytes]:
                    self._free_pinned[size_bytes] -= 1
                    return
            self.host_live_bytes += size_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_live_bytes)
            return
        if self._shapes is None:
            category = TEMPORARY
        else:
            who = asker(sys._getframe(3))
            category = self._shapes.category(tuple(tensor.shape), self.phase, who, recomputing=self._recomputing)
        if self._side_stream and self._side_idle:
            self._begin_side_work()
        self._storage[address] = len(self._sizes)
        self._record(size_bytes, category, operator)
        if self._side_stream:
            self._of_side[address] = self._side_stream

    def died(self, address: int, size_bytes: int) -> None:
        """Record its end."""
        index = self._storage.pop(address, None)
        stream = self._of_side.pop(address, self._side_stream)
        if index is not None and stream:
            self._unfinished[stream].append((self._side_works[stream], index))
        elif index is not None:
            self._events.append(index)
        elif address in self._host:
            self._host.discard(address)
            if address in self._pinned:
                self._pinned.discard(address)
                self._free_pinned[size_bytes] += 1
            else:
                self.host_live_bytes -= size_bytes
        elif self._waiting.pop(address, None) is not None:
            self.host_live_bytes -= size_bytes

    def _record(self, size_bytes: int, category: int, operator: Any) -> int:
        index = len(self._sizes)
        self._sizes.append(size_bytes)
        self._categories.append(category)
        self._operators.append(self._name(str(operator)))
        self._modules.append(self._name(self._running[-1]))
        self._events.append(index)
        return index

    def _name(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    # Operators

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns, without touching host memory."""
        if func is aten._local_scalar_dense.default and (args[0].is_meta or _untouched(args[0])):
            return self._scalar(args[0])
        if func in _FUSED_OPTIMIZERS:
            return None  # updates in place, and takes no memory
        if (assumed := data_dependent.stand_in(func, args, kwargs)) is not None:
            self._assume(assumed[1])
            return assumed[0]
        # DeepSpeed keeps shapes as meta tensors of its own (stage_1_and_2.py), which are nothing on a real device.
        self._own_metadata = func is aten.zeros_like.default and "device" in kwargs and self.phase == INITIALISATION
        out = _on_host(func, args, kwargs) if func in _CROSSING or _reads_host(args) else NotImplemented
        if out is not NotImplemented and self.kind == "cuda" and self.phase in (FORWARD, BACKWARD):
            self._counted["moved"] += self._moved_bytes(func, args, out)
        if out is NotImplemented:
            out, (flops, traffic) = memo.run(func, args, kwargs)
            if self.phase in (FORWARD, BACKWARD):
                self._count(flops, int(traffic * cpu_pace(func)) if self.kind == "cpu" else traffic)
        if self.kind == "cuda" and (workspace := cuda_workspace(func, args)):
            self._events.append(self._record(workspace, TEMPORARY, func))
        return out

    def _count(self, flops: int, traffic: int) -> None:
        """Add what one operator of the model costs. DeepSpeed's own is added by `frugal.planning.cost`."""
        if not self._alone and traffic and asker(sys._getframe(3)) == DEEPSPEED:
            return
        prefix = "recompute_" if self._recomputing else ""
        self._counted[prefix + "flops"] += flops
        self._counted[prefix + "traffic"] += traffic

    def _moved_bytes(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Bytes that the model's copy moves between host and device."""
        source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], out)
        if func not in (aten.copy_.default, aten._to_copy.default) or source.device == target.device:
            return 0
        return 0 if not self._alone and asker(sys._getframe(3)) == DEEPSPEED else int(source.nbytes)

    @property
    def counts(self) -> Counts:
        """What ran so far in forward and backward."""
        counted = dict(self._counted)
        if self.phase == FORWARD:
            counted["num_forward"] = counted.get("num_forward", 0) + self.num_operators - self._forward_from
        return Counts(**counted, num_operators=self.num_operators)

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        """The answer to `.item()`, which decides what the program does next.

        In forward: every mask is full and nothing is packed, so that the kernels without a mask are taken; what else
        a model asks for is assumed, see `frugal.dryrun.data_dependent`. After it: nothing overflowed, and norms are 1.
        """
        if tensor.dtype.is_floating_point:
            return 1.0
        if self.phase == INITIALISATION:
            return True if tensor.dtype == torch.bool else 1
        frame = sys._getframe(2)
        if self.phase != FORWARD and not (self.phase == BACKWARD and asker(frame) == MODEL):
            return False if tensor.dtype == torch.bool else 0
        if tensor.dtype == torch.bool:
            if not asked_by_transformers(frame):
                self._assume("an `if` depends on data: counted as if its condition were true")
            return True
        self.was_asked_for_integers = True
        integer = self._integer or 1
        self._assume(f"an integer is read from data: counted as if it were {integer}")
        return integer

    def _assume(self, what: str) -> None:
        """Note what the rehearsal assumes, once, with the first module that makes it."""
        if self.phase in (INITIALISATION, FORWARD):
            self._assumptions.setdefault(what, self._running[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """What the rehearsal assumes because no rehearsal can know it."""
        return tuple(f"{module}: {what}" if module else what for what, module in self._assumptions.items())


def _reads_host(args: tuple[Any, ...]) -> bool:
    for value in args:
        if isinstance(value, Tensor):
            if not value.is_meta:
                return True
        elif isinstance(value, (list, tuple)) and _reads_host(value):  # type: ignore[arg-type]  # of tensors or numbers
            return True
    return False


def _untouched(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() > UNTOUCHED_ELEMENTS


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator's result if it reads or writes big host tensors, or copies between host and device.

    Nothing is copied and nothing written: outputs are uninitialised. `NotImplemented` where the operator may run.
    """
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    if func is aten.copy_.default and args[0].device != args[1].device:
        return args[0]
    if func is aten._to_copy.default and to_host and args[0].is_meta:
        dtype = kwargs.get("dtype") or args[0].dtype
        return untouched(args[0].size(), args[0].stride(), dtype)
    if func in _FACTORIES and to_host and math.prod(args[0]) > UNTOUCHED_ELEMENTS:
        return untouched(args[0], None, kwargs.get("dtype") or torch.get_default_dtype())
    if not any(_untouched(value) for value in _flat(args)):
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
