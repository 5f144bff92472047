"""What a storage is for: a parameter, a gradient, an activation, ...

At birth the category follows from the phase, the shape, and who asked for it: the model or DeepSpeed. What lives
on past the end of a phase is looked up where its owner keeps it, and relabelled.
"""

import functools
import importlib.util
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn

from frugal import torch_internals
from frugal.planning.memory.timeline import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    GRADIENTS,
    LOGITS,
    TEMPORARY,
)

AUTOGRAD, DEEPSPEED, MODEL = "autograd", "DeepSpeed", "model"


@functools.cache
def package_folder(package: str) -> Path:
    """Where a package is, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, package
    return Path(spec.origin).parent


_TORCH, _FRUGAL, _DEEPSPEED, _TRANSFORMERS = (
    package_folder(name) for name in ("torch", "frugal", "deepspeed", "transformers")
)
_TRANSPARENT = (
    _TORCH,
    _FRUGAL / "dryrun",
    _FRUGAL / "deepspeed_adapter",
    _FRUGAL / "training" / "measure" / "storage_watch.py",
    _FRUGAL / "training" / "models" / "selective_recompute.py",
    _DEEPSPEED / "runtime" / "engine.py",
    _DEEPSPEED / "runtime" / "zero" / "linear.py",
    _DEEPSPEED / "utils",
)
"""Code that runs operators for whoever called it. By the folders of the packages themselves: a model may lie anywhere,
also in a folder named `deepspeed` or `torch`."""
assert all(place.exists() for place in _TRANSPARENT), "DeepSpeed has moved what runs operators for others"

_asker_of_code: dict[Any, str | None] = {torch_internals.RUN_BACKWARD: AUTOGRAD}


def asker(frame: FrameType | None) -> str:
    """Who runs the operator: `autograd` itself, `DeepSpeed`, or the `model`, which also stands for the rest."""
    while frame is not None:
        name = _asker_of(frame)
        if name is not None:
            return name
        frame = frame.f_back
    return MODEL


def _asker_of(frame: FrameType) -> str | None:
    """Who runs what a frame runs; None: whoever called it."""
    code = frame.f_code
    if code not in _asker_of_code:
        file = Path(code.co_filename)
        if any(file.is_relative_to(place) for place in _TRANSPARENT):
            _asker_of_code[code] = None
        else:
            _asker_of_code[code] = DEEPSPEED if file.is_relative_to(_DEEPSPEED) else MODEL
    return _asker_of_code[code]


def asked_by_transformers(frame: FrameType | None) -> bool:
    """Whether the operator is run by code of the transformers library, which asks whether masks are full."""
    while frame is not None and _asker_of(frame) is None:
        frame = frame.f_back
    return frame is not None and Path(frame.f_code.co_filename).is_relative_to(_TRANSFORMERS)


class Shapes:
    """The shapes that tell parameters' gradients and logits from the rest."""

    def __init__(self, model: nn.Module) -> None:
        shapes = {tuple(parameter.shape) for parameter in model.parameters()}
        self.parameters = shapes | {shape[::-1] for shape in shapes}
        self.vocabulary = vocabulary_size(model)

    def category(self, shape: tuple[int, ...], phase: str, who: str, *, recomputing: bool) -> int:
        """The category at birth of a storage whose first tensor has `shape`."""
        if who == DEEPSPEED:
            return COMMUNICATION if phase in (FORWARD, BACKWARD) else TEMPORARY
        if phase == BACKWARD and not recomputing and shape in self.parameters:
            return GRADIENTS
        if self.vocabulary and len(shape) >= 2 and shape[-1] == self.vocabulary and phase in (FORWARD, BACKWARD):
            return LOGITS
        if phase == FORWARD or recomputing:
            return ACTIVATIONS
        return TEMPORARY


def vocabulary_size(model: nn.Module) -> int | None:
    """Classes of the model's head, if it is a language model of the transformers kind."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return None
    return getattr(config.get_text_config(), "vocab_size", None)
