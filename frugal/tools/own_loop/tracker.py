"""The recording of a user's own loop: tensors on the card, on the host and on neither, and the loop's phases.

The phases are the loop's own:

| phase          | begins with                                                                      |
|----------------|----------------------------------------------------------------------------------|
| initialisation | the script                                                                       |
| forward        | a call of the step; a model's forward with gradients, after a backward           |
| backward       | `backward()`                                                                     |
| optimizer step | the end of `backward()`: unscaling, clipping, the optimizer, `zero_grad()`       |

Tensors on torch's own meta device, on which models are built without memory, are distinguished from those on the
card: both are meta tensors here.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.config.hardware.cluster import kernel_class
from frugal.dryrun.trace.recorder import DEEPSPEED, Shapes, Tracker, asked_by_transformers, asker, package_folder
from frugal.planning.memory import workspaces
from frugal.planning.memory.allocator import Replays
from frugal.planning.memory.caching_allocator import RESERVATION
from frugal.planning.memory.timeline import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    PARAMETERS,
    TEMPORARY,
)
from frugal.torch_internals import tensors_in

aten = torch.ops.aten

PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default, aten.mv.default,
    aten.addbmm.default, aten._addmm_activation.default,
}  # fmt: skip
"""A loop may multiply before its first forward, and run backward where it likes: cuBLAS's workspaces are recorded when
the first product of a thread runs."""

BIASED = {aten.addmm.default, aten._addmm_activation.default}
"""Products that cuBLASLt computes where what they add is a bias."""

CHUNK_ELEMENTS = 65536  # of a tensor, of one block of threads (MultiTensorApply.cuh, ForeachReduceOp.cu)

VALUES_ARE_ZERO = "values are copied from the card to the host: counted as if they were zero"

_UNSCALING = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: lambda *_: None,
    aten._amp_update_scale_.default: lambda scale, *_: scale,
}
"""`GradScaler`'s operators: they work in place, and have no kernels on meta."""

_BETWEEN_DEVICES = {
    aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put.default, aten.index_put_.default,
    aten._pack_padded_sequence.default,
}  # fmt: skip
_GRAD_SCALER = torch.amp.grad_scaler.__file__
_PACKAGE_OF: dict[str, str] = {}

Kept = Callable[[], Iterable[tuple[Tensor, int]]]


def asks_for_deepspeed(frame: FrameType | None) -> bool:
    """Return whether DeepSpeed runs a frame, directly or through torch and transformers, as in `Module.to`."""
    while frame is not None and package_of(frame) in ("torch", "transformers", "frugal"):
        frame = frame.f_back
    return frame is not None and package_of(frame) == "deepspeed"


def imports_a_library(frame: FrameType | None) -> bool:
    """Return whether an installed package runs a frame while it is imported, and no line of a script asks for it."""
    while frame is not None and "-packages" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith("<frozen importlib")


def package_of(frame: FrameType) -> str:
    """Return the package of a frame's code, if it matters here; empty for others, such as a script. For DeepSpeed's own
    code the card is a meta device."""
    file = frame.f_code.co_filename
    if file not in _PACKAGE_OF:
        packages = ("deepspeed", "torch", "transformers", "frugal")
        _PACKAGE_OF[file] = next((name for name in packages if Path(file).is_relative_to(package_folder(name))), "")
    return _PACKAGE_OF[file]


