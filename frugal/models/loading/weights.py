"""Pretrained weights, read tensor by tensor: no more of a model is in memory at once than what becomes one parameter.

transformers decides what becomes of each tensor: names, dtypes, experts that are put together, what is missing, what is
tied. Here it is given tensors that are read when it needs them, from a mapping of the file into memory, and each
parameter is handed on as soon as it has its values: to its device, or to ZeRO-3, which keeps a rank's part and lets the
rest go.

A mapping lasts as long as the tensors that were read from it. Pages of it are shared by the ranks of a node, and the
kernel takes them back when it needs them; what is read of a file counts in a process's resident set until then.
"""

import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from frugal import torch_internals
from frugal.models import transformers_internals
from frugal.models.loading import quantised

Place = Callable[[nn.Parameter], None]
"""A function that puts a parameter where it is trained, as soon as it has its values."""


class Stored:
    """A tensor in a file, read each time it is indexed."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name

    def __getitem__(self, index: Any) -> Tensor:
        with torch_internals.without_modes():  # its storage is the whole file, which nobody is to count
            if self._path.suffix == ".safetensors":
                with safe_open(self._path, framework="pt") as file:
                    return file.get_tensor(self._name)[index]
            return read(self._path)[self._name][index]


def read(path: Path, map_location: str = "cpu") -> dict[str, Any]:
    """Return the tensors in a file by name: mapped into memory where its format allows, otherwise read; or on meta."""
    if path.suffix != ".safetensors":
        is_mapped = map_location != "meta" and zipfile.is_zipfile(path)
        return torch.load(path, map_location=map_location, weights_only=True, mmap=is_mapped)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).to(map_location) for name in file.keys()}  # noqa: SIM118  # no dict


def stored(paths: Iterable[str | Path]) -> dict[str, Any]:
    """Return the tensors in some files by name, unread; only pickles of torch before 1.6 are read, all at once."""
    tensors: dict[str, Any] = {}
    for path in map(Path, paths):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names: Iterable[str] = file.keys()
        else:
            names = contents = read(path)
            if not zipfile.is_zipfile(path):
                tensors.update(contents)
                continue
        tensors.update((name, Stored(path, name)) for name in names)
    return tensors


def load_weights(
    from_pretrained: Callable[[], Any],
    place: Place,
    *,
    stored: Callable[[Iterable[str | Path]], dict[str, Any]] = stored,
    finish: Callable[[Any, Iterable[str]], None] | None = None,
    quantising_on: torch.device | None = None,
) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Return the model of `from_pretrained`, its report of the loading, and the elements of each parameter by name.

    Every parameter is handed to `place` once, as early as can be. Parameters that are tied, and others in their
    modules, come last: they are compared and adjusted before. `stored` opens files. `finish` is called with the model
    and what was not in them, before that is made at random. `quantising_on`: where weights that are to be quantised go
    before they are; None: nowhere.
    """
    placed: dict[int, tuple[nn.Parameter, int]] = {}

    def arrived(model: Any, name: str) -> None:
        owner, _, own_name = name.rpartition(".")
        module = model.get_submodule(owner)
        if own_name in module._buffers:
            module._buffers[own_name] = module._buffers[own_name].clone()
        elif owner not in {each.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for each in pair}:
            put(module._parameters[own_name])

    def put(parameter: nn.Parameter | None) -> None:
        if parameter is not None and id(parameter) not in placed:
            placed[id(parameter)] = parameter, quantised.elements(parameter)
            place(parameter)

    with transformers_internals.reading(stored, arrived, finish), quantised.on(quantising_on):
        model, loaded = from_pretrained()
    for parameter in model.parameters():
        put(parameter)
    return model, loaded, {name: placed[id(parameter)][1] for name, parameter in model.named_parameters()}


def off_the_file(parameter: nn.Parameter) -> None:
    """Leave a parameter on the host, with memory of its own."""
    parameter.data = parameter.data.clone()
