"""ZeRO-3's changes to a model's graph, without its engine: its linear function, and its marks around modules.

DeepSpeed puts an autograd function around every module's positional inputs and outputs, to know when its backward
begins and ends (deepspeed/runtime/zero/parameter_offload.py), and replaces `F.linear` by a function of its own. Both
change which tensors live how long, so a trace for ZeRO-3 runs with the same.

It also has ZeRO-3's collectives without their loops over all ranks: to gather parameters and to scatter gradients
DeepSpeed makes a view for each rank and parameter, which is nothing on a device and takes minutes to dry-run for a
thousand ranks. The functions here allocate and free the same storages in the same order as
`partition_parameters.AllGatherCoalescedHandle.wait` and `coalesced_collectives.reduce_scatter_coalesced` of DeepSpeed
0.19.8; a test holds them against those.

Reads of a parameter while it is split are refused: see `SplitReads`.
"""

import gc
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb
from types import FrameType, FunctionType, ModuleType
from typing import Any, Self
from unittest.mock import patch

import torch
import torch.nn.functional as F
from deepspeed import comm
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus
from deepspeed.runtime.zero.utils import apply_to_tensors_only, is_zero_param
from deepspeed.utils import set_z3_leaf_module, z3_leaf_module
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from frugal import torch_internals
from frugal.deepspeed_adapter.simulate import mirrored
from frugal.errors import RequestError, first_line
from frugal.planning.memory.timeline import MarkKind
from frugal.required import put

Marker = Callable[[MarkKind, int, int], None]
"""Takes the kind of mark, the number of the module or parameter, and for a hold its number."""


_AS_ONE = "frugal_gathered_as_one"


def gather_as_one(module: nn.Module) -> None:
    """Make ZeRO-3 gather all parameters in `module` when it begins, and release them when it ends.

    DeepSpeed does that for its leaf modules, whose gradients it reduces in a hook of the module. Where no
    input of the module needs a gradient, torch calls that hook before the gradients are there, and backward fails.
    Those of this module are reduced like all others, each when it is whole.
    """
    set_z3_leaf_module(module, True)
    setattr(module, _AS_ONE, True)
    put(stage3, "z3_leaf_parameter", _is_reduced_by_module)


def _is_reduced_by_module(parameter: nn.Parameter) -> bool:
    """Replace DeepSpeed's `z3_leaf_parameter`, which checks only for `ds_z3_leaf_module`."""
    module = getattr(parameter, "ds_z3_leaf_module", None)
    return module is not None and not hasattr(module, _AS_ONE)


def gathering(model: nn.Module) -> Iterator[Any]:
    """Yield the modules that gather parameters: not those inside one that gathers for all within."""
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module not in inside:
            yield module
            if z3_leaf_module(module):
                inside |= set(module.modules())


def gathered_as_one(model: nn.Module) -> tuple[int, ...]:
    """Return the numbers of the modules that gather for all within."""
    numbers = {module: number for number, module in enumerate(model.modules())}
    return tuple(numbers[module] for module in gathering(model) if z3_leaf_module(module))


def parameters_of_modules(model: nn.Module, *, within: bool) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of the parameters of each module, in order. `within`: also those of modules inside it."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    return tuple(
        tuple(sorted({numbers[id(parameter)] for parameter in module.parameters(recurse=within)}))
        for module in model.modules()
    )


def linear_of_zero3() -> AbstractContextManager[Any]:
    """Replace `F.linear` by ZeRO-3's inside the `with` block."""
    return patch.object(F, "linear", zero3_linear_wrap)


