"""A model given as a Python object, made into a reference that a dry run's process can resolve.

A dry run has a process of its own. An importable object is named (`package.module:name`); a configuration is
written as its config.json; all else, such as a class of a notebook or a module, is kept by cloudpickle in the
user's cache folder, where the file's name is a digest of its content. Of a module's tensors only the shapes are kept.
"""

import copy
import functools
import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from frugal import files
from frugal.errors import failure, refuse
from frugal.units import MIB

if TYPE_CHECKING:
    from torch import nn

    from frugal.models.objectives import Objective

KEPT_BYTES = 1 * MIB
"""The size up to which a buffer keeps its values, such as frequencies that a model needs."""

LIMIT_BYTES = 512 * MIB
"""The size limit of all kept models; see `frugal.files`."""


def reference_of(model: Any, objective: "Objective | None" = None) -> str:
    """Return a value of `Request.model` for a configuration of transformers, a module, or a callable that makes one.

    With `objective` it stands for both. A module's weights are not read, and it may be on meta.

    Raises:
        RequestError: it is something else, or cannot be written down.
    """
    import torch

    if hasattr(model, "to_json_string") and hasattr(model, "model_type"):
        refuse(
            (
                objective is not None,
                "a configuration was given together with an objective",
                "it is trained by the objective of its task",
                "give a function that returns the model, and the objective",
            )
        )
        text = json.dumps(model.to_dict(), sort_keys=True, default=str).encode()
        return str(_written(model.model_type, text, ".json"))
    if isinstance(model, torch.nn.Module):
        return _pickled(functools.partial(_copied, (without_values(model), objective)), type(model).__name__)
    refuse(
        (
            not callable(model),
            f"`model` is {model!r}"[:200],
            "it must be a name, a path, a configuration of transformers, a module or a function that makes one",
            None,
        )
    )
    name = getattr(model, "__qualname__", type(model).__name__)
    if objective is None and _is_importable(model):
        return f"{model.__module__}:{name}"
    return _pickled(model if objective is None else functools.partial(_made, model, objective), name)


def without_values(module: "nn.Module") -> "nn.Module":
    """Return a copy of `module` with parameters, and buffers of more than `KEPT_BYTES`, on meta."""
    import torch

    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        if buffer.nbytes > KEPT_BYTES:
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _copied(kept: "tuple[nn.Module, Objective | None]") -> Any:
    """Return a new copy at each call; with random weights if it is to run."""
    import torch

    from frugal.models.factories import mark_shapes_only

    module, objective = copy.deepcopy(kept)
    device = torch.get_default_device()
    if device.type == "meta":
        module = module.to("meta")
    else:
        _fill(module, device)
        mark_shapes_only(module)
    return module if objective is None else (module, objective)


def _fill(module: "nn.Module", device: Any) -> None:
    """Initialise a module for a trial: torch's own modules by their rule, other parameters with small numbers, the rest
    zero."""
    import torch

    buffers = {name: buffer for name, buffer in module.named_buffers() if not buffer.is_meta}
    module.to_empty(device=device)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.normal_(std=0.02)
            else:
                parameter.zero_()
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers.get(name, torch.zeros(())))
        for part in module.modules():
            if type(part).__module__.startswith("torch.nn") and hasattr(part, "reset_parameters"):
                part.reset_parameters()  # type: ignore[operator]  # a method


def _made(factory: Callable[[], Any], objective: "Objective") -> Any:
    made = factory()
    refuse((isinstance(made, tuple), "two objectives were given", "the model's function returns one", "leave one out"))
    return made, objective


def _is_importable(model: Any) -> bool:
    """Return whether another process finds `model` by importing its module."""
    module, name = getattr(model, "__module__", None), getattr(model, "__qualname__", None)
    if not module or not name or module == "__main__":
        return False
    try:
        return functools.reduce(getattr, name.split("."), importlib.import_module(module)) is model
    except (ImportError, AttributeError):
        return False


def _pickled(make: Callable[[], Any], name: str) -> str:
    import cloudpickle  # type: ignore[import-untyped]  # has no types

    from frugal.models.factories import PICKLED

    hint = "give a function that makes it, in a file: model='path/to/file.py:name'"
    with failure(f"{name} cannot be handed to the process of a dry run", hint=hint):
        data = cloudpickle.dumps(make)
    label = "".join(letter for letter in name if letter.isalnum()) or "model"
    return f"{_written(label, data, PICKLED)}:{label}"


def _written(label: str, data: bytes, suffix: str) -> Path:
    try:
        folder = Path(platformdirs.user_cache_dir("frugal")) / "models"
    except RuntimeError:  # a user without a home
        folder = Path(tempfile.gettempdir()) / "frugal-models"
    path = folder / f"{label}-{hashlib.sha256(data).hexdigest()[:16]}{suffix}"
    with failure(f"cannot write {path}", OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            files.write_file(path, data)
        files.touch(path)
        files.prune(folder, LIMIT_BYTES)
    return path
