"""Records every storage that a dry run makes, on the pretended device and on the host, and its purpose.

At birth the category follows from the phase, the shape, and the origin: the model or DeepSpeed. A storage that outlives
a phase is looked up where its owner keeps it, and relabelled.

Meta tensors stand for the device, CPU tensors for the host. Reference cycles, which hold storages,
are collected between phases only.
"""

import functools
import gc
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.config.hardware.cluster import ASSUMED_CAPABILITY, Capability, DeviceKind
from frugal.deepspeed_adapter.simulate.fake_device import SideStreams
from frugal.dryrun.trace import kernel_memory, operators
from frugal.dryrun.trace.operators import HostMemory
from frugal.memory_watch import StorageWatch, cpu_pace
from frugal.models.loading import quantised
from frugal.models.tiling import slices
from frugal.planning.cost import Counts
from frugal.planning.memory.timeline import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GRADIENTS,
    INITIALISATION,
    LOGITS,
    PARAMETERS,
    TEMPORARY,
    Mark,
    Timeline,
    TimelineBuilder,
)
from frugal.torch_internals import tensors_in

AUTOGRAD, DEEPSPEED, MODEL = "autograd", "DeepSpeed", "model"


@functools.cache
def package_folder(package: str) -> Path:
    """Return the folder of a package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, package
    return Path(spec.origin).parent


_TORCH, _FRUGAL, _DEEPSPEED, _TRANSFORMERS = (
    package_folder(name) for name in ("torch", "frugal", "deepspeed", "transformers")
)
_TRANSPARENT = (
    _TORCH,
    _FRUGAL / "dryrun",
    _FRUGAL / "deepspeed_adapter",
    _FRUGAL / "tools" / "own_loop",
    _FRUGAL / "memory_watch.py",
    _FRUGAL / "models" / "activation_checkpointing.py",
    _DEEPSPEED / "runtime" / "engine.py",
    _DEEPSPEED / "runtime" / "zero" / "linear.py",
    _DEEPSPEED / "utils",
)
"""Code that runs operators for its caller. The packages' own folders count: a model may lie in any folder, even in one
named `deepspeed` or `torch`."""
assert all(place.exists() for place in _TRANSPARENT), "DeepSpeed has moved code that runs operators for others"

_asker_of_code: dict[Any, str | None] = {torch_internals.RUN_BACKWARD: AUTOGRAD}


def asker(frame: FrameType | None) -> str:
    """Return the origin of an operator: `autograd` itself, `DeepSpeed`, or the `model`, which also stands for the
    rest."""
    frame = _asking(frame)
    return MODEL if frame is None else _asker_of_code[frame.f_code] or MODEL


def _asking(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that runs operators for itself, not for its caller."""
    while frame is not None:
        code = frame.f_code
        if code not in _asker_of_code:
            file = Path(code.co_filename)
            own = DEEPSPEED if file.is_relative_to(_DEEPSPEED) else MODEL
            _asker_of_code[code] = None if any(map(file.is_relative_to, _TRANSPARENT)) else own
        if _asker_of_code[code] is not None:
            return frame
        frame = frame.f_back
    return None


def asked_by_transformers(frame: FrameType | None) -> bool:
    """Return whether code of the transformers library runs the operator: it asks whether masks are full."""
    frame = _asking(frame)
    return frame is not None and Path(frame.f_code.co_filename).is_relative_to(_TRANSFORMERS)


class Shapes:
    """The shapes by which gradients of parameters and logits are recognised."""

    def __init__(self, model: nn.Module) -> None:
        shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self.parameters = shapes | {shape[::-1] for shape in shapes}
        config: Any = getattr(model, "config", None)
        is_of_transformers = hasattr(config, "get_text_config")
        self.vocabulary = getattr(config.get_text_config(), "vocab_size", None) if is_of_transformers else None

    def category(self, shape: tuple[int, ...], phase: str, who: str, *, recomputing: bool) -> int:
        """Return the category at birth of a storage whose first tensor has `shape`."""
        if who == DEEPSPEED:
            return COMMUNICATION if phase in (FORWARD, BACKWARD) else TEMPORARY
        if phase == BACKWARD and not recomputing and shape in self.parameters:
            return GRADIENTS
        if self.vocabulary and len(shape) >= 2 and shape[-1] == self.vocabulary and phase in (FORWARD, BACKWARD):
            return LOGITS
        return ACTIVATIONS if phase == FORWARD or recomputing else TEMPORARY


