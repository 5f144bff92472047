"""Live tensor bytes of a real run: what the step held at its fullest moment, phase by phase.

On CUDA the caching allocator counts. A CPU has no such counter, so there a dispatch mode sees every storage that
an operator makes, and its end. Not seen: memory that a kernel takes and returns inside one call.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self
from unittest.mock import patch

import torch
from torch import Tensor
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

INITIALISATION, FORWARD, BACKWARD, OPTIMIZER_STEP = "initialisation", "forward", "backward", "optimizer step"


@dataclass(frozen=True)
class Interval:
    """One stretch of a run: its phase, the peak of live tensor bytes during it, and those live at its end."""

    phase: str
    peak_bytes: int
    live_bytes: int


class Gauge(Protocol):
    """What `gauge` gives."""

    def mark(self, phase: str) -> None:
        """From now on it is `phase`."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that live now."""
        ...

    @property
    def intervals(self) -> list[Interval]:
        """Every stretch between two marks, in order; the last one is still running."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        ...

    @property
    def phases(self) -> dict[str, int]:
        """The peak of each phase, bytes."""
        ...


class _Intervals:
    """The bookkeeping that both gauges share: `_read` gives (peak since the last reset, live), bytes."""

    def __init__(self) -> None:
        self._phase = INITIALISATION
        self._finished: list[Interval] = []

    def _read(self) -> tuple[int, int]:
        raise NotImplementedError  # the allocator's gauge and the storages' each have their own

    def _reset_peak(self) -> None:
        raise NotImplementedError  # as above

    def mark(self, phase: str) -> None:
        """From now on it is `phase`."""
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
        peaks: dict[str, int] = {}
        for interval in self.intervals:
            peaks[interval.phase] = max(peaks.get(interval.phase, 0), interval.peak_bytes)
        return peaks


class CudaGauge(_Intervals):
    """Counts of the caching allocator: requested bytes rounded up to its blocks, as `max_memory_allocated`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._reserved = 0
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that segments took, as `max_memory_reserved`."""
        return max(self._reserved, torch.cuda.max_memory_reserved(self._device))

    def _read(self) -> tuple[int, int]:
        return torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)

    def _reset_peak(self) -> None:
        self._reserved = self.reserved_bytes  # the reset below is one of all peaks
        torch.cuda.reset_peak_memory_stats(self._device)


class StorageWatch(TorchDispatchMode):
    """Calls `born` for every new storage that an operator returns, and `died` when it is gone.

    A storage that existed before the mode is not born, whatever views of it appear: an output is new only if no
    input has its storage. The mode changes no value and no lifetime, with one correction: while any mode is active
    autograd adds up gradients out of place, so `_added_in_place` does what it would do without.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_operators = 0
        self._known: dict[int, int] = {}  # address of a live storage -> its bytes
        self._random_states = (
            patch.object(torch, "get_rng_state", partial(self._random_state, torch.get_rng_state)),
            patch.object(torch.random, "fork_rng", partial(_forked, torch.random.fork_rng)),
        )

    def __enter__(self) -> Self:
        """Watch from here on."""
        for each in self._random_states:
            each.start()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """The end."""
        super().__exit__(*exception)
        for each in self._random_states:
            each.stop()

    def _random_state(self, get: Callable[[], Tensor]) -> Tensor:
        """The state of the random generator, which no operator returns: activation checkpointing keeps one a layer."""
        state = get()
        self._see(state, "get_rng_state", ())
        return state

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that keeps torch.compile out would hide the caller

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """A storage of `size_bytes` began to live as that of `tensor`, an output of `operator`."""

    def died(self, address: int, size_bytes: int) -> None:
        """The storage that was born at `address` is gone."""

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count storages that are there already."""
        for tensor in tensors:
            self._see(tensor, None, ())

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator returns."""
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator and look at what it returns."""
        self.num_operators += 1
        if func in _VIEWS or (func not in _OTHERS and _is_view(func)):
            return func(*args, **(kwargs or {}))
        if func is aten.add.Tensor and _added_in_place(args, sys._getframe(1)):
            return aten.add_.Tensor(args[0], args[1])
        out = self.execute(func, args, kwargs or {})
        if isinstance(out, Tensor):
            self._see(out, func, args)
        else:
            for tensor in tensors_in(out):
                self._see(tensor, func, args)
        return out

    def _see(self, tensor: Tensor, operator: Any, inputs: tuple[Any, ...]) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        known = self._known.get(address)
        if known == size:
            return
        if known is not None:  # resized: the old one ends, a new one begins
            self.died(address, known)
        elif any(address == other.untyped_storage()._cdata for other in tensors_in(inputs)):
            return
        else:
            weakref.finalize(storage, self._gone, address).atexit = False
        self._known[address] = size
        self.born(address, size, tensor, operator)

    def _gone(self, address: int) -> None:
        self.died(address, self._known.pop(address))


class HostGauge(StorageWatch, _Intervals):
    """Counts storages of one kind of device."""

    def __init__(self, device: torch.device) -> None:
        StorageWatch.__init__(self)
        _Intervals.__init__(self)
        self._device = device
        self._counted: set[int] = set()
        self._live = self._peak = 0

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Count it."""
        if tensor.device.type == self._device.type:
            self._counted.add(address)
            self._live += size_bytes
            self._peak = max(self._peak, self._live)

    def died(self, address: int, size_bytes: int) -> None:
        """Count it no more."""
        if address in self._counted:
            self._counted.discard(address)
            self._live -= size_bytes

    def _read(self) -> tuple[int, int]:
        return self._peak, self._live

    def _reset_peak(self) -> None:
        self._peak = self._live


