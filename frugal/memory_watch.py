"""Memory of a running step: every storage from its birth to its death, the traffic of operators, the peak by phase.

`StorageWatch` sees every storage that an operator makes, without prolonging its life. Not seen: memory that a kernel
takes and returns inside one call, unless `INSIDE` lists what the kernel calls.

`traffic` is the bytes that an operator reads and writes in the device's memory, which bound its time if its FLOPs do
not: every input once and every output. Operators that read only the part they return, or overwrite without reading,
count as such. Left out: what stays in a cache between two operators, and kernels that read their input more than once
(a softmax of long rows, sorting).

`gauge` measures the live tensor bytes of a real run at its fullest moment, phase by phase. On CUDA the caching
allocator counts; a CPU has no such counter, so there a `StorageWatch` does.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self
from unittest.mock import patch

import torch
from torch import Tensor

from frugal import torch_internals
from frugal.planning.memory.timeline import (
    INITIALISATION,
    TEMPORARY,
    Interval,
    Timeline,
    TimelineBuilder,
    phase_peaks,
)
from frugal.torch_internals import tensors_in

aten = torch.ops.aten


INSIDE: dict[Any, dict[str, Callable[..., Any]]] = {}
"""For operators of other libraries whose kernels make temporary storages, by kind of device: a function that does the
same with operators that a watch sees."""


class StorageWatch(torch_internals.DispatchMode):
    """Calls `born` for every new storage that an operator returns, and `died` when it is gone.

    A storage that existed before the mode is not born, whatever views of it appear: an output is new only if no
    input has its storage. The mode changes no value and no lifetime, with one correction: while any mode is active
    autograd and `linear` write some results out of place, which `_is_in_place` undoes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device_kind = "cpu"  # whose kernels are watched; or `cuda`
        self.looks_inside = True
        self.num_operators = 0
        self._known: dict[int, int] = {}  # address of a live storage -> its bytes
        self._zeros = 0  # address of the storage that was born last, if it is of zeros
        self._product: tuple[Any, ...] = ()  # the last product: its number, address and call
        self._random_states = (
            patch.object(torch, "get_rng_state", partial(self._random_state, torch.get_rng_state)),
            patch.object(torch.random, "fork_rng", partial(_forked, torch.random.fork_rng)),
        )

    def __enter__(self) -> Self:
        """Start watching."""
        for each in self._random_states:
            each.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop watching."""
        super().__exit__(*exception)
        for each in self._random_states:
            each.stop()

    def _random_state(self, get: Callable[[], Tensor]) -> Tensor:
        """Return the random generator's state, which no operator makes: activation checkpointing keeps one a layer."""
        state = get()
        self._see(state, "get_rng_state", ())
        return state

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps torch.compile out would hide the caller

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Take note of a new storage of `size_bytes`, that of `tensor`, an output of `operator`."""

    def died(self, address: int, size_bytes: int) -> None:
        """Take note that the storage at `address` is gone."""

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that exist already."""
        for tensor in tensors:
            self._see(tensor, None, ())

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator and return its output."""
        return func(*args, **kwargs)

    def in_order(self, func: Any, out: Any) -> Iterable[Tensor]:
        """Return the outputs of an operator in the order in which they are born."""
        return tensors_in(out)

    def executed(self) -> None:
        """Take note that the operator is done and its outputs are born."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator and look at what it returns."""
        kind = _kind(func)  # looked up once: an operator's hash is Python's
        if kind is _VIEW:  # most operators
            self.num_operators += 1
            return func(*args, **(kwargs or {}))
        is_inside = self.looks_inside and func in INSIDE
        # composite operators come here whole where autograd takes no part: in such a function, and in `inference_mode`
        if is_inside or (kind is _COMPOSITE and not torch_internals.runs_whole_on_meta(func)):
            torch_internals.DispatchMode.__enter__(self)  # to see the operators that this one calls
            try:
                return (INSIDE[func][self.device_kind] if is_inside else func.decompose)(*args, **(kwargs or {}))
            finally:
                torch_internals.DispatchMode.__exit__(self, None, None, None)
        self.num_operators += 1
        if kind is _SUM and self._is_in_place(func, args, _below_modes(sys._getframe(1))):
            out = _IN_PLACE[func](*args, **(kwargs or {}))
            return aten.alias.default(out) if torch.is_grad_enabled() else out  # autograd notes a result of its own
        if func is aten._unsafe_view.default:
            places = _places(_below_modes(sys._getframe(1)))
            self._product = self.num_operators, torch_internals.address(args[0]), places
        out = self.execute(func, args, kwargs or {})
        for tensor in (out,) if isinstance(out, Tensor) else self.in_order(func, out):
            self._see(tensor, func, args)
        self.executed()
        return out

    def _see(self, tensor: Tensor, operator: Any, inputs: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        address, size = torch_internals.address(tensor), storage.nbytes()
        known = self._known.get(address)
        if known == size:
            return
        if known is not None:  # resized: the old one ends, a new one begins
            self.died(address, known)
        elif address in map(torch_internals.address, tensors_in(inputs)):
            return
        else:
            weakref.finalize(storage, self._gone, address).atexit = False
        self._known[address] = size
        self._zeros = address if operator in _ZEROS else 0
        self.born(address, size, tensor, operator)

    def _is_in_place(self, func: Any, args: tuple[Any, ...], frame: Any) -> bool:
        """Return whether the result is written into the first input where no mode is active. `frame`: below modes.

        `linear` adds its bias so to the product of an input that is not contiguous (Linear.cpp): a sum right after a
        product, in one call from Python. Autograd does so with a sum of two gradients in a buffer nobody else holds,
        both conditions of a clamp, and parts of a gradient in zeros. There the engine must be the caller: what a hook
        in Python runs is out of place.
        """
        is_of_autograd = frame.f_code is torch_internals.RUN_BACKWARD
        if func is aten.add.Tensor and not is_of_autograd:
            # where another mode runs operators there is one without this watch, too
            return (
                self._product[:2] == (self.num_operators - 1, torch_internals.address(args[0]))
                and self._product[2] == _places(frame)
                and frame.f_code is not torch_internals.RUN_BY_MODE
            )
        return (
            is_of_autograd
            and not torch.is_grad_enabled()
            and (
                _has_one_owner(args[0], args[1])
                if func is aten.add.Tensor
                else func is aten.logical_and.default or torch_internals.address(args[0]) == self._zeros
            )
        )

    def _gone(self, address: int) -> None:
        self.died(address, self._known.pop(address))


_VIEW, _COMPOSITE, _SUM, _OTHER = range(4)
"""Kinds of operators: one that always returns its input's storage unchanged; one that is made of others; one that may
run in place, see `_IN_PLACE`; all others."""


@cache
def _kind(operator: Any) -> int:
    """Return the kind of an operator."""
    if torch_internals.is_composite(operator):
        return _COMPOSITE
    returns = torch_internals.schema(operator).returns
    if returns and all(value.alias_info and not value.alias_info.is_write for value in returns):
        return _VIEW
    return _SUM if operator in _IN_PLACE else _OTHER


def _forked(fork: Callable[..., Any], *args: Any, device_type: str | None = None, **kwargs: Any) -> Any:
    """Call `torch.random.fork_rng`, on meta as for the CPU: there it would do nothing and keep no state."""
    return fork(*args, device_type="cpu" if device_type == "meta" else device_type, **kwargs)


def _below_modes(frame: Any) -> Any:
    """Return the frame that ran an operator, below those of modes of functions (`on_card` is a pretended card's), of
    watches and of composites."""
    while frame.f_code.co_name in ("__torch_dispatch__", "__torch_function__", "on_card", "decompose"):
        frame = frame.f_back
    return frame


def _places(frame: Any) -> tuple[Any, ...]:
    """Return the code and instruction of a frame and of its callers: the innermost alone may run any function, and the
    address of a frame is taken again by the next."""
    caller = frame.f_back or frame
    above = caller.f_back or caller
    return frame.f_code, frame.f_lasti, caller.f_code, caller.f_lasti, above.f_code, above.f_lasti


_IN_PLACE = {
    aten.add.Tensor: aten.add_.Tensor, aten.logical_and.default: aten.logical_and_.default,
    aten.scatter_add.default: aten.scatter_add_.default, aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value, aten.index_put.default: aten.index_put_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default, aten.put.default: aten.put_.default,
}  # fmt: skip
"""Operators that autograd (FunctionsManual.cpp) and `linear` run in place where no mode is active, and how."""

_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}


