"""The repeated layers of a model: where they are, whether they are alike, and the same model with fewer of them."""

import copy
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from frugal.planning.zero.layer_parts import Layout

_NUMBERS = {"layer_idx", "layer_id", "layer_index", "layer_number"}  # attributes by which a layer knows its place


@dataclass(frozen=True)
class Repetition:
    """A list of layers that end in whole periods of layers of the same kinds.

    Attributes:
        path: name of the list.
        layers: the list.
        first: the layer that begins the first period.
        period: layers in a period.
    """

    path: str
    layers: nn.ModuleList
    first: int
    period: int

    @property
    def num_periods(self) -> int:
        """Periods in the whole model."""
        return (len(self.layers) - self.first) // self.period


_known: "weakref.WeakKeyDictionary[nn.Module, Repetition | None]" = weakref.WeakKeyDictionary()


def repetition(model: nn.Module) -> Repetition | None:
    """The repeated layers of `model`; None where there is no list of them, or more than one, or nothing is repeated."""
    if model not in _known:
        _known[model] = _find(model)
    return _known[model]


def _find(model: nn.Module) -> Repetition | None:
    lists = [(path, each) for path, each in _outermost_lists(model) if len(each) >= 3 and _is_composed(each[0])]
    if len(lists) != 1:
        return None
    path, layers = lists[0]
    if not _own_parameters_stand_together(model, layers):
        return None
    kinds = [_kind(layer) + _settings(model, i, len(layers)) for i, layer in enumerate(layers)]
    for period in range(1, len(kinds) // 2 + 1):
        first = len(kinds)
        while first > 0 and (first + period > len(kinds) or kinds[first - 1] == kinds[first - 1 + period]):
            first -= 1
        first += (len(kinds) - first) % period
        if (len(kinds) - first) // period >= 2 and first <= len(kinds) // 2:
            return Repetition(path, layers, first, period)
    return None


def shortened(model: nn.Module, repeated: Repetition, num_periods: int) -> nn.Module:
    """A copy of `model` with fewer periods, the first ones."""
    parent = model.get_submodule(repeated.path.rpartition(".")[0])
    name = repeated.path.rpartition(".")[2]
    keep = repeated.first + num_periods * repeated.period
    setattr(parent, name, nn.ModuleList(list(repeated.layers)[:keep]))
    try:
        config = getattr(model, "config", None)
        return copy.deepcopy(model, {} if config is None else {id(config): config})
    finally:
        setattr(parent, name, repeated.layers)


def layout(model: nn.Module, repeated: Repetition, num_periods: int) -> Layout:
    """Where the layers are in the shortened model; the numbers of the first period are the same in the whole one."""
    period = list(repeated.layers)[repeated.first : repeated.first + repeated.period]
    parameters = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    modules = {id(module): number for number, module in enumerate(model.modules())}
    own = [parameters[id(parameter)] for layer in period for parameter in layer.parameters()]
    return Layout(
        path=repeated.path,
        first_layer=repeated.first,
        period=repeated.period,
        num_periods=num_periods,
        first_parameter=min(own),
        parameters=len(own),
        first_module=modules[id(period[0])],
        modules=sum(1 for layer in period for _ in layer.modules()),
    )


def _outermost_lists(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.ModuleList]]:
    if isinstance(module, nn.ModuleList):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost_lists(child, f"{path}.{name}" if path else name)


def _is_composed(layer: nn.Module) -> bool:
    return any(True for _ in layer.children())


def _own_parameters_stand_together(model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether the layers share no parameter, and follow each other in the model's order."""
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    own = [numbers[id(parameter)] for layer in layers for parameter in layer.parameters()]
    return bool(own) and own == list(range(own[0], own[0] + len(own)))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for layers of the same modules, parameters and settings."""
    return tuple(
        (
            name,
            type(module),
            tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters(recurse=False)),
            tuple((n, b.shape, b.dtype) for n, b in module.named_buffers(recurse=False)),
            tuple(
                (key, value)
                for key, value in sorted(vars(module).items())
                if key not in _NUMBERS and isinstance(value, str | int | float | bool | None)
            ),
        )
        for name, module in layer.named_modules()
    )


def _settings(model: nn.Module, number: int, num_layers: int) -> tuple[Any, ...]:
    """What the model's configuration says of one layer: items of lists that are as long as there are layers."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return ()
    values = sorted(vars(config.get_text_config()).items())
    return tuple((key, str(value[number])) for key, value in values if _is_list(value) and len(value) == num_layers)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