class _Parameters:
    """Parameters that get new memory for each use, which shows the uses that outlive the module that fetched them.

    Recomputed layers keep detached parameters for backward, so releasing a parameter does not free it then.
    """

    def __init__(self, model: nn.Module, mark: Marker) -> None:
        self._mark = mark
        self._numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        self._at_rest = [parameter.data for parameter in model.parameters()]
        self._own: dict[nn.Module, list[tuple[int, nn.Parameter]]] = {}  # module -> what it gathers
        self._users: dict[int, int] = {}  # parameter -> modules that use it
        self._uses: dict[int, Any] = {}  # parameter -> a finalizer of its present memory
        self._num_uses = 0
        self.running: list[nn.Module] = []  # in forward, the innermost last
        self._in_forward = False
        self._holds: dict[int, int] = {}  # number of a use -> that of its hold

    def of(self, module: nn.Module) -> None:
        """Note what a module gathers."""
        own = module.parameters(recurse=z3_leaf_module(module))
        self._own[module] = [(self._numbers[id(parameter)], parameter) for parameter in own]

    def fetch(self, module: nn.Module) -> None:
        for number, parameter in self._own[module]:
            self._fetch(number, parameter)

    def _fetch(self, number: int, parameter: nn.Parameter) -> None:
        if number not in self._uses:
            with torch_internals.without_modes():
                data = torch.empty_like(self._at_rest[number])
                self._uses[number] = weakref.finalize(data.untyped_storage(), self._gone, number, self._num_uses)
                self._num_uses += 1
                parameter.data = data
                del data
        self._users[number] = self._users.get(number, 0) + 1

    def release(self, module: nn.Module) -> None:
        for number, parameter in self._own[module]:
            self._users[number] -= 1
            if self._users[number] == 0:
                with torch_internals.without_modes():
                    parameter.data = self._at_rest[number]
                use = self._uses.pop(number).peek()
                if use is not None:  # it is still referenced
                    self._holds[use[2][1]] = len(self._holds)
                    self._mark(MarkKind.HOLD, number, len(self._holds) - 1)

    def begin_forward(self, *_: Any) -> None:
        self._mark(MarkKind.FORWARD_BEGINS, 0, -1)
        self._in_forward = True

    def end_forward(self, *_: Any) -> None:
        self._in_forward = False

    def read(self, parameter: nn.Parameter) -> None:
        """Mark that a parameter is looked at in forward while no module has fetched it, and fetch it for the module
        that runs, which gathers it from then on (`ZeROOrderedDict.__getitem__`)."""
        if self._in_forward and (number := self._numbers[id(parameter)]) not in self._uses:
            self._mark(MarkKind.READ, number, -1)
            self._own[self.running[-1]].append((number, parameter))
            self._fetch(number, parameter)

    def _gone(self, number: int, use: int) -> None:
        if use in self._holds:
            self._mark(MarkKind.LET_GO, number, self._holds[use])


class _Owned(dict[str, nn.Parameter | None]):
    """A module's parameters by name, which say when they are looked at (`ZeROOrderedDict`)."""

    def __init__(self, owned: Mapping[str, nn.Parameter | None], read: Callable[[nn.Parameter], None]) -> None:
        super().__init__(owned)
        self._read_by = read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._read_by(parameter)
        return parameter


