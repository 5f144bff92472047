"""Activation checkpointing, as the plan says: nothing, the cheap results, or whole layers are recomputed in backward.

Selective: what is expensive to make again is kept, the rest is recomputed. Kept are the results of matrix products with
weights, convolutions and attention kernels. Recomputed are the operators between them, which make most of the bytes and
little of the time, and three that could be kept:

- products of activations with each other (`bmm`): where attention has no kernel, they grow with the square of the
  sequence;
- attention with dropout: it draws random numbers, and what comes after it in the layer must draw the same again;
- results that were read and then changed in place, because what is left of them is not what was read.

torch has the same idea in `create_selective_checkpoint_contexts`. It counts every operator of a layer, so that ZeRO-3,
which gathers weights in other ways when a layer runs again, makes it fail; and it refuses results that are changed
in place, as ZeRO-3's linear layers do to add their bias.

DeepSpeed's `activation_checkpointing` JSON block switches nothing on for transformers models; the model itself must.
A transformers model has a switch. In any other module the repeated layers are made to recompute: the modules of one
class that stand together in an `nn.ModuleList` or `nn.Sequential`.

| mode        | kept on the device until backward                    | recomputed                        |
|-------------|------------------------------------------------------|-----------------------------------|
| `off`       | everything that backward needs                       | nothing                           |
| `selective` | each layer's inputs and its expensive results        | the rest                          |
| `full`      | each layer's inputs                                  | the layer                         |
| `offloaded` | nothing: each layer's own input waits in host memory | the layer                         |
| `budget`    | of each layer what its own mode keeps                | the same                          |

A layer's own input is its first tensor, which it alone keeps. Masks, position biases and an encoder's states are
shared by the layers, so they stay. On a CPU rank there is nowhere to move it to, and `offloaded` is `full`.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from frugal import torch_internals
from frugal.errors import RequestError, refuse
from frugal.models import transformers_internals
from frugal.planning.strategy import ActivationCheckpointing, LayerMode
from frugal.torch_internals import tensors_in
from frugal.units import plural

aten = torch.ops.aten

EXPENSIVE = {
    aten.mm.default,
    aten.addmm.default,
    aten._scaled_mm.default,
    aten._grouped_mm.default,
    aten.convolution.default,
}
_ATTENTION = "aten::_scaled_dot_product_"
"""The beginning of the names of attention's kernels, of all devices; so do backwards begin, which run in no forward."""


@functools.cache  # asked for every operator of a layer
def _is_expensive(operator: Any) -> bool:
    is_attention = operator.namespace == torch_internals.VARLEN or operator.name().startswith(_ATTENTION)
    return is_attention or operator in EXPENSIVE


def contexts() -> tuple["_Keep", "_Return"]:
    """Return the modes of one call of a layer and of its recomputation: `checkpoint`'s `context_fn`."""
    calls: list[_Call] = []
    return _Keep(calls), _Return(calls)


@dataclass
class _Call:
    """An expensive operator that ran once.

    Attributes:
        result: what it returned, with everything that was written to it since; None: to be computed again.
        num_writes: how many operators changed it in place before any read it, so that they are part of it.
        is_read: whether an operator has read it.
        versions: torch's count of changes to each tensor of the result, at the end of the layer.
    """

    result: Any
    num_writes: int = 0
    is_read: bool = False
    versions: Sequence[int] = ()


class _Keep(torch_internals.DispatchMode):
    """A mode that keeps the results of expensive operators, in their order."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls
        self._of_storage: dict[int, _Call] = {}  # address of a result's storage -> the call that made it

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator, and remember it if it is expensive."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._of_storage:
            self._note_uses(func, args, kwargs, out)
        if _is_expensive(func):
            call = _Call(None if _draws(func, args, kwargs) else torch_internals.tree_map(_detached, out))
            self._calls.append(call)
            for result in tensors_in(call.result):
                self._of_storage[torch_internals.address(result)] = call
        return out

    def __exit__(self, *exception: Any) -> None:
        """End the layer: from here on the versions tell whether a result is what it was."""
        self._of_storage = {}
        for call in self._calls:
            call.versions = _versions(call.result)
        super().__exit__(*exception)

    def _note_uses(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Note which results `func` read or changed."""
        used = {torch_internals.address(value): value for value in tensors_in((*args, *kwargs.values()))}
        touched = used.keys() & self._of_storage.keys()
        if not touched:
            return
        written = {torch_internals.address(value) for value in _written(func, args, kwargs)}
        viewed = {torch_internals.address(value) for value in tensors_in(out)} - written
        for address in touched:
            call = self._of_storage[address]
            if address in written and len(written) == 1 and not call.is_read:
                call.num_writes += 1
            elif address in written:
                for result in tensors_in(call.result):
                    self._of_storage.pop(torch_internals.address(result), None)
                call.result = None
            elif address not in viewed:
                call.is_read = True


