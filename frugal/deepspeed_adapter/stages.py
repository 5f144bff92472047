"""The ZeRO stages: how the states of each, which DeepSpeed keeps under different names, are reset, updated, laid out
and filled from a checkpoint.

A stage is chosen by the plan. Names of DeepSpeed 0.19.8; a missing one raises.

The Python state of DeepSpeed's objects (attributes, counters, containers) is found by walking instead of by name.
Between two optimizer steps, at rest, a shallow copy of all of it is taken, and put back where a global batch is given
up: every attribute is what it was, every container has the items that it had, and what was added since is released.
Left out: the elements of tensors, which DeepSpeed overwrites in the first micro-step or which `gradients.mend` makes
zero, and states whose other half is elsewhere: configurations, and buffers for disks.

`Zero.optimizer` is what DeepSpeed put around `Zero.inner`, torch's optimizer or one of DeepSpeed's kernels; at stage 0
they are the same. The inner one updates flat fp32 tensors, the masters: see `checkpoint_files`.
"""

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, TypeVar

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from frugal.deepspeed_adapter import checkpoint_files
from frugal.deepspeed_adapter.checkpoint_files import Piece, StateLayout
from frugal.planning.memory.timeline import COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS
from frugal.planning.strategy import Strategy
from frugal.required import in_place_of, put

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

CopyElements = Callable[[str, int, Tensor, bool], None]
"""Fills a tensor with a parameter's saved elements: its name, the first of them, the tensor, whether it is frozen."""

_LINEAR = F.linear
"""As it is before ZeRO-3 replaces it for good."""

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


T = TypeVar("T")

_CONTAINERS = (dict, list, set, deque, tuple)


