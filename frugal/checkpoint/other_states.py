"""A checkpoint whose files have their checksums, and hold other states than this run's: found before any is used.

Optimizers' kernels take a state to be as long as its parameter, and write past the end of a shorter one. `copy_` casts
other types and repeats single elements without a word. So shape and type of each tensor, and each number, is compared
with the engine's where it is handed out, in a first pass that writes nothing. Ranks vote after it: one that raised
alone would leave the others in a collective.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from frugal import torch_internals
from frugal.checkpoint.progress import MOST
from frugal.distributed.first_failure import lost_connection
from frugal.errors import CheckpointError, first_line

_ERRORS = (LookupError, TypeError, AttributeError, AssertionError, ValueError, RuntimeError)
BY_ELEMENT = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2")
"""States with an element for each element of the weights, by the names of torch, DeepSpeed and bitsandbytes."""


def describe(states: Mapping[str, Any]) -> dict[str, str]:
    """Return the name and kind, in words, of each state that an optimizer has of one slot."""
    return {str(name): kind(value) for name, value in sorted(states.items())}


def kind(value: Any) -> str:
    """Return type and shape of a tensor, or the type of something else, in words."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "" if value.layout == torch.strided else f"{value.layout} "
    return f"{layout}{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def check_kind(value: Any, like: Tensor, what: str) -> None:
    """Check that a saved value is a tensor with the shape and type of another one.

    Raises:
        ValueError: it is not.
    """
    if kind(value) != kind(like):
        raise ValueError(f"{what} is {kind(value)}, and must be {kind(like)}")


def check_count(value: Any, what: str) -> None:
    """Check a number of steps, samples and the like.

    Raises:
        ValueError: it cannot be one.
    """
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{what} is {value!r}")


def check_number(value: Any, what: str) -> None:
    """Check a state that is one number for a whole slot.

    Raises:
        ValueError: it is none, or negative, or not finite.
    """
    number = value.item() if isinstance(value, Tensor) else value
    if not isinstance(number, int | float) or not 0 <= number <= MOST:
        raise ValueError(f"{what} is {number!r}")


def check_scaler(saved: Mapping[str, Any], own: Any) -> None:
    """Check the state of fp16's loss scale; `own` is the reader's scaler.

    Raises:
        ValueError: it is not like the reader's.
    """
    for name in ("dynamic_loss_scale", "overflow"):
        if type(saved.get(name)) is not bool:
            raise ValueError(f"{name} is {saved.get(name)!r}")
    scaler: Any = saved.get("loss_scaler")
    if saved["dynamic_loss_scale"] != own.dynamic or type(scaler) is not type(own):
        raise ValueError(f"loss_scaler is a {type(scaler).__name__}, and must be a {type(own).__name__}")
    kept = vars(scaler)
    if kept.keys() != vars(own).keys():
        raise ValueError(f"loss_scaler has {', '.join(sorted(kept))}")
    for name, value in vars(own).items():
        now = kept[name]
        if type(value) in (int, float):
            is_good = type(now) in (int, float) and math.isfinite(now) and (name != "cur_scale" or now > 0)
        else:
            is_good = type(now) is type(value)
        if not is_good or (not own.dynamic and now != value):
            raise ValueError(f"{name} of loss_scaler is {now!r}")


def check_generators(saved: Any) -> None:
    """Check that saved states of random number generators can be put back, on new ones.

    Raises:
        ValueError: they cannot.
    """
    try:
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(saved["numpy"])
        torch.Generator().set_state(saved["torch"])
    except Exception as error:  # each generator has its own
        raise ValueError(f"a random number generator cannot be put back: {first_line(error)}") from None
    if (cuda := saved["cuda"]) is not None and (cuda.dtype, cuda.dim()) != (torch.uint8, 1):
        raise ValueError(f"the state of CUDA's generator is {kind(cuda)}")


def first_wrong(check: Callable[[], object]) -> str | None:
    """Return what a check finds wrong; None if nothing is."""
    try:
        check()
    except Exception as error:  # whatever reading nested data that is not as expected raises
        if not _is_of_content(error):
            raise
        return str(error).splitlines()[0] if type(error) is ValueError and str(error) else first_line(error)
    return None


def refusal(path: Path, reason: str) -> CheckpointError:
    """Return the error of a checkpoint that holds something else."""
    return CheckpointError(
        f"cannot continue from {path}: its files are whole, and do not hold the states of this run",
        because=reason,
        hint=f"move {path.name} away to continue from the checkpoint before it, or start again with another --out",
    )


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Name the checkpoint `path` in an error of reading it inside the `with` block.

    Raises:
        CheckpointError: its files do not hold what was asked for.
    """
    try:
        yield
    except _ERRORS as error:
        if not _is_of_content(error):
            raise
        raise refusal(path, first_line(error)) from error


def _is_of_content(error: Exception) -> bool:
    """Return whether an error of reading is about the content; most subclasses of RuntimeError are of collectives."""
    if not isinstance(error, RuntimeError):
        return True
    is_plain = type(error) in (RuntimeError, NotImplementedError)  # the latter of sparse tensors
    return is_plain and not (lost_connection(error) or torch_internals.is_out_of_memory(error))