class LoopTracker(Tracker):
    """A tracker of a user's loop instead of frugal's own step.

    `reservation_bytes`: of a driver; see `frugal.planning.memory.caching_allocator`.
    """

    reservation_bytes = RESERVATION

    def __init__(
        self,
        capability: tuple[int, int],
        resident_threads: int = 0,
        *,
        expandable_segments: bool = False,
        torch_version: tuple[int, int] | None = None,
    ) -> None:
        """Make a tracker for a card. `capability` and `torch_version` (None: this one) decide cuBLAS's workspaces;
        `resident_threads`: see `Tracker`."""
        super().__init__("cuda", capability=kernel_class(capability), resident_threads=resident_threads, alone=True)
        self._expandable_segments = expandable_segments
        self._workspace_bytes = workspaces.workspace_bytes(capability, torch_version)
        self._lt_bytes = workspaces.lt_workspace_bytes(torch_version)
        self._keeps_lt = torch_version is None or torch_version > workspaces.LAST_WITH_LT_IN_A_CALL
        self._elsewhere: set[int] = set()  # addresses of storages on torch's own meta device
        self._is_elsewhere = False
        self._host_runs = False  # whether operators on the host really run, however large
        self._in_backward = False
        self._has_workspace: set[bool] = set()  # for threads: autograd's has a cuBLAS handle of its own
        self._has_lt: set[bool] = set()  # likewise
        self._stepped: WeakSet[torch.optim.Optimizer] = WeakSet()  # wherever the script made them
        # functions that yield tensors with their categories
        self.kept: list[Kept] = [lambda: (pair for each in self._stepped for pair in kept_by_optimizer(each))]
        self._shapes = Shapes(nn.Module())  # until a model is followed
        self._models: list[nn.Module] = []
        self._peaks_from = 0, 0  # events and emptied caches until then
        self.overlaps = False  # whether DeepSpeed's engine has a stream of its own for gradients

    # Where tensors are

    def is_on_card(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the card, not on torch's own meta device. No function mode may be active."""
        return tensor.is_meta and torch_internals.address(tensor) not in self._elsewhere

    def elsewhere(self) -> AbstractContextManager[Any]:
        """Count meta tensors that are made inside the `with` block as not on the card."""
        return patch.object(self, "_is_elsewhere", True)

    def on_host(self) -> AbstractContextManager[Any]:
        """Run operators on the host for real inside the `with` block, such as those that make a batch from data."""
        return patch.object(self, "_host_runs", True)

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Record a new storage, unless it is on torch's own meta device."""
        if self._is_elsewhere and tensor.is_meta:
            self._elsewhere.add(address)
        else:
            super().born(address, size_bytes, tensor, operator)

    def died(self, address: int, size_bytes: int) -> None:
        """Record the end of a storage."""
        if address in self._elsewhere:
            self._elsewhere.discard(address)
        else:
            super().died(address, size_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one operator. Results of tensors that are not on the card are not on it either."""
        with torch_internals.without_functions():
            if func is aten.lift_fresh.default:  # `torch.tensor(..., device="cuda")`
                self.hold(args)
            inputs = [tensor for tensor in tensors_in(args) if tensor.is_meta] if self._elsewhere else []
            if not self._is_elsewhere and inputs and not any(map(self.is_on_card, inputs)):
                with self.elsewhere():
                    return super().__torch_dispatch__(func, types, args, kwargs)
            inside = 0
            if func is aten._foreach_norm.Scalar:  # partial sums: for each tensor as many as the largest has chunks
                inside = 4 * len(args[0]) * max(-(-tensor.numel() // CHUNK_ELEMENTS) for tensor in args[0])
            index = self._record(inside, TEMPORARY, func) if inside else None
            out = super().__torch_dispatch__(func, types, args, kwargs)
            if index is not None:
                self._timeline.events.append(index)
            if func in PRODUCTS and args[0].is_meta and self._in_backward not in self._has_workspace:
                self._has_workspace.add(self._in_backward)
                self._record(self._workspace_bytes, TEMPORARY, workspaces.WORKSPACE)
            if func in BIASED and self._lt_bytes and args[0].is_meta and args[0].dim() == 1:
                self._take_lt()
            return out

    def _take_lt(self) -> None:
        """Record cuBLASLt's own workspace for a product with a bias: the first of a thread, or inside each call."""
        if self._in_backward in self._has_lt:
            return
        index = self._record(self._lt_bytes, TEMPORARY, workspaces.LT_WORKSPACE)
        if self._keeps_lt:
            self._has_lt.add(self._in_backward)
        else:
            self._timeline.events.append(index)

    def side_stream(self, name: str) -> AbstractContextManager[Any]:
        """Return a context for a stream that DeepSpeed names, which may be the computing one."""
        return self.side_streams.at_work(name) if self.overlaps else nullcontext()

    # Operators

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the operator's result."""
        if (unscaling := _UNSCALING.get(func)) is not None:
            return unscaling(*args)
        if self._host_runs and not any(tensor.is_meta for tensor in tensors_in((*args, *kwargs.values()))):
            target = kwargs.get("device")
            if target is None or torch.device(target).type == "cpu":
                return func(*args, **kwargs)
        tensors = list(tensors_in(args)) if func not in _BETWEEN_DEVICES else []
        if any(t.is_meta for t in tensors) and any(t.dim() and not t.is_meta for t in tensors):
            raise RuntimeError(  # as CUDA does; single numbers may come from the host
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({func.overloadpacket})"
            )
        is_copy = func is aten._to_copy.default and args[0].is_meta
        out = super().execute(func, args, kwargs)
        if is_copy and torch.device(kwargs.get("device") or "meta").type == "cpu":
            if asker(sys._getframe()) != DEEPSPEED:
                self._assume(VALUES_ARE_ZERO)
            return out
        if func is aten.native_dropout.default:
            self._see(out[1], func, args)  # CUDA makes the mask first (Dropout.cu)
        if self._own_metadata and asker(sys._getframe()) != DEEPSPEED:
            self._own_metadata = False
        return out

    def _scalar(self, tensor: Tensor) -> bool | int | float:
        """Answer as `Tracker`, but report no infinite gradient to `GradScaler`, which reads a float, no NaN to scripts,
        and full masks to transformers also where a loop's next forward is not known from its optimizer step."""
        is_false = torch_internals.address(tensor) in self.false
        if tensor.dtype == torch.bool and not is_false and asked_by_transformers(sys._getframe(1)):
            return True
        if tensor.dtype.is_floating_point and _asked_by_grad_scaler(sys._getframe(1)):
            return 0.0
        return super()._scalar(tensor)

    # Phases

    def follow(self, model: nn.Module) -> None:
        """Name a model's modules in the recording, and recognise its gradients and logits by shape. Its forward ends an
        optimizer step."""
        self._models.append(model)
        self.watch(model)
        if len(self._models) > 1:  # the shapes of all of them
            assert self._shapes is not None
            for each in map(Shapes, self._models):
                self._shapes.parameters |= each.parameters
                self._shapes.vocabulary = self._shapes.vocabulary or each.vocabulary

    def _enter(self, name: str) -> None:
        if not self._in_backward and self.phase == OPTIMIZER_STEP and torch.is_grad_enabled():
            self.mark(FORWARD)
        super()._enter(name)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Mark the backward pass, which autograd runs inside the `with` block."""
        if self._in_backward:  # within another one
            yield
            return
        self.mark(BACKWARD)
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False
            self.mark(OPTIMIZER_STEP)

    def mark(self, phase: str) -> None:
        """Begin `phase`, and relabel live tensors by their purpose."""
        with torch_internals.without_functions():
            self.relabel(pair for kept in self.kept for pair in kept())
        if phase != self.phase:
            super().mark(phase)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Recognise what an optimizer keeps that took a step, which ends there where no model is followed."""
        self._stepped.add(optimizer)
        self.mark(self.phase if self._models else FORWARD)

    def note(self, what: str) -> None:
        """Note an assumption."""
        self._assumptions.setdefault(what, "")

    # Questions of the script to the card

    def empty_cache(self, *_: Any) -> None:
        """Record `torch.cuda.empty_cache`."""
        self._timeline.empty_cache()

    @property
    def _now(self) -> tuple[int, int]:
        return len(self._timeline.events), len(self._timeline.empties)

    @property
    def current(self) -> tuple[int, int]:
        """Return `torch.cuda.memory_allocated` and `torch.cuda.memory_reserved`."""
        return self.replays().peaks_from(*self._now)

    def replays(self) -> Replays:
        """Return replays of the allocator, with everything until now."""
        timeline = self.timeline()
        return Replays(
            timeline.fixed,
            timeline.events,
            timeline.empties,
            expandable_segments=self._expandable_segments,
            reservation_bytes=self.reservation_bytes,
        )

    def reset_peaks(self, *_: Any) -> None:
        """Let `peaks` count from here, as `torch.cuda.reset_peak_memory_stats`."""
        self._peaks_from = self._now

    @property
    def peaks(self) -> tuple[int, int]:
        """Return `torch.cuda.max_memory_allocated` and `torch.cuda.max_memory_reserved`."""
        return self.replays().peaks_from(*self._peaks_from)


def kept_by_model(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Yield a model's parameters, their gradients and its buffers, with categories."""
    yield from _with_gradients(model.parameters())
    for buffer in model.buffers():
        yield buffer, PARAMETERS


def kept_by_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, int]]:
    """Yield an optimizer's parameters, their gradients and its states, with categories."""
    for group in optimizer.param_groups:
        yield from _with_gradients(group["params"])
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from ((value, OPTIMIZER) for value in state.values() if isinstance(value, Tensor))


def _with_gradients(parameters: Iterable[Tensor]) -> Iterator[tuple[Tensor, int]]:
    for parameter in parameters:
        yield parameter.data, PARAMETERS
        if parameter.grad is not None:
            yield parameter.grad, GRADIENTS


def _asked_by_grad_scaler(frame: FrameType | None) -> bool:
    """Return whether torch's `GradScaler` runs a frame, directly or through torch."""
    while frame is not None and package_of(frame) in ("torch", "frugal") and frame.f_code.co_filename != _GRAD_SCALER:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _GRAD_SCALER