_name = functools.cache(str)  # an operator puts its name together each time
aten = torch.ops.aten
_FUSED_OPTIMIZERS = {
    overload
    for name in ("_fused_adamw_", "_fused_adam_", "_fused_sgd_")
    for overload in (getattr(aten, name).default, getattr(aten, name).tensor_lr)
}


_PRODUCTS = {getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")}
"""Operators of which meta tensors, other than a device's, take matrices of several types."""


class TypesDifferError(RuntimeError):
    """An error of a forward that multiplies matrices of several types."""


class Tracker(StorageWatch):
    """The recording of one dry run in progress.

    On kind `cpu` the host is the device, so everything is recorded and nothing is counted in `host`. `side_streams`
    records work on side streams.
    """

    def __init__(
        self,
        kind: DeviceKind,
        integer: int | None = None,
        capability: Capability = ASSUMED_CAPABILITY,
        resident_threads: int = 0,
        *,
        builds_elsewhere: bool = False,
        alone: bool = False,
        assumed_condition: bool = True,
        first_phase: str = INITIALISATION,
    ) -> None:
        """Make a tracker. `integer`: the answer to a model that reads an integer from its data; None: the longest
        dimension of a batch.

        `capability`: the compute capability of a `cuda` device; `resident_threads`: that it holds at once, 0 leaves
        out memory that depends on them; `builds_elsewhere`: the model comes to a CPU rank parameter by parameter;
        `alone`: it is there already, and there is no DeepSpeed whose operators are not to be counted;
        `assumed_condition`: the answer where a model asks whether a condition on its data is true; `first_phase`: the
        one that recording begins in.
        """
        super().__init__()
        self.kind = self.device_kind = kind
        self.capability = capability
        self._resident_threads = resident_threads
        self._is_for_any_size = False  # whether the stream is to hold for other micro-batches, too
        self._taken: list[int] = []  # storages inside the operator that runs now; -1: gone
        self._after: tuple[Any, kernel_memory.Steps] | None = None  # an operator's steps after its outputs
        self.phase = first_phase
        self.marks: list[list[Mark]] = [[]]  # of each phase, the moments that carry more than births and deaths
        self.host = HostMemory()
        self.side_streams = SideStreams()
        self._timeline = TimelineBuilder()
        self._timeline.phase(first_phase)
        self._storage: dict[int, int] = {}  # address of a live device storage -> its index
        self._counted = Counts()  # but for operators, which are counted in `num_operators`
        self._recomputed_from: int | None = None  # operators before the layer that is now recomputed
        self._shapes: Shapes | None = None
        self._running: list[str] = [""]  # names of the modules that run now, innermost last
        self._own_metadata = False
        self._assumptions: dict[str, str] = {}  # an assumption -> the first module that needs it
        self._integer = integer
        self.was_asked = False  # in forward, for numbers or conditions that depend on data
        self.false: set[int] = set()  # addresses of storages of which every value is false
        self._places: set[int] = set()  # addresses of results of `nonzero`
        self._assumed_condition = assumed_condition
        self._building = not alone and (kind == "cuda" or builds_elsewhere)  # and arrives later
        self._forward_from = 0  # operators before the phase
        self._alone = alone
        self._watch_before: slices.Watch | None = None

    def __enter__(self) -> Self:
        """Start recording."""
        self._watch_before = slices.watch(self.through)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Stop recording."""
        super().__exit__(*exception)
        slices.watch(self._watch_before)

    # Phases and models

    def timeline(self) -> Timeline:
        """Return everything recorded so far."""
        return self._timeline.timeline()

    def mark(self, phase: str) -> None:
        """Begin `phase`."""
        if phase != BACKWARD:  # the end of a backward (`independent_gradient_partition_epilogue`) waits for all streams
            self._timeline.events += self.side_streams.join()
        if self.phase == FORWARD:
            self._counted["num_forward"] += self.num_operators - self._forward_from
        self._forward_from = self.num_operators
        self.phase = phase
        self._timeline.phase(phase)
        self.marks.append([])

    def empty_cache(self) -> None:
        """Record that DeepSpeed empties the device allocator's cache; a CPU has none."""
        if self.kind == "cuda":
            self._timeline.empty_cache()

    def watch(self, model: nn.Module) -> None:
        """Recognise gradients and logits by the shapes of `model`, and name its modules in the recording."""
        self._shapes = Shapes(model)
        if self._building:  # `torch.tensor`, as in batch norm's counters, makes them outside of all modes
            with torch_internals.without_modes():
                self.hold((*model.buffers(), *quantised.scales(model)))
        self._building = False
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda _module, _args, name=name: self._enter(name))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def expect(self, batch: dict[str, Tensor]) -> None:
        """Take the integer that a model reads from the shapes of such a batch."""
        if self._integer is None:
            self._integer = max((size for tensor in batch.values() for size in tensor.shape[1:]), default=1)

    def arrive(self, *tensors: Tensor) -> None:
        """Move the model's `tensors` from the host to the device, where they are not there already."""
        for tensor in tensors:
            address = torch_internals.address(tensor)
            size_bytes = self.host.leave(address)
            if size_bytes is not None:
                self._storage[address] = self._record(size_bytes, PARAMETERS, "to device")

    def relabel(self, kept: Iterable[tuple[Tensor, int]]) -> None:
        """Set the categories of live storages. The first category of a storage counts."""
        seen: set[int] = set()
        with torch_internals.without_modes():  # looking is no operator
            for tensor, category in kept:
                index = self._storage.get(torch_internals.address(tensor))
                if index is not None and index not in seen:
                    seen.add(index)
                    self._timeline.categories[index] = category

    @property
    def _recomputing(self) -> bool:
        """Return whether backward runs a module's forward again. A `Function` hides it from `is_grad_enabled`."""
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
        """Record a new storage, on the device or on the host."""
        if self._own_metadata or (self.kind == "cuda" and kernel_memory.is_on_host(operator, tensor)):
            return
        if self._building:
            if tensor.is_meta:
                self.host.wait(address, size_bytes)
            return
        if self.kind == "cuda" and tensor.device.type == "cpu":
            self.host.born(address, size_bytes)
            return
        if self._shapes is None:
            category = TEMPORARY
        else:
            who = asker(sys._getframe())
            category = self._shapes.category(tuple(tensor.shape), self.phase, who, recomputing=self._recomputing)
        self._timeline.events += self.side_streams.born(address)
        self._storage[address] = self._record(size_bytes, category, operator)

    def died(self, address: int, size_bytes: int) -> None:
        """Record the end of a storage."""
        self.false.discard(address)
        self._places.discard(address)
        index = self._storage.pop(address, None)
        if index is None:
            self.host.died(address, size_bytes)
        elif not self.side_streams.keeps(address, index):
            self._timeline.events.append(index)

    def _record(self, size_bytes: int, category: int, operator: Any) -> int:
        return self._timeline.born(size_bytes, category, _name(operator), self._running[-1])

    # Slices

    def through(self, starts: range) -> Iterator[int]:
        """Yield the starts of slices to run; the recording of the others is written, see `NUM_RUN`."""
        timeline, places = self._timeline, []
        for start in starts[:NUM_RUN]:
            yield start
            counted = Counter({**self._counted, "num_operators": self.num_operators})
            elsewhere = (len(self.marks[-1]), len(timeline.empties), self.host.live_bytes, self.host.peak_bytes)
            places.append(_BetweenSlices(len(timeline.events), len(timeline.fixed), counted, elsewhere))
        others = starts[NUM_RUN:]
        if len(others) > 1 and _are_alike(timeline, places):
            self._write(places[-2], places[-1], len(others) - 1)
            others = others[-1:]
        yield from others

    def _write(self, before: "_BetweenSlices", after: "_BetweenSlices", times: int) -> None:
        """Write the recording between two places `times` times more; addresses then belong to the last one written."""
        timeline, num_births = self._timeline, after.birth - before.birth
        for values in (timeline.fixed, timeline.per_sample, timeline.categories, timeline.operators, timeline.modules):
            values += values[before.birth : after.birth] * times
        said = timeline.events[before.event : after.event]
        timeline.events += [storage + i * num_births for i in range(1, times + 1) for storage in said]
        born, moved = range(before.birth, after.birth), times * num_births
        self._storage |= {address: index + moved for address, index in self._storage.items() if index in born}
        counted = after.counted - before.counted
        self.num_operators += times * counted.pop("num_operators", 0)
        for name, number in counted.items():
            self._counted[name] += times * number

    # Operators

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operator's result without touching host memory."""
        if func is aten._unsafe_view.default and args[0].is_meta:
            return func(*args)  # moves nothing, and is the result of every product
        # DeepSpeed keeps shapes as meta tensors of its own (stage_1_and_2.py), which are nothing on a real device.
        self._own_metadata = func is aten.zeros_like.default and "device" in kwargs and self.phase == INITIALISATION
        key = operators.key_of(func, args, kwargs)
        out = NotImplemented
        if key not in operators.known:
            if func is aten._local_scalar_dense.default and operators.has_no_values(args[0]):
                return self._scalar(args[0])
            if func in _PRODUCTS and len(types := {str(each.dtype) for each in tensors_in(args)}) > 1:
                raise TypesDifferError(
                    f"matrices of a product must have the same dtype, not {' and '.join(sorted(types))}"
                )
            if func in _FUSED_OPTIMIZERS:
                return None  # updates in place, and takes no memory
            if (
                func in operators.STAND_INS
                and operators.has_no_values(args[0])
                and (assumed := operators.STAND_INS[func](*args, **kwargs)) is not None
            ):
                self._assume(assumed[1])
                if func is aten.nonzero.default:
                    self._places.add(torch_internals.address(assumed[0]))
                return assumed[0]
            out = operators.host_stand_in(func, args, kwargs)
        if out is not NotImplemented and self.kind == "cuda" and self.phase in (FORWARD, BACKWARD):
            self._counted["moved"] += self._moved_bytes(func, args, out)
        if out is NotImplemented:
            out, (flops, traffic) = operators.run_cached(key, func, args, kwargs)
            if func is aten.eq.Scalar and not args[0].dim() and torch_internals.address(args[0]) in self._places:
                self.false.add(torch_internals.address(out))
            if self.phase in (FORWARD, BACKWARD):
                self._count(flops, int(traffic * cpu_pace(func)) if self.kind == "cpu" else traffic)
        if self.kind == "cuda" and not self._building:
            steps = kernel_memory.steps(
                func,
                args,
                self.capability,
                any_size=self._is_for_any_size,
                resident_threads=self._resident_threads,
            )
            outputs = steps.index(kernel_memory.OUTPUTS)
            self._take(func, steps[:outputs])
            self._after = func, steps[outputs + 1 :]
        return out

    def launched(self, traffic: int) -> None:
        """Count a fused kernel that would be launched here, which reads and writes `traffic` bytes."""
        self.num_operators += 1
        if self.phase in (FORWARD, BACKWARD):
            self._count(0, traffic)

    def in_order(self, func: Any, out: Any) -> Iterable[Tensor]:
        """Return the outputs of an operator in the order in which its kernel makes them."""
        return kernel_memory.in_order(func, tensors_in(out)) if self.kind == "cuda" else tensors_in(out)

    def executed(self) -> None:
        """Record the blocks that a kernel takes after its outputs, and free all that it took."""
        if self._after is not None:
            self._take(*self._after)
            self._timeline.events += [index for index in reversed(self._taken) if index >= 0]
            self._taken.clear()
            self._after = None

    def _take(self, operator: Any, steps: kernel_memory.Steps) -> None:
        for step in steps:
            if step > 0:
                self._taken.append(self._record(step, TEMPORARY, operator))
            else:
                self._timeline.events.append(self._taken[-step - 1])
                self._taken[-step - 1] = -1

    def _count(self, flops: int, traffic: int) -> None:
        """Add the costs of an operator of the model. DeepSpeed's own are added by `frugal.planning.cost`."""
        if not self._alone and traffic and asker(sys._getframe()) == DEEPSPEED:
            return
        prefix = "recompute_" if self._recomputing else ""
        self._counted[prefix + "flops"] += flops
        self._counted[prefix + "traffic"] += traffic

    def _moved_bytes(self, func: Any, args: tuple[Any, ...], out: Any) -> int:
        """Return the bytes that a copy of the model's moves between host and device."""
        source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], out)
        if func not in (aten.copy_.default, aten._to_copy.default) or source.device == target.device:
            return 0
        return 0 if not self._alone and asker(sys._getframe()) == DEEPSPEED else int(source.nbytes)

    @property
    def counts(self) -> Counts:
        """Return the counts of forward and backward so far."""
        counted = Counts(self._counted)
        counted["num_operators"] = self.num_operators
        if self.phase == FORWARD:
            counted["num_forward"] += self.num_operators - self._forward_from
        return counted

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        """Return the answer to `.item()`, which decides how the program continues.

        In forward: every mask is full and nothing is packed, so that the kernels without a mask are taken; other
        answers are assumptions, see `frugal.dryrun.trace.operators`. After it: nothing overflowed, and norms are 1.
        A place that `nonzero` names is the first, and none that is looked for: a loop over experts runs them all.
        """
        if (address := torch_internals.address(tensor)) in self.false or address in self._places:
            return False if tensor.dtype == torch.bool else 0
        if tensor.dtype.is_floating_point:
            return 1.0
        if self.phase == INITIALISATION:
            return True if tensor.dtype == torch.bool else 1
        frame = sys._getframe(1)  # its own would be a reference cycle, which keeps tensors alive
        if self.phase != FORWARD and not (self.phase == BACKWARD and asker(frame) == MODEL):
            return False if tensor.dtype == torch.bool else 0
        self.was_asked = True
        if tensor.dtype == torch.bool:
            if not self._assumed_condition or not asked_by_transformers(frame):
                words = "true" if self._assumed_condition else "false"
                self._assume(f"an `if` depends on data: counted as if its condition were {words}")
            return self._assumed_condition
        integer = self._integer or 1
        self._assume(f"an integer is read from data: counted as if it were {integer}")
        return integer

    def _assume(self, what: str) -> None:
        """Note an assumption once, with the first module that needs it."""
        if self.phase in (INITIALISATION, FORWARD):
            self._assumptions.setdefault(what, self._running[-1])

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the assumptions about data."""
        return tuple(f"{module}: {what}" if module else what for what, module in self._assumptions.items())


NUM_RUN = 3
"""Slices of a tiled loss or MLP that are run before the recording of others is written instead of running them.