def _contents(*roots: Any, apart: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container within `roots`, and the `vars` of each object of DeepSpeed's runtime, with a shallow copy:
    a dict of a dict, otherwise a list.

    `apart`: an object that is not entered.
    """
    seen, waiting = {id(apart)}, list(roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        held = each if isinstance(each, _CONTAINERS) else vars(each)
        copy: Any = dict(held) if isinstance(held, dict) else list(held)
        yield held, copy
        waiting += [item for item in _values(copy) if _is_entered(item.__class__)]


def _values(copy: Any) -> Any:
    return copy.values() if isinstance(copy, dict) else copy


@functools.cache
def _is_entered(kind: Any) -> bool:
    module = kind.__module__
    is_of_runtime = module.startswith("deepspeed.runtime.") and not issubclass(kind, Enum)
    return issubclass(kind, _CONTAINERS) or (is_of_runtime and "config" not in module and "swap_tensor" not in module)


class PythonState:
    """The Python state of DeepSpeed's objects at one moment. It holds no tensor that these do not hold at rest."""

    def __init__(self, *roots: Any, apart: Any = None) -> None:
        self._copies = [each for each in _contents(*roots, apart=apart) if not isinstance(each[0], tuple)]

    def put_back(self) -> None:
        """Make the state what it was. Tensors keep the elements that they have."""
        for held, copy in self._copies:
            held.clear()
            (held.update if isinstance(held, dict | set) else held.extend)(copy)


def within(kind: type[T], root: Any, *, apart: Any = None) -> Iterator[T]:
    """Yield the objects of a type in the containers within `root` and in attributes of DeepSpeed's objects there."""
    for _, copy in _contents(root, apart=apart):
        yield from (each for each in _values(copy) if isinstance(each, kind))


class Zero(ABC):
    """A DeepSpeed engine under the strategy it was made for."""

    def __init__(self, engine: Any, strategy: Strategy, schedule: Any = None) -> None:
        self.engine = engine
        self.strategy = strategy
        self._parameters: list[Any] = list(engine.module.parameters())  # finding them takes long, in every step
        self.schedule = schedule  # of learning rates, torch's; None: there is none
        self.optimizer: Any = engine.optimizer
        self.inner: Any = (
            self.optimizer if isinstance(self.optimizer, torch.optim.Optimizer) else self.optimizer.optimizer
        )

    # Tensors

    def kept(self) -> Iterator[tuple[Tensor, int]]:
        """Yield every tensor that model, gradients and optimizer keep, with its category. The first category of a
        storage counts."""
        for parameter in self.engine.module.parameters():
            yield from self._of_parameter(parameter)
            if parameter.grad is not None:
                yield parameter.grad, GRADIENTS
        for buffer in self.engine.module.buffers():
            yield buffer, PARAMETERS
        for state in self.inner.state.values():
            yield from ((value, OPTIMIZER) for value in state.values() if isinstance(value, Tensor))
        flat_tensors = self.flat_tensors()
        yield from ((flat, OPTIMIZER) for flat in flat_tensors)
        yield from ((flat.grad, GRADIENTS) for flat in flat_tensors if flat.grad is not None)
        if self.strategy.zero_stage:
            yield from ((tensor, COMMUNICATION) for tensor in within(Tensor, self.optimizer.ipg_buckets))
            yield from ((tensor, GRADIENTS) for tensor in within(Tensor, self.optimizer, apart=self._coordinator()))

    def _of_parameter(self, parameter: nn.Parameter) -> Iterator[tuple[Tensor, int]]:
        yield parameter.data, PARAMETERS

    # After memory ran out

    def remember(self) -> None:
        """Remember the state between two optimizer steps, which `reset` goes back to. Call it before each attempt."""
        self._at_rest = PythonState(self.engine, *self._own_states(), apart=self._coordinator())
        self._gradients_at_rest = [(flat, flat.grad) for flat in self.flat_tensors()]

    def reset(self) -> None:
        """Go back to what was remembered, before the first micro-step of a global batch. No communication."""
        get_accelerator().synchronize()  # copies to the host that are under way would arrive in the next attempt
        for parameter in self.engine.module.parameters():
            parameter.grad = None
        self._at_rest.put_back()
        for flat, gradient in self._gradients_at_rest:
            flat.grad = gradient

    def _own_states(self) -> Iterator[Any]:
        """Yield the attributes that DeepSpeed gives the model's parameters."""
        yield from map(vars, self._parameters)

    def _coordinator(self) -> Any:
        """Return the object that has a state of its own, which `reset` does not go back to."""
        return None

    # The optimizer step

    def masters(self) -> list[Tensor]:
        """Return all tensors that an optimizer step writes to; none where they are on disk."""
        return self.flat_tensors()

    def updates(self) -> list[tuple[Any, Callable[[], list[Tensor]]]]:
        """Return the inner optimizers in the order of their steps, each with a function for the masters that it writes
        to."""
        if self.strategy.offload_ratio == 1:
            return [(self.inner, self.masters)]
        on_device = [each for each in self.flat_tensors() if self._is_of_device(each)]
        on_host = [each for each in self.flat_tensors() if not self._is_of_device(each)]
        return [(self.optimizer.backup_optimizer, lambda: on_device), (self.inner, lambda: on_host)]

    def gathers_by(self, wrap: Wrap) -> None:  # noqa: B027  # stages 0 to 2 have nothing to do
        """Wrap the gathering at the end of an optimizer step with `wrap`; only stage 3 gathers there."""

    def count_skipped_step(self) -> None:
        """Count a step that changes nothing. The learning rate advances: it depends on the number of the step."""
        put(self.engine, "global_steps", self.engine.global_steps + 1)
        put(self.engine, "skipped_steps", self.engine.skipped_steps + 1)
        self.step_schedule()

    def norm(self, of_stage_0: float | None) -> float | None:
        """Return the norm that DeepSpeed took of the gradient in an optimizer step under way; stage 0 takes none."""
        return float(self.optimizer._global_grad_norm) if self.strategy.zero_stage else of_stage_0

    def step_schedule(self) -> None:
        """Advance to the learning rate of the next step."""
        if self.schedule is not None:
            self.schedule.step()

    # The model's parameters

    def shape(self, parameter: Any) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return tuple(parameter.ds_shape if self.strategy.zero_stage == 3 else parameter.shape)

    def gathered(self, parameter: nn.Parameter) -> AbstractContextManager[Any]:
        """Return a context in which the parameter is whole. Collective."""
        return deepspeed.zero.GatheredParameters([parameter], enabled=self.strategy.zero_stage == 3)

    # Layout, and states from a checkpoint of another one

    @abstractmethod
    def layout(self) -> StateLayout:
        """Return which elements of which parameters this rank keeps, and where."""

    @abstractmethod
    def flat_tensors(self) -> list[Any]:
        """Return the fp32 tensors that the inner optimizer updates, in the order of the layout's slots."""

    def fill_weights(self, copy: CopyElements) -> None:
        """Fill the model's own weights, after those of the optimizer."""
        for name, parameter in self.engine.module.named_parameters():
            copy(name, 0, parameter.data.view(-1), not parameter.requires_grad)

    def frozen_elements(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yield this rank's flat elements of parameters that are not trained."""
        parameters: dict[str, Any] = dict(self.engine.module.named_parameters())
        for piece in self.layout().frozen:
            parameter = parameters[piece.name]
            kept = parameter.ds_tensor if self.strategy.zero_stage == 3 else parameter
            yield piece, kept.data.view(-1)[: piece.number]

    def put_states(self, flat: Any, states: dict[str, Tensor], single: dict[str, Any]) -> None:
        """Set the inner optimizer's states of one flat tensor: states with an element for each of its, and single
        values.

        Such a value is Adam's number of steps: torch keeps it as fp32 beside its kernel, DeepSpeed's own as an int. A
        number of any other optimizer stays a number: it may be computed with in double precision.
        """
        kept: dict[str, Any] = dict(states)
        is_torchs = self._is_of_device(flat)
        is_torchs_own = is_torchs or type(self.inner).__module__.startswith("torch.optim.")
        groups = self.inner.param_groups
        is_beside = is_torchs or any(group.get("fused") or group.get("capturable") for group in groups)
        for name, value in single.items():
            if isinstance(self.inner, FusedAdam | DeepSpeedCPUAdam) and not is_torchs:
                kept[name] = int(value)
            elif not (is_torchs_own or isinstance(value, Tensor)):
                kept[name] = value
            else:
                device = flat.device if is_beside else "cpu"
                kept[name] = torch.tensor(float(value), dtype=torch.float32, device=device)
        self.inner.state[flat] = kept

    def _is_of_device(self, flat: Any) -> bool:
        """Return whether it is updated on the device while others are on the host, see
        `kernels.mend_partial_offload`."""
        return self.strategy.offload_ratio < 1 and flat.device.type != "cpu"

    def put_counters(self, counters: dict[str, Any], scaler: dict[str, Any]) -> None:
        """Restore the engine's counters, and the state of fp16's loss scale."""
        for name in _COUNTERS:
            put(self.engine, name, counters[name])
        if self.strategy.zero_stage:
            for name, value in scaler.items():
                put(self.optimizer, name, value)

    def destroy(self) -> None:
        """Free the engine's hooks and buffers, so that another can follow in this process."""
        self.engine.destroy()
        if self.strategy.zero_stage == 3:
            F.linear = _LINEAR  # DeepSpeed's keeps inputs of frozen layers, too

    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.engine.module.named_parameters()}

    def _frozen(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.engine.module.parameters() if not parameter.requires_grad]


class Zero0(Zero):
    """Stage 0: every rank keeps all states, in fp32, and torch's optimizer updates the parameters themselves; in bf16
    or fp16, which only dry runs do, fp32 copies beside them."""

    def masters(self) -> list[Tensor]:
        return [parameter for parameter in self.flat_tensors() if parameter.requires_grad]

    def layout(self) -> StateLayout:
        names = self._names()
        return StateLayout(
            slots=tuple(checkpoint_files.whole([parameter], names) for parameter in self.flat_tensors()),
            frozen=checkpoint_files.whole(self._frozen(), names),
        )

    def flat_tensors(self) -> list[Any]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]