def _has_one_owner(buffer: Tensor, other: Any) -> bool:
    """Return whether `buffer + other` are two gradients of which the first is held by autograd alone.

    `InputBuffer::accumulate` (torch/csrc/autograd/input_buffer.cpp) then adds in place: tensor and storage have one
    reference each. Here Python adds one reference to the storage, and the call three to the tensor.
    """
    return (
        isinstance(other, Tensor)
        and buffer.shape == other.shape
        and buffer.dtype == other.dtype
        and torch_internals.storage_uses(buffer) <= 2
        and torch_internals.uses(buffer) <= 4
        and torch_internals.is_dense(buffer)
    )


_NOTHING = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default, aten.set_.source_Tensor, aten.resize_.default, aten._local_scalar_dense.default,
}  # fmt: skip
_READS_WHAT_IT_RETURNS = {
    aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor,
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
}  # fmt: skip
_WRITES_PARTS = {aten.scatter_.src}
_OVERWRITES = {aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}

_STREAMS = {
    aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor, aten.mul.Tensor, aten.mul_.Tensor,
    aten.mul.Scalar, aten.mul_.Scalar, aten.div.Tensor, aten.div_.Tensor, aten.neg.default, aten.clone.default,
    aten.copy_.default, aten._to_copy.default, aten.cat.default, aten.fill_.Scalar, aten.fill_.Tensor,
    aten.zero_.default, aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.pow.Tensor_Scalar,
    aten.sum.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.exp_.default,
    aten.constant_pad_nd.default,
}  # fmt: skip
_CPU_PACES = {
    aten._log_softmax.default: 2.0, aten._softmax.default: 2.0, aten.native_dropout.default: 15.0,
    aten.bernoulli_.float: 15.0,
}  # fmt: skip