class _Return(torch_internals.DispatchMode):
    """A mode that returns kept results instead of running their operators again."""

    def __init__(self, calls: list[_Call]) -> None:
        super().__init__()
        self._calls = calls
        self._next = 0
        self._writes_left: dict[int, tuple[int, Tensor]] = {}  # address -> writes it has seen already, and their target

    def __enter__(self) -> "_Return":
        """Begin with the first operator, also if the layer is recomputed a second time."""
        self._next = 0
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Let go of what was not needed. A second recomputation computes everything."""
        self._writes_left = {}
        for call in self._calls:
            call.result = None
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Return the kept result, or what the operator returns."""
        kwargs = kwargs or {}
        if _is_expensive(func):
            call = self._calls[self._next]
            self._next += 1
            if call.result is not None and call.versions == _versions(call.result):
                return self._take(call)
        elif self._writes_left and self._was_written(func, args, kwargs):
            return args[0]
        return func(*args, **kwargs)

    def _take(self, call: _Call) -> Any:
        """Return the kept result of a call, which is given back once."""
        result, call.result = torch_internals.tree_map(_detached, call.result), None
        if call.num_writes:
            for tensor in tensors_in(result):
                self._writes_left[torch_internals.address(tensor)] = call.num_writes, tensor
        return result

    def _was_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the kept result that `func` writes to has its effect already."""
        for target in _written(func, args, kwargs):
            left, tensor = self._writes_left.pop(torch_internals.address(target), (0, target))
            if left > 1:
                self._writes_left[torch_internals.address(target)] = left - 1, tensor
            if left:
                return True
        return False


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether it takes random numbers: attention with dropout."""
    return any(value for argument, value in _arguments(func, args, kwargs) if argument.name == "dropout_p")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that `func` changes in place."""
    if not torch_internals.schema(func).is_mutable:
        return []
    return list(tensors_in([value for argument, value in _arguments(func, args, kwargs) if argument.is_write]))


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of an operator's schema with their values."""
    for i, argument in enumerate(torch_internals.schema(func).arguments):
        yield argument, args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)


def _detached(value: Any) -> Any:
    """Free of the graph, or layer and graph would hold each other; with the same count of changes."""
    if not isinstance(value, Tensor):
        return value
    with torch_internals.counting_versions():
        return value.detach()


def _versions(result: Any) -> list[int]:
    return [torch_internals.version(tensor) for tensor in tensors_in(result)]


Watch = Callable[..., Any]
"""A function that is called as `watch(number, layer, *args)` in place of `layer(*args)`, also in recomputation."""


def apply(
    model: nn.Module,
    mode: ActivationCheckpointing,
    layer_modes: Sequence[tuple[LayerMode, int]] = (),
    *,
    watch: Watch | None = None,
) -> None:
    """Make `model` recompute its layers in backward, or keep their activations (`off`).

    `layer_modes` says under `budget` what each of `layers(model)` does, as in `Strategy.layer_modes`.

    Non-reentrant checkpointing: exact for ZeRO 0-3, with dropout, and with inputs that need no gradient.

    Raises:
        RequestError: the model has no layers that could be recomputed, or another number of them.
    """
    layers_of_model = layers(model)
    modes = layer_modes if mode == "budget" else [(mode, len(layers_of_model))]
    of_layers: list[LayerMode] = [each for each, count in modes for _ in range(count)]
    refuse(
        (
            len(of_layers) != len(layers_of_model),
            f"{type(model).__name__} has {plural(len(layers_of_model), 'layer')} that can be recomputed",
            f"the strategy says what {plural(len(of_layers), 'layer')} do",
            "plan again for this model",
        ),
        (
            not layers_of_model and mode != "off" and not _has_switch(model),
            f"{type(model).__name__} does not support activation checkpointing",
            "it has neither gradient_checkpointing_enable() nor a list of layers of one class",
            "plan with --activation-checkpointing off, or put its layers into an nn.ModuleList",
        ),
    )
    if _has_switch(model):
        _switch(model, mode, of_layers, watch)
    else:
        for number, (layer, of_layer) in enumerate(zip(layers_of_model, of_layers, strict=True)):
            if isinstance(layer.forward, partial) and layer.forward.func is _recomputed:  # from another mode
                layer.forward = layer.forward.args[1]
            if of_layer != "off":
                layer.forward = partial(_recomputed, _runner(of_layer, number, watch), layer.forward)