class _Module:
    """The state of one module while the model runs (`DeepSpeedZeRoOffload._register_deepspeed_module`)."""

    def __init__(self, module: nn.Module, number: int, parameters: _Parameters, mark: Marker) -> None:
        self.module = module
        self.number = number
        self.parameters = parameters
        self._mark = mark
        self.backwards_to_come = 0  # outputs whose backward will announce the module's
        self.gradients_to_come = 0  # inputs whose gradients end the module's backward

    def mark(self, kind: MarkKind) -> None:
        """Mark the beginning or end of this module."""
        if kind in (MarkKind.FETCH, MarkKind.FETCH_IN_BACKWARD):
            self.parameters.fetch(self.module)
        else:
            self.parameters.release(self.module)
        self._mark(kind, self.number, -1)

    def before_forward(self, _module: nn.Module, inputs: Any) -> Any:
        self.mark(MarkKind.FETCH)
        self.parameters.running.append(self.module)
        self.gradients_to_come = 0
        return apply_to_tensors(lambda tensor: _AfterBackward.apply(tensor, self), inputs)

    def after_forward(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        self.parameters.running.pop()
        self.mark(MarkKind.RELEASE)
        apply_to_kept(self._before_backward, self.module)
        return apply_to_tensors(self._before_backward, output)

    def _before_backward(self, tensor: Tensor) -> Any:
        return _BeforeBackward.apply(tensor, self)


def apply_to_tensors(function: Callable[[Tensor], Tensor], value: Any, warning_msg_fn: Any = None) -> Any:
    """Replace DeepSpeed's `apply_to_tensors_only`, which finds no tensor in objects and closures, and copies lists.

    A module that returned a dataclass would run backward while its parameters are split, and what a module adds to a
    list would be lost. Only tensors, and what is in tuples and dicts, are replaced: the rest is its maker's.
    """
    if isinstance(value, Tensor):
        return apply_to_tensors_only(function, value)
    if isinstance(value, tuple):
        parts = [apply_to_tensors(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):  # transformers' outputs
        for key, each in value.items():
            value[key] = apply_to_tensors(function, each)
        return value
    _apply_to_hidden(function, value)
    return value


def apply_to_kept(function: Callable[[Tensor], Tensor], module: nn.Module) -> None:
    """Apply `function` to the tensors that a forward left in attributes of `module`, such as a router's loss."""
    for name, kept in list(vars(module).items()):  # `function` may set one
        if name[0] != "_" and isinstance(kept, Tensor | tuple | list | dict):
            _apply_to_hidden(function, kept)


def _apply_to_hidden(function: Callable[[Tensor], Tensor], value: Any) -> None:
    """Run the backward of `function` when the gradient of a tensor within `value` arrives, which stays as it is."""
    seen, inside = set[int](), deque([value])
    while inside and len(seen) < _MOST_OBJECTS and torch.is_grad_enabled():
        each = inside.popleft()
        is_new = id(each) not in seen
        seen.add(id(each))
        if is_new and isinstance(each, Tensor) and each.grad_fn is not None:
            node: Any = function(each.detach().requires_grad_()).grad_fn  # of another tensor: no circle of references
            each.register_hook(lambda gradient, node=node: node.apply(gradient)[0])
        elif is_new and not isinstance(each, _NOT_SEARCHED):
            # of a function not the globals of its module
            inside.extend(gc.get_referents(each.__closure__ if isinstance(each, FunctionType) else each))


_MOST_OBJECTS = 1000
"""The most objects in which tensors are looked for: some lead to all that a program has."""

_NOT_SEARCHED = (Tensor, nn.Module, type, ModuleType, FrameType)


class _BeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(output: Tensor, module: _Module) -> Tensor:
        return output.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.module = inputs[1]
        ctx.module.backwards_to_come += 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.module.backwards_to_come > 0:
            ctx.module.mark(MarkKind.FETCH_IN_BACKWARD)
            ctx.module.backwards_to_come -= 1
        return (*grads, None)


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(input: Tensor, module: _Module) -> Tensor:
        return input.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.module = inputs[1]
        if inputs[0].requires_grad:
            ctx.module.gradients_to_come += 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.module.gradients_to_come -= 1
        if ctx.module.gradients_to_come == 0:
            ctx.module.mark(MarkKind.RELEASE_IN_BACKWARD)
        return (*grads, None)


def install(model: nn.Module, mark: Marker) -> None:
    """Make every module of `model` that gathers parameters mark when it fetches and releases them."""
    parameters = _Parameters(model, mark)
    model.register_forward_pre_hook(parameters.begin_forward)
    numbers = {module: number for number, module in enumerate(model.modules())}
    for module in gathering(model):
        parameters.of(module)
        state = _Module(module, numbers[module], parameters, mark)
        module.register_forward_pre_hook(state.before_forward)
        module.register_forward_hook(state.after_forward)
    for module in model.modules():
        module._parameters = _Owned(module._parameters, parameters.read)
    model.register_forward_hook(parameters.end_forward)


@contextmanager
def at_once() -> Iterator[None]:
    """Make the cost of a collective independent of the number of ranks inside the `with` block.

    Where DeepSpeed's are not the ones repeated here, they are left in place.
    """
    folder = mirrored.package_folder()
    if mirrored.changed(folder, "zero3_graph._wait") or mirrored.changed(folder, "zero3_graph._reduce_scatter"):
        yield
    else:
        with (
            patch.object(AllGatherCoalescedHandle, "wait", _wait),
            patch.object(stage3, "reduce_scatter_coalesced", _reduce_scatter_coalesced),
            patch.object(Tensor, "narrow", _narrow),
        ):
            yield


def _narrow(tensor: Tensor, dim: int, start: int | Tensor, length: int | Tensor) -> Tensor:
    """Return a view, made without asking the tracker: one a rank is made for every gathered bucket."""
    start, length = int(start), int(length)  # of a tensor, as in LED, only the tracker can be asked
    with torch_internals.without_dispatch():
        return torch.narrow(tensor, dim, start, length)


def _wait(handle: Any, handle_dependency: bool = True) -> None:
    """Assemble each parameter from all ranks' parts of the bucket."""
    if handle.complete:
        return
    for parameter in handle.params:
        whole = torch.empty(parameter.ds_numel, dtype=handle.partitions[0].dtype, device=handle.partitions[0].device)
        parameter.data = whole.view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = ZeroParamStatus.AVAILABLE
    handle.complete = True


@torch.no_grad()
def _reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Return this rank's part of each tensor, padded, in one flat buffer."""
    rank, world_size = comm.get_rank(group), comm.get_world_size(group)
    chunks = [math.ceil(tensor.numel() / world_size) for tensor in tensors]
    if len(tensors) == 1 and tensors[0].numel() % world_size == 0:
        flat = tensors[0].view(-1)
    else:
        padding = [  # of each rank whose part is not full
            tensor.new_empty(chunk - max(0, min(chunk, tensor.numel() - other * chunk)))
            for tensor, chunk in zip(tensors, chunks, strict=True)
            for other in range(tensor.numel() // chunk, world_size)
        ]
        flat = tensors[0].new_empty(world_size * sum(chunks))
        del padding
    mine = flat.view(-1).narrow(0, rank * sum(chunks), sum(chunks))
    parts, offset = [], 0
    for tensor, chunk in zip(tensors, chunks, strict=True):
        parts.append(mine.narrow(0, offset, max(0, min(chunk, tensor.numel() - rank * chunk))))
        offset += chunk
    return parts


class SplitReads(TorchFunctionMode):
    """A mode that refuses reads of a parameter of `model` while ZeRO-3 has it split, and so empty.

    A module's parameters are whole in its forward. A loss that adds the norm of `model.parameters()`, or multiplies by
    one's norm or size, would be trained without it: DeepSpeed 0.19.8 says nothing, or dies in backward. Each operation
    takes microseconds more, so it is for a first step, in which functions from torch.compile run eagerly: compiled ones
    compute something else under a mode that they were not compiled under.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __enter__(self) -> Self:
        """Begin the step."""
        self._eagerly = torch.compiler.set_stance("force_eager")
        return super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """End the step. Raises: RequestError: an operation of its backward failed, as on a split parameter."""
        super().__exit__(kind, error, trace)
        self._eagerly.__exit__(kind, error, trace)
        names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(trace)]
        is_of_tensors = type(error) is RuntimeError and not torch_internals.is_out_of_memory(error)
        is_ours = any(name.startswith("deepspeed.") for name in names[-2:])
        if is_of_tensors and "torch.autograd.graph" in names and not is_ours:
            raise RequestError(
                "the backward pass of the model fails under ZeRO-3",
                because=f"{first_line(error)}; DeepSpeed gathers a module's parameters when a gradient arrives at what "
                "its forward returned or left in its attributes, not at what it wrote into a dict or object of others",
                hint="return all that later parts use; or use --zero-stage 2 or lower, where another cause shows, too",
            )

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        operation = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        if operation not in _NO_VALUES:
            for each in (*args, *kwargs.values()):
                for one in each if isinstance(each, list | tuple) else (each,):
                    is_split = isinstance(one, nn.Parameter) and is_zero_param(one)
                    if is_split and one.ds_status != ZeroParamStatus.AVAILABLE and not _asks_itself():
                        named = self._model.named_parameters()
                        name = next((name for name, other in named if other is one), "of no module")
                        raise RequestError(
                            f"ZeRO-3 has the parameter `{name}` split where it is read",
                            because=f"`{operation}` takes it outside the forward of its module, such as in the loss, "
                            "where it is empty",
                            hint="read it in that module's forward, or use --zero-stage 2 or lower",
                        )
        return func(*args, **kwargs)


_NO_VALUES = frozenset(
    {
        "dtype", "device", "requires_grad", "requires_grad_", "grad", "grad_fn", "is_leaf", "layout", "type", "is_cuda",
        "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_floating_point", "is_complex", "get_device",
        "element_size", "itemsize", "__hash__", "__repr__", "register_hook", "retain_grad",
        "register_post_accumulate_grad_hook",
    }
)  # fmt: skip
"""Attributes that a split parameter answers as a whole one does."""


def _asks_itself() -> bool:
    """Return whether DeepSpeed's or our own code runs the operation, and not its linear function for a module."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller != zero3_linear_wrap.__module__ and caller.startswith(("deepspeed.", "frugal."))