def cpu_pace(func: Any) -> float:
    """Return the time of a byte of this operator's traffic on a CPU, relative to GELU, SiLU and norms.

    A GPU waits for its memory whatever it computes; a CPU thread also waits for arithmetic: the three passes and the
    exponentials of a softmax, the random numbers of a dropout. `python -m bench.planning.cpu_paces` measures these
    factors; they are rounded from a Xeon at 2.5 GHz in fp32. An EPYC is within a factor of 1.7 for all but `exp_`.
    """
    return 0.35 if func in _STREAMS else _CPU_PACES.get(func, 1.0)


def traffic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes read and written by one call, which returned `out`. Views move nothing."""
    if func in _NOTHING:
        return 0
    written = sum(map(_bytes, tensors_in(out)))
    if func in _READS_WHAT_IT_RETURNS:
        return 2 * written + sum(_bytes(value) for value in tensors_in(args[1:]))
    if func in _WRITES_PARTS:
        return sum(_bytes(value) for value in tensors_in((*args[1:], args[-1])))
    inputs = list(tensors_in((*args, *(value for name, value in kwargs.items() if name != "out"))))
    if func in _OVERWRITES:
        return written + sum(map(_bytes, inputs[1:]))
    if not torch_internals.schema(func).is_mutable and not _storages(tensors_in(out)).isdisjoint(_storages(inputs)):
        return 0  # a view after all, such as `_unsafe_view`
    return written + sum(map(_bytes, inputs))


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {torch_internals.address(tensor) for tensor in tensors}


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's elements, broadcast ones counted once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


class Gauge:
    """The live tensor bytes of a run, phase by phase: `CudaGauge` asks the allocator, `HostGauge` counts storages."""

    def __init__(self) -> None:
        self._phase = INITIALISATION
        self._finished: list[Interval] = []

    def _read(self) -> tuple[int, int]:
        """Return the peak since the last reset and the live bytes."""
        raise NotImplementedError  # each of the two gauges has its own

    def _reset_peak(self) -> None:
        raise NotImplementedError  # as above

    def mark(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        self._finished.append(Interval(self._phase, *self._read()))
        self._phase = phase
        self._reset_peak()

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that live now."""
        return self._read()[1]

    @property
    def intervals(self) -> list[Interval]:
        """Every stretch between two marks, in order; the last one is still running."""
        return [*self._finished, Interval(self._phase, *self._read())]

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        return max(interval.peak_bytes for interval in self.intervals)

    @property
    def phases(self) -> dict[str, int]:
        """The peak of each phase, bytes."""
        return phase_peaks(self.intervals)

    @property
    def reserved_phases(self) -> dict[str, int]:
        """The most bytes of the allocator's segments in each phase; empty on CPU ranks, where nothing is cached."""
        return {}