class Zero12(Zero):
    """Stages 1 and 2: each rank updates its part of the parameters; at stage 2 it keeps only its part of the gradients,
    too."""

    def layout(self) -> StateLayout:
        names = self._names()
        groups = zip(self.optimizer.bit16_groups, self.flat_tensors(), strict=True)
        return StateLayout(
            slots=tuple(checkpoint_files.cut(group, names, dist.get_rank(), flat.numel()) for group, flat in groups),
            frozen=checkpoint_files.whole(self._frozen(), names),
        )

    def flat_tensors(self) -> list[Any]:
        return list(self.optimizer.single_partition_of_fp32_groups)

    def put_states(self, flat: Any, states: dict[str, Tensor], single: dict[str, Any]) -> None:
        super().put_states(flat, states, single)
        put(self.optimizer, "_hp_optimizer_states_linked", False)  # parameters are linked to states in the next step


class Zero3(Zero):
    """Stage 3: each rank keeps its part of each parameter, and gathers the whole for its use."""

    def _of_parameter(self, parameter: nn.Parameter) -> Iterator[tuple[Tensor, int]]:
        yield parameter.ds_tensor, PARAMETERS  # type: ignore[attr-defined]  # DeepSpeed's
        yield parameter.data, COMMUNICATION  # gathered for use

    _is_recording = False

    def remember(self) -> None:
        if not hasattr(self, "_without_trace"):
            self._record_whole_steps()
        super().remember()

    def reset(self) -> None:
        """Also end every gather, and forget the order in which modules used their parameters."""
        for work in within(dist.Work, self._coordinator()):
            work.wait()
        gathered = [each for each in self._parameters if each.ds_status != ZeroParamStatus.NOT_AVAILABLE]
        super().reset()
        self._without_trace.put_back()
        for each in self._parameters:  # also those that were whole
            put(each, "ds_status", ZeroParamStatus.NOT_AVAILABLE)
        for each in gathered:
            put(each, "ds_status", ZeroParamStatus.AVAILABLE)
            each.partition()
        parameter_offload.FWD_MODULE_STACK.clear()
        self._is_recording = True

    def _own_states(self) -> Iterator[Any]:
        """Yield also what it gives modules: sets, the parameters of others that they use, and containers of parameters
        with attributes."""
        yield from super()._own_states()
        yield from self._of_modules

    @functools.cached_property
    def _of_modules(self) -> list[Any]:
        modules = list(self.engine.module.modules())
        sets = (vars(each)[name] for each in modules for name in vars(each) if name.startswith("ds_"))
        containers = (getattr(each._parameters, "__dict__", ()) for each in modules)
        return [
            *containers,
            *(vars(each).get("_external_params", {}) for each in modules),
            *(each for each in sets if isinstance(each, set)),
        ]

    def _coordinator(self) -> Any:
        return self.optimizer.parameter_offload.get_param_coordinator()

    def _record_whole_steps(self) -> None:
        """Make the coordinator, after a reset, record the order of parameters in all micro-steps up to the next
        optimizer step, not only in the first.

        Small parameters, which usually stay whole, are let go while the order is recorded. The second micro-step would
        gather all of them at once, in an additional buffer that no plan contains; the optimizer step does it one by
        one as always.
        """
        coordinator = self._coordinator()

        @in_place_of(coordinator, "reset_step")
        def record_again(begin_micro_step: Callable[[], None]) -> None:
            if self._is_recording:
                self._without_trace.put_back()
            begin_micro_step()

        @in_place_of(self.optimizer, "_post_step")
        def end(end_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._is_recording = False
            return end_step(*args, **kwargs)

        self._without_trace = PythonState(coordinator)

    def masters(self) -> list[Tensor]:
        # from a disk they come, and go back there, one by one
        return [] if self.strategy.offload_optimizer == "nvme" else self.flat_tensors()

    def gathers_by(self, wrap: Wrap) -> None:
        put(self.optimizer, "_post_step", wrap(self.optimizer._post_step))

    def layout(self) -> StateLayout:
        parts = functools.partial(
            checkpoint_files.parts, names=self._names(), rank=dist.get_rank(), world_size=dist.get_world_size()
        )
        return StateLayout(
            slots=tuple(map(parts, self.optimizer.fp16_groups)),
            frozen=tuple(piece for each in self._frozen() for piece in parts([each])),
        )

    def flat_tensors(self) -> list[Any]:
        return list(self.optimizer.fp32_partitioned_groups_flat)

    def fill_weights(self, copy: CopyElements) -> None:
        """Fill this rank's parts: rounded from the optimizer's, as in a step; those of frozen parameters are copied."""
        for master, group in zip(self.flat_tensors(), self.optimizer.fp16_groups, strict=True):
            own = [parameter.ds_tensor.data for parameter in group]
            for part, elements in zip(own, master.data.split([part.numel() for part in own]), strict=True):
                part.copy_(elements)
        for piece, elements in self.frozen_elements():
            copy(piece.name, piece.first, elements, True)


def of(engine: Any, strategy: Strategy, schedule: Any = None) -> Zero:
    """Return the stage of an engine."""
    return (Zero0, Zero12, Zero12, Zero3)[strategy.zero_stage](engine, strategy, schedule)


def kept_by(module: nn.Module) -> Iterator[tuple[Tensor, int]] | None:
    """Yield every tensor that a user's own engine keeps, with its category; None if `module` is no known engine."""
    if not isinstance(module, deepspeed.DeepSpeedEngine):
        return None
    optimizer = module.optimizer
    stages = {DeepSpeedZeroOptimizer_Stage3: 3, DeepSpeedZeroOptimizer: 2, FP16_UnfusedOptimizer: 0}
    stage = stages.get(type(optimizer), 0 if isinstance(optimizer, torch.optim.Optimizer) else None)
    return None if stage is None else of(module, Strategy(zero_stage=stage)).kept()


def overlaps(module: nn.Module) -> bool:
    """Return whether `module` is an engine that reduces gradients on a stream of its own."""
    return isinstance(module, deepspeed.DeepSpeedEngine) and bool(getattr(module.optimizer, "overlap_comm", False))
