"""Models and data that are not built in: the user's own callables, and look-ups on the Hugging Face hub.

A factory is `package.module:name` or `path/to/file.py:name`, a callable that makes a model, or rows of data. The hub is
asked only where its host has an address, so that a typo costs no half minute of retries.
"""

import difflib
import functools
import importlib
import importlib.util
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from frugal.errors import RequestError, failure, first_line, refuse
from frugal.models.objectives import MeanLoss, Objective, example_in_words, required

Factory = Callable[[], Any]

PICKLED = ".cloudpickle"
"""The suffix of a file with a pickled callable, as `frugal.dryrun.model_object` writes it."""


def import_callable(reference: str, hint: str = "name it as package.module:name or path/to/file.py:name") -> Factory:
    """Return the callable behind `package.module:name` or `path/to/file.py:name`; `hint`: if it cannot be imported."""
    where, _, name = reference.rpartition(":")
    with failure(f"cannot import {where}", hint=hint), importable(where):
        if where.endswith(PICKLED):
            with Path(where).open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    why = "it belongs to another user, and a pickle can run any code"
                    raise RequestError(f"{where} is not read", because=why)
                return pickle.load(file)
        module = _import_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    try:
        factory: Any = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        public = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        similar = difflib.get_close_matches(name, public, n=1)
        raise RequestError(
            f"{where} has no `{name}`",
            because=f"it has {', '.join(public) or 'no function or class'}",
            hint=f"did you mean {where}:{(similar or public)[0]}?" if public else f"define `{name}` in it",
        ) from None
    refuse(
        (
            not callable(factory) or isinstance(factory, nn.Module),
            f"{reference} cannot be called",
            f"its type is {type(factory).__name__}",
            f"name a function in {where} that returns it",
        )
    )
    return factory


def _import_file(path: Path) -> Any:
    path = path.expanduser().resolve()
    name = f"frugal_factory_{path.stem}"  # so that a user's `random.py` does not replace Python's
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    spec.loader.exec_module(module)
    return module


@contextmanager
def importable(where: str) -> Iterator[None]:
    """Allow imports from the folder of a file, as in `python FILE`, and from this one, as in `python -m MODULE`."""
    folders = [str(Path(where).expanduser().resolve().parent), str(Path.cwd())]
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with suppress(ValueError):  # the file has taken it out
                sys.path.remove(folder)


def make_model(reference: str, factory: Factory, device: torch.device) -> tuple[nn.Module, Objective | None]:
    """Return the module and, if it gives one, the objective that a factory makes on `device`."""
    hint = (
        "it is also called with torch.device('meta') as default: leave out .cuda(), .to(device), and what reads "
        "weights or values"
    )
    failing = failure(f"{reference} failed", hint=hint if device.type == "meta" else None)
    with failing, on_device(device), importable(reference.rpartition(":")[0]):
        if needed := required(factory):
            raise RequestError(
                f"{reference} takes {', '.join(needed)}",
                because="a factory is called without arguments",
                hint=f"add `def make(): return {reference.rpartition(':')[2]}(...)` to its file, and name that",
            )
        returned = factory()
    module, objective = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    refuse(
        (
            not isinstance(module, nn.Module),
            f"{reference} returned {'None' if module is None else f'an object of type {type(module).__name__}'}",
            "",
            "return a torch.nn.Module, or (module, objective)",
        )
    )
    if isinstance(objective, Mapping):
        objective = MeanLoss(example=objective)
    if objective is not None and not hasattr(objective, "loss_sum"):
        raise RequestError(
            f"{reference} returned a module and an object of type {type(objective).__name__}",
            because="the second says how it is trained: an objective, or an example of a sample, which is a dict",
            hint=f"return module, {example_in_words(module)} where forward returns the mean loss; "
            "otherwise frugal.SummedLoss(loss, example=...)",
        )
    return module, objective


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Have all parameters and buffers made on `device` inside the `with` block.

    `torch.Tensor(8)` and its like make a tensor on the host whatever the default device is. What becomes a parameter
    or a buffer goes to `device` there and then, before anything is written to it: on meta its memory is never touched.
    """
    moved = WeakIdKeyDictionary()

    def moved_parameter(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or not _is_elsewhere(parameter, device):
            return parameter
        if parameter not in moved:  # one that has two names stays one
            moved[parameter] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            moved[parameter].__dict__.update(parameter.__dict__)
        return moved[parameter]

    def moved_buffer(_module: nn.Module, _name: str, buffer: Tensor | None) -> Any:
        return buffer.to(device) if buffer is not None and _is_elsewhere(buffer, device) else buffer

    with (
        register_module_parameter_registration_hook(moved_parameter),
        register_module_buffer_registration_hook(moved_buffer),
        device,
    ):
        yield


def _is_elsewhere(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a plain tensor on the host has to go to another device; subclasses know where they belong."""
    return tensor.device.type == "cpu" != device.type and type(tensor) in (Tensor, nn.Parameter)


_SHAPES_ONLY = "_frugal_shapes_only"


def mark_shapes_only(module: nn.Module) -> None:
    """Say that the weights of `module` are made up: a plan was made for a module, of which only shapes were kept."""
    setattr(module, _SHAPES_ONLY, True)


def refuse_shapes_only(reference: str, module: nn.Module) -> None:
    """Refuse to train made-up weights in place of the ones that a module had.

    Raises:
        RequestError: they are.
    """
    refuse(
        (
            getattr(module, _SHAPES_ONLY, False),
            f"{reference} has no weights",
            "the plan was made for a module, of which only the shapes were kept",
            "train it from Python, with frugal.initialize(module, plan, objective)",
        )
    )


@functools.cache
def hub_unreachable_because() -> str | None:
    """Return why the hub cannot be asked: it is switched off, or its host has no address here and there is no proxy."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if {"https", "all"} & getproxies().keys():
        return None
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return "the network does not reach it"
    return None


def why_hub_failed(error: Exception) -> str:
    """Describe a failed look-up in one line."""
    reason = hub_unreachable_because()
    if reason is None:
        return f"the hub answers: {first_line(error)}"
    return f"the hub cannot be asked ({reason}), and its local cache does not have it"