class CudaGauge(Gauge):
    """The caching allocator's counts: requested bytes rounded up to its blocks, as `max_memory_allocated`."""

    def __init__(self, device: torch.device, *, keeps_timeline: bool = False) -> None:
        super().__init__()
        self._device = device
        self._reserved: dict[str, int] = {}  # by phase
        self._begins = {0: INITIALISATION}  # phases by their first entry of the history
        self._keeps_timeline = keeps_timeline
        if keeps_timeline:
            torch_internals.record_memory_history(device)
        torch.cuda.reset_peak_memory_stats(device)

    def mark(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        self._reserved = self.reserved_phases  # the reset that follows resets all peaks
        super().mark(phase)
        if self._keeps_timeline:
            self._begins[len(torch_internals.memory_history(self._device))] = phase

    @property
    def timeline(self) -> Timeline:
        """Every block of the allocator since the beginning, without its purpose, if it was asked for."""
        return _timeline(torch_internals.memory_history(self._device), self._begins)

    @property
    def reserved_phases(self) -> dict[str, int]:
        """The most bytes of the allocator's segments in each phase."""
        reserved = max(self._reserved.get(self._phase, 0), torch.cuda.max_memory_reserved(self._device))
        return self._reserved | {self._phase: reserved}

    def _read(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)

    def _reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


def _timeline(entries: Sequence[dict[str, Any]], begins: Mapping[int, str]) -> Timeline:
    """Build the timeline of the blocks that were allocated in an allocator's history, with phases by first entry."""
    builder = TimelineBuilder()
    numbers: dict[int, int] = {}  # address of a live block -> its number
    for number, entry in enumerate(entries):
        if number in begins:
            builder.phase(begins[number])
        if entry["action"] == "alloc":
            frames = entry.get("frames") or [{"name": ""}]
            numbers[entry["addr"]] = builder.born(entry["size"], TEMPORARY, frames[0]["name"])
        elif entry["action"] == "free_completed" and entry["addr"] in numbers:
            builder.events.append(numbers.pop(entry["addr"]))
    return builder.timeline()


def outside_bytes(device: torch.device) -> int:
    """Return the GPU memory in use beyond the allocator's segments: context, kernels, NCCL, other processes."""
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


class HostGauge(StorageWatch, Gauge):
    """The bytes of the storages of one kind of device."""

    def __init__(self, device: torch.device, *, keeps_timeline: bool = False) -> None:
        StorageWatch.__init__(self)
        Gauge.__init__(self)
        self._device = device
        self._counted: dict[int, int] = {}  # address of a live storage -> its number
        self._live = self._peak = 0
        self._timeline = TimelineBuilder() if keeps_timeline else None
        if self._timeline is not None:
            self._timeline.phase(INITIALISATION)

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Count it."""
        if tensor.device.type == self._device.type:
            self._counted[address] = (
                -1 if self._timeline is None else self._timeline.born(size_bytes, TEMPORARY, str(operator or ""))
            )
            self._live += size_bytes
            self._peak = max(self._peak, self._live)

    def died(self, address: int, size_bytes: int) -> None:
        """Stop counting it."""
        number = self._counted.pop(address, None)
        if number is not None:
            self._live -= size_bytes
            if self._timeline is not None:
                self._timeline.events.append(number)

    def mark(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        super().mark(phase)
        if self._timeline is not None:
            self._timeline.phase(phase)

    @property
    def timeline(self) -> Timeline:
        """Every storage, without its purpose, if it was asked for."""
        assert self._timeline is not None
        return self._timeline.timeline()

    def _read(self) -> tuple[int, int]:
        return self._peak, self._live

    def _reset_peak(self) -> None:
        self._peak = self._live


@contextmanager
def gauge(
    device: torch.device | str, holding: Iterable[Tensor] = (), *, keeps_timeline: bool = False
) -> Iterator[CudaGauge | HostGauge]:
    """Measure the tensors on `device` inside the `with` block.

    `holding`: tensors to count that exist already; CUDA counts everything anyway. `keeps_timeline`: record every
    storage for `timeline`, which takes host memory that grows with every operator.
    """
    device = torch.device(device)
    if device.type == "cuda":
        yield CudaGauge(device, keeps_timeline=keeps_timeline)
        return
    host = HostGauge(device, keeps_timeline=keeps_timeline)
    host.hold(holding)
    del holding  # it would keep them alive
    with host:
        yield host
