"""Host memory for reading pretrained weights, found from the headers of their files without reading values."""

import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.deepspeed_adapter.kernels import DTYPES
from frugal.memory_watch import StorageWatch
from frugal.models.loading import quantised
from frugal.models.loading.weights import load_weights, read
from frugal.models.spec import ModelSpec
from frugal.planning.model_facts import Reading
from frugal.torch_internals import tensors_in


def reading(spec: ModelSpec) -> dict[str, Reading]:
    """Return the memory of reading by precision; empty where that cannot be determined, such as for missing files."""
    return {name: taken for name, dtype in DTYPES.items() if (taken := _taken(spec, dtype)) is not None}


def _taken(spec: ModelSpec, dtype: torch.dtype) -> Reading | None:
    if spec.origin != "pretrained":
        return None
    watch = _Host()
    with suppress(Exception), watch:  # damaged files are reported where they are needed
        reader = spec.reader(dtype, may_download=False)
        meta = torch.device("meta") if spec.quantize is not None else None
        load_weights(reader, watch.place, stored=watch.stored, finish=watch.finish, quantising_on=meta)
    if not watch.is_finished:
        return None
    return Reading(passing_bytes=watch.most_passing, keeping_bytes=watch.most_keeping)


class _Finished(Exception):  # noqa: N818 - no error
    """A signal that all tensors have been read; the rest of transformers' loading needs values."""


class _Host(StorageWatch):
    """A counter of host memory while weights are read: tensors, touched pages of mapped files, and what is kept.

    Of a parameter that is the file's tensor itself only those pages are touched that are kept of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.looks_inside = False  # `execute` has a rule: a GPU's kernels take nothing of a host
        self.most_passing = 0  # if nothing stayed
        self.most_keeping = 0  # if all of it stayed
        self.is_finished = False
        self._is_reading = False  # before, the model is made, on meta for real
        self._passing: dict[int, int] = {}  # address of a temporary tensor -> bytes
        self._passing_bytes = 0
        self._mapped: set[int] = set()  # addresses of tensors in files, none of which is touched yet
        self._kept_bytes = 0

    def born(self, address: int, size_bytes: int, tensor: Tensor, operator: Any) -> None:
        """Count a storage, unless it is only mapped."""
        if operator is None:
            self._mapped.add(address)
        elif self._is_reading:
            self._take(address, size_bytes)

    def died(self, address: int, size_bytes: int) -> None:
        """Stop counting a storage."""
        self._mapped.discard(address)
        self._passing_bytes -= self._passing.pop(address, 0)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Count the pages that an operator reads, and the memory inside of quantisation on a CPU rank."""
        if (inside_bytes := quantised.inside_bytes(func, args)) is not None:
            self._note(pages=inside_bytes)
        for tensor in tensors_in(args):
            if (address := torch_internals.address(tensor)) in self._mapped:
                self._mapped.remove(address)
                self._take(address, tensor.untyped_storage().nbytes())
        return super().execute(func, args, kwargs)

    def _take(self, address: int, size_bytes: int) -> None:
        self._passing[address] = size_bytes
        self._passing_bytes += size_bytes
        self._note()

    def _note(self, pages: int = 0) -> None:
        self.most_passing = max(self.most_passing, self._passing_bytes)
        self.most_keeping = max(self.most_keeping, self._passing_bytes + self._kept_bytes + pages)

    def place(self, parameter: nn.Parameter) -> None:
        """Count a parameter that is moved to its place."""
        size_bytes = parameter.nbytes
        self._kept_bytes += size_bytes + quantised.scales_bytes(parameter)
        self._note(pages=size_bytes if torch_internals.address(parameter) in self._mapped else 0)
        parameter.data = parameter.data.new_empty(0)

    def stored(self, paths: Iterable[str | Path]) -> dict[str, Any]:
        """Return the tensors in files by name, on meta."""
        self._is_reading = True
        tensors: dict[str, Any] = {}
        for path in map(Path, paths):
            with torch_internals.without_modes():
                contents = read(path, map_location="meta")
            if path.suffix != ".safetensors" and not zipfile.is_zipfile(path):
                for tensor in contents.values():  # it can only be read at once
                    self._take(torch_internals.address(tensor), tensor.nbytes)
                tensors.update(contents)
            else:
                tensors.update((name, _Read(tensor, self.hold)) for name, tensor in contents.items())
        return tensors

    def finish(self, model: nn.Module, missing: Iterable[str]) -> None:
        """Count tied and randomly initialised parameters, which are made last and stay until they are moved."""
        tied = set(getattr(model, "all_tied_weights_keys", ()))
        waiting = [
            parameter.nbytes
            for name, parameter in model.named_parameters()
            if parameter.numel() and not (name in missing and name in tied)
        ]
        random = sum(parameter.nbytes for name, parameter in model.named_parameters() if name in {*missing} - tied)
        self.most_passing = max(self.most_passing, self._passing_bytes + random)
        self._kept_bytes += sum(waiting)
        self.most_keeping = max(self.most_keeping, self._passing_bytes + self._kept_bytes)
        self.is_finished = True
        raise _Finished


class _Read:
    """A tensor in a file, mapped anew each time it is indexed."""

    def __init__(self, tensor: Tensor, hold: Callable[[list[Tensor]], None]) -> None:
        self._tensor = tensor
        self._hold = hold

    def __getitem__(self, index: Any) -> Tensor:
        with torch_internals.without_modes():
            tensor = torch.empty_like(self._tensor)
        self._hold([tensor])
        return tensor[index]