A sample of a million tokens has hundreds of slices in each layer, and all but the last are alike. The first three and
the last are run: the first is special. If the recordings of the second and the third are equal, relative to themselves
and the slice before, all others up to the last would be equal, too, since they begin with the same: the written
recording is exactly the one that running them would make.
"""


@dataclass(frozen=True)
class _BetweenSlices:
    """A position in a recording, between two slices.

    Attributes:
        event: number of the next event.
        birth: number of the next storage.
        counted: the counts so far, by name.
        elsewhere: numbers that must not change in a slice: of marks, and of bytes on the host.
    """

    event: int
    birth: int
    counted: Counter[str]
    elsewhere: tuple[int, ...]


def _are_alike(timeline: TimelineBuilder, places: Sequence[_BetweenSlices]) -> bool:
    """Return whether the slices between three places did the same, and each storage ends in its slice or in the
    next."""
    first, second, third = places
    num_births = second.birth - first.birth
    if third.birth - second.birth != num_births or third.event - second.event != second.event - first.event:
        return False
    if not first.elsewhere == second.elsewhere == third.elsewhere:
        return False
    if second.counted - first.counted != third.counted - second.counted:
        return False
    of_storages = (timeline.fixed, timeline.categories, timeline.operators, timeline.modules)
    if any(values[first.birth : second.birth] != values[second.birth : third.birth] for values in of_storages):
        return False
    one, other = (timeline.events[a.event : b.event] for a, b in pairwise(places))
    if [storage + num_births for storage in one] != other or min(other, default=first.birth) < first.birth:
        return False
    num_events = Counter(timeline.events[first.event : third.event])
    return all(num_events[storage] == 2 for storage in range(first.birth, second.birth))


@contextmanager
def not_collected() -> Iterator[None]:
    """Collect cycles only between phases inside the `with` block, so that two dry runs free in the same order.

    Older objects are frozen, because going through all of transformers takes longer than a phase.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