@contextmanager
def gauge(device: torch.device | str, holding: Iterable[Tensor] = ()) -> Iterator[Gauge]:
    """Measure the tensors on `device` inside the `with` block.

    `holding` are tensors that exist already and are to be counted; CUDA counts everything anyway.
    """
    device = torch.device(device)
    if device.type == "cuda":
        yield CudaGauge(device)
        return
    host = HostGauge(device)
    host.hold(holding)
    del holding  # it would keep them alive
    with host:
        yield host


def mark_phases(engine: Any, mark: Callable[[str], None]) -> None:
    """Have a `frugal.training.engine.Engine` say when forward, backward and the optimizer step begin."""
    engine.objective = _MarkedObjective(engine.objective, mark)
    for name, phase in (("backward", BACKWARD), ("step", OPTIMIZER_STEP)):
        setattr(engine.deepspeed, name, _marked(getattr(engine.deepspeed, name), phase, mark))


def _marked(function: Callable[..., Any], phase: str, mark: Callable[[str], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        mark(phase)
        return function(*args, **kwargs)

    return call


class _MarkedObjective:
    """An objective that says when its forward begins."""

    def __init__(self, objective: Any, mark: Callable[[str], None]) -> None:
        self._objective = objective
        self._mark = mark

    def loss_sum(self, model: Any, batch: Any) -> Tensor:
        self._mark(FORWARD)
        return self._objective.loss_sum(model, batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)


_VIEWS: set[Any] = set()
_OTHERS: set[Any] = set()


def _is_view(operator: Any) -> bool:
    """Whether it only ever returns its input's storage, unchanged; remembered. `reshape` and its like may copy."""
    returns = operator._schema.returns
    views = bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)
    views = views and not operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    (_VIEWS if views else _OTHERS).add(operator)
    return views


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Every tensor in an operator's arguments or results: lists of tensors are the deepest they go."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)


def _forked(fork: Callable[..., Any], *args: Any, device_type: str | None = None, **kwargs: Any) -> Any:
    """`torch.random.fork_rng`; on meta, where it does nothing, it sets the host's state aside as on any device."""
    return fork(*args, device_type="cpu" if device_type == "meta" else device_type, **kwargs)


def _added_in_place(args: tuple[Any, ...], caller: Any) -> bool:
    """Whether this `args[0] + args[1]` is autograd's own sum of two gradients, into a buffer nobody else holds.

    Then, without a dispatch mode, `InputBuffer::accumulate` would add in place (torch/csrc/autograd/
    input_buffer.cpp). It asks for one reference to tensor and storage; seen from here Python adds one reference to
    the storage and the call itself three to the tensor. The caller must be the engine: Python code inside a hook
    that adds two tensors holds neither of them less.
    """
    if caller.f_code is not _engine_run_backward.__code__ or torch.is_grad_enabled():
        return False
    buffer, other = args[0], args[1]
    return (
        isinstance(other, Tensor)
        and buffer.shape == other.shape
        and buffer.dtype == other.dtype
        and torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= 2
        and buffer._use_count() <= 4
        and is_non_overlapping_and_dense_or_false(buffer)
    )
