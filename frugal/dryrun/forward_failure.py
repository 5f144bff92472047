"""A model whose forward fails on the inputs of a rehearsal: whose fault it is, and what can be done."""

import functools
import importlib.util
import traceback
from pathlib import Path

from frugal.errors import RequestError
from frugal.training import hub

_RUNS_A_FORWARD = ("loss_sum", "recompute_fn")  # of an objective, and of torch's activation checkpointing
_READ_THE_OUTPUT = ("loss.py", "objectives.py")  # of ours the only files that a model's outputs can make fail
_NO_VALUES = ("meta tensor", "Meta tensor", "meta device", "register_meta")


def failure_in_forward(model: str, error: Exception) -> RequestError | None:
    """What to tell the user of `model`, if `error` comes from its forward; None if it is a bug of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    runs = [i for i, frame in enumerate(frames) if frame.name in _RUNS_A_FORWARD]
    if not runs or _is_of("deepspeed", frames[-1]):
        return None
    if _is_of("frugal", frames[-1]) and Path(frames[-1].filename).name not in _READ_THE_OUTPUT:
        return None
    if isinstance(error, NotImplementedError) or any(words in str(error) for words in _NO_VALUES):
        hint = "a rehearsal knows shapes, not values: what depends on values has to come in with the batch"
    else:
        hint = (
            "if it takes or returns something else, give a factory that returns (module, objective), for example "
            "frugal.training.loss.SummedLoss(loss, example=...)"
        )
    because = [hub.first_line(error)]
    theirs = [each for each in frames[runs[0] + 1 :] if not any(_is_of(name, each) for name in _PACKAGES)]
    if theirs:
        because.append(f"{Path(theirs[-1].filename).name}, line {theirs[-1].lineno}, runs `{theirs[-1].line}`")
    return RequestError(f"the forward of {model} fails in a rehearsal", because=because, hint=hint)


_PACKAGES = ("torch", "frugal", "deepspeed")


def _is_of(package: str, frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(_folder(package))


@functools.cache
def _folder(package: str) -> Path:
    """Where a package is, without importing it."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None, package
    return Path(found.origin).parent