def _switch(model: nn.Module, mode: ActivationCheckpointing, of_layers: list[LayerMode], watch: Watch | None) -> None:
    """Apply to a model that has a switch. transformers' layers are run one by one; others only know on and off.

    When it switches on, transformers has the embeddings' output ask for a gradient, each time by another hook, and
    leaves the hooks when it switches off. Where the embeddings are frozen, the first layer would then keep more than in
    a model that was never switched on.
    """
    if getattr(model, "is_gradient_checkpointing", False):  # from another mode
        model.gradient_checkpointing_disable()  # type: ignore[operator]  # a transformers model
        if hasattr(model, "disable_input_require_grads"):
            model.disable_input_require_grads()  # type: ignore[operator]  # a transformers model
    if mode == "off":
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # a transformers model
    runs = [None if each == "off" else _runner(each, number, watch) for number, each in enumerate(of_layers)]
    others = _RUN["full" if mode == "budget" else mode]
    if not transformers_internals.recompute_layers(model, runs, others) and mode != "full":
        raise RequestError(
            f"{type(model).__name__} does not support activation checkpointing {mode}",
            because="it recomputes its layers in a way of its own",
            hint="plan with --activation-checkpointing full",
        )


def layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `apply` gives modes, in the model's order; none where it only knows on and off."""
    return transformers_internals.checkpointed_layers(model) if _has_switch(model) else repeated_layers(model)


def _recomputed(run: Callable[..., Any], layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(layer, *args, **kwargs)


def _runner(mode: LayerMode, number: int, watch: Watch | None) -> Callable[..., Any]:
    """Return the function that runs a layer in a mode, as `run(layer, *args)`."""
    if watch is None:
        return _RUN[mode]
    return lambda layer, *args, **kwargs: _RUN[mode](partial(watch, number, layer), *args, **kwargs)


def _offloaded(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer whose first tensor that `checkpoint` saves moves to pinned host memory, and back for backward.

    Inside the layer `checkpoint` has hooks of its own, so only the layer's positional arguments come here. The
    copies are asynchronous: torch's allocators keep the memory at both ends until they are done.
    """
    is_first = True

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        nonlocal is_first
        moves, is_first = is_first and tensor.device.type != "cpu", False
        if not moves:
            return tensor.device, tensor
        tensor = tensor.detach()
        on_host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        return tensor.device, on_host.copy_(tensor, non_blocking=True)

    def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
        device, tensor = packed
        return tensor.to(device, non_blocking=True)

    with saved_tensors_hooks(pack, unpack):
        return checkpoint(layer, *args, use_reentrant=False, **kwargs)


_RUN: dict[LayerMode, Callable[..., Any]] = {
    "selective": partial(checkpoint, use_reentrant=False, context_fn=contexts),
    "full": partial(checkpoint, use_reentrant=False),
    "offloaded": _offloaded,
}


def is_supported(model: nn.Module) -> bool:
    """Return whether `apply(model, "full")` would work."""
    return _has_switch(model) or bool(repeated_layers(model))


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers to recompute: in each outermost list, the modules of a class that occurs more than once.

    Modules without submodules are no layers: recomputing a single operator saves nothing.
    """
    if isinstance(model, nn.ModuleList | nn.Sequential):
        composed = [child for child in model if any(True for _ in child.children())]
        occurrences = Counter(map(type, composed))
        repeated = [child for child in composed if occurrences[type(child)] > 1]
        if repeated:
            return repeated
    return [layer for child in model.children() for layer in repeated_layers(child)]


def _has_switch(model: nn.Module) -> bool:
    has_method = hasattr(model, "gradient_checkpointing_enable")
    return has_method and bool(getattr(model, "supports_gradient_checkpointing", True))
