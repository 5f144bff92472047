"""What a model does to its logits between its output head and what it returns: a soft cap, a scale, a bias.

The model's own forward is observed: its copy on meta, without its layers, runs on two tokens, and every operator that
the head's result passes is noted. Where each is elementwise and takes nothing else but numbers and the model's own
buffers, the same operators can be applied to a slice of the logits: the result is that of the whole, bit for bit.

Left out: ends that change logits in place, mix positions or classes, draw random numbers, or use a parameter (its
gradient would be lost, and ZeRO-3 has not gathered it in the head).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.training.measure.memory_watch import tensors_in
from frugal.training.models.tiling.meta_copy import meta_copy

aten = torch.ops.aten

_COPIES = (aten._to_copy.default, aten.clone.default, aten.alias.default)
"""Elementwise, though torch does not tag them so."""


@dataclass(frozen=True)
class _Value:
    """The result of an earlier operator; 0 is the head's."""

    number: int


@dataclass(frozen=True)
class _Buffer:
    """A buffer of the model."""

    name: str


@dataclass(frozen=True)
class _Step:
    operator: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class LogitsEnd:
    """Elementwise operators from the head's result to the model's logits; none: they are the same.

    Attributes:
        steps: the operators in their order, each may take the results of those before.
    """

    steps: tuple[_Step, ...]

    def apply(self, logits: Tensor, model: nn.Module) -> Tensor:
        """The end of `logits (samples, positions, classes)`, of the same shape, with the buffers of `model`."""
        values = [logits]

        def value(argument: Any) -> Any:
            if isinstance(argument, _Value):
                return values[argument.number]
            return model.get_buffer(argument.name) if isinstance(argument, _Buffer) else argument

        for step in self.steps:
            options = {name: value(option) for name, option in step.options}
            values.append(step.operator(*map(value, step.arguments), **options))
        return values[-1]


class NotElementwiseError(Exception):
    """The logits pass something that cannot be applied to a slice of them; its text says what."""


def observed(model: nn.Module) -> LogitsEnd | None:
    """The end of a model with an `nn.Linear` as output head; None if it does not run on meta by itself.

    The model is not changed, and may be on any device, also with parameters that ZeRO-3 has divided.

    Raises:
        NotElementwiseError: the model's logits are no elementwise function of its head's.
    """
    for without_layers in (True, False):
        try:
            return _observed(_copied(model, without_layers))
        except NotElementwiseError:
            raise
        except Exception:  # whatever a model trips over on meta; who calls checks what it then returns
            continue
    return None


def _observed(model: Any) -> LogitsEnd:
    head = model.get_output_embeddings()
    tokens = torch.zeros((1, 2), dtype=torch.int64, device="meta")
    inputs = {"input_ids": tokens}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens
    with torch_internals.without_modes(), torch.no_grad():
        observer = _Observer({id(buffer): name for name, buffer in model.named_buffers()})
        head.forward = lambda hidden: observer.begin(hidden.new_empty((*hidden.shape[:-1], head.out_features)))
        with observer:
            outputs = model(**inputs)
    return observer.end(outputs.logits)


class _Observer(torch_internals.DispatchMode):
    """Follows a tensor through the operators that it passes."""

    def __init__(self, buffers: dict[int, str]) -> None:
        super().__init__()
        self._buffers = buffers
        self._values: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # id of a tensor, which `_values` keeps alive -> its number
        self._steps: list[_Step] = []
        self._refused: dict[int, str] = {}  # id of a tensor -> why it cannot be had in slices
        self._kept: list[Any] = []

    def begin(self, logits: Tensor) -> Tensor:
        """Follow what the head returns."""
        self._values, self._steps = [logits], []
        self._numbers = {id(logits): 0}
        return logits

    def end(self, logits: Tensor) -> LogitsEnd:
        """The operators on the way to `logits`.

        Raises:
            NotElementwiseError: it is no elementwise function of what is followed.
        """
        if id(logits) not in self._numbers:
            raise NotElementwiseError(self._refused.get(id(logits), "they are made of something else"))
        return LogitsEnd(tuple(self._steps[: self._numbers[id(logits)]]))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator, and note it if it takes what is followed."""
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return args[0].dtype is torch.bool  # models ask whether all is as it should be: no padding, no packs
        out = func(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        if any(id(tensor) in self._refused for tensor in tensors):
            why: str | None = next(self._refused[id(tensor)] for tensor in tensors if id(tensor) in self._refused)
        elif any(id(tensor) in self._numbers for tensor in tensors):
            why = self._note(func, args, kwargs, out)
        else:
            return out
        if why is not None:
            for tensor in tensors_in((out, args if torch_internals.schema(func).is_mutable else ())):
                self._refused[id(tensor)] = why
                self._numbers.pop(id(tensor), None)
            self._kept.append(out)
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> str | None:
        """Note a step; or why it cannot be one."""
        name = str(torch_internals.packet(func)).removeprefix("aten.")
        is_elementwise = torch.Tag.pointwise in func.tags or func in _COPIES
        if torch_internals.schema(func).is_mutable:
            return f"{name} changes them in place"
        if torch.Tag.nondeterministic_seeded in func.tags:
            return f"{name} draws random numbers"
        if not isinstance(out, Tensor) or out.shape != self._values[0].shape or not is_elementwise:
            return f"{name} is not elementwise"
        arguments = tuple(map(self._argument, args))
        options = {key: self._argument(value) for key, value in kwargs.items() if key != "device"}
        if any(isinstance(value, Tensor) for value in (*arguments, *options.values())):
            return f"{name} takes a tensor that is no buffer of the model"
        self._steps.append(_Step(func, arguments, tuple(options.items())))
        self._values.append(out)
        self._numbers[id(out)] = len(self._steps)
        return None

    def _argument(self, value: Any) -> Any:
        """What stands for it in a step; a tensor where nothing can."""
        if not isinstance(value, Tensor):
            return value
        if id(value) in self._numbers:
            return _Value(self._numbers[id(value)])
        if id(value) in self._buffers and all(size == 1 for size in value.shape[:-1]):
            return _Buffer(self._buffers[id(value)])
        return value if value.is_meta or value.dim() else value.item()


def _copied(model: nn.Module, without_layers: bool) -> Any:
    copied = meta_copy(model, without_layers=without_layers)
    for config in (copied.config, copied.config.get_text_config()):
        config.output_router_logits = False  # no layers, no routers; what they add to the loss is another matter
    return copied
