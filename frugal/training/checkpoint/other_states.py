"""A checkpoint whose files have their checksums, and hold other states than this run's: found before any is used.

Optimizers' kernels take a state to be as long as its parameter, and write past the end of a shorter one. `copy_` casts
other types and repeats single elements without a word. So shape and type of each tensor that will be read, and each
number, is first compared with the engine's. Ranks share the files among them and vote: one that raised alone would
leave the others in a collective.

What is missed here DeepSpeed, torch and resharding find while they read, each with its own error: `named` explains it.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from frugal import torch_internals
from frugal.deepspeed_adapter.checkpoint_files import StateFiles, StateLayout
from frugal.distributed.first_failure import lost_connection
from frugal.errors import CheckpointError, first_line
from frugal.training.checkpoint.progress import MOST

_ERRORS = (LookupError, TypeError, AttributeError, AssertionError, ValueError, RuntimeError)
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_BY_ELEMENT = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2")
"""States with an element for each element of the weights, by the names of torch, DeepSpeed and bitsandbytes."""

Kind = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and type of a tensor; None: any type, which is converted."""


class _OtherError(Exception):
    """Something is not as the engine has it."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The shapes and types in which a reader has what it reads of a checkpoint.

    Attributes:
        zero_stage: of the checkpoint.
        world_size: of the checkpoint.
        parameters: shape and type of each, by its first name.
        names: all names of parameters, and the first name of each.
        trained: first names of those that are trained.
        buffers: shape and type of each that is saved.
        has_base: whether parameters that are not trained are in the checkpoint.
        masters: type of the weights that the optimizer updates.
        moments: type of Adam's moments; None: any.
        has_schedule: whether the reader has a schedule of the learning rate.
        slots: elements of each of the reader's slots, if it has the checkpoint's layout.
        scaler: the state of fp16's loss scale, if the reader has one.
    """

    zero_stage: int
    world_size: int
    parameters: Mapping[str, Kind]
    names: Mapping[str, str]
    trained: frozenset[str]
    buffers: Mapping[str, Kind]
    has_base: bool
    masters: torch.dtype
    moments: torch.dtype | None = None
    has_schedule: bool = False
    slots: tuple[int, ...] | None = None
    scaler: Any = None


def first_wrong(files: StateFiles, layout: StateLayout, expected: Expected, *, has_model: bool) -> str | None:
    """Return what is not as expected in one rank's files; None if all is.

    `has_model`: whether the model's own states are among them.
    """
    try:
        if has_model:
            _check_model(files, layout, expected)
        if expected.zero_stage > 0 or has_model:
            _check_optimizer(files, layout, expected)
    except _OtherError as error:
        return str(error)
    except Exception as error:  # whatever reading nested data that is not as expected raises
        return first_line(error)
    return None


def _check_model(files: StateFiles, layout: StateLayout, expected: Expected) -> None:
    is_split = expected.zero_stage == 3
    for name, first in expected.names.items():
        if first not in expected.trained and not expected.has_base:
            continue
        shape, dtype = expected.parameters[first]
        _check(files.module.get(name), (0,) if is_split else shape, dtype, name)
    for name, (shape, dtype) in expected.buffers.items():
        _check(files.module.get(name), shape, dtype, name)
    for piece in layout.frozen if is_split and expected.has_base else ():
        fragment, dtype = files.frozen(piece.name), expected.parameters[piece.name][1]
        _check(fragment, (max(piece.number, _length(fragment)),), dtype, piece.name)
    counts = {name: files.common.get(name) for name in _COUNTERS}
    if expected.has_schedule:
        counts["last_epoch of the learning rate's schedule"] = files.common["lr_scheduler"]["last_epoch"]
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count <= MOST:
            raise _OtherError(f"{name} is {count!r}")
    if files.common.get("dp_world_size") != expected.world_size:
        raise _OtherError(f"dp_world_size is {files.common.get('dp_world_size')!r}, of {expected.world_size} ranks")


def _check_optimizer(files: StateFiles, layout: StateLayout, expected: Expected) -> None:
    kept = files.optimizer()
    numbers = [number for group in kept["param_groups"] for number in group["params"]]
    if numbers != list(range(len(layout.slots))) or not set(kept["state"]) <= set(numbers):
        raise _OtherError(f"the optimizer has states of other slots than {len(layout.slots)}")
    if expected.zero_stage > 0:
        _check_scaler(files.scaler(), expected.scaler)
        if files.num_masters() != len(layout.slots):
            raise _OtherError(f"there are {files.num_masters()} groups of fp32 weights, and {len(layout.slots)} slots")
    for slot, pieces in enumerate(layout.slots):
        needed = max((piece.place + piece.number for piece in pieces), default=0)
        if expected.zero_stage == 0:
            shape = expected.parameters[pieces[0].name][0]
        else:
            own = None if expected.slots is None else expected.slots[slot]
            master, what = files.master(slot), f"fp32 weights of slot {slot}"
            most = _length(master) if own is None else own
            _check(master, (min(max(needed, _length(master)), most),), expected.masters, what)
            states = [value for value in files.slot(slot).values() if isinstance(value, Tensor) and value.dim()]
            shape = (max([needed, *map(_length, states)]) if own is None else own,)
        _check_states(files.slot(slot), shape, expected, slot)
        if layout.states is not None:
            differing = {name for name, _ in describe(files.slot(slot)).items() ^ layout.states[slot].items()}
            if differing:
                raise _OtherError(f"of slot {slot}, {', '.join(sorted(differing))} is not as it was saved")


def _check_states(states: Mapping[str, Any], shape: tuple[int, ...], expected: Expected, slot: int) -> None:
    for name, value in states.items():
        what = f"{name} of slot {slot}"
        if name in _BY_ELEMENT and value is not None:
            _check(value, shape, expected.moments if name.startswith("exp_avg") else None, what)
        elif not isinstance(value, Tensor) or value.dim() == 0:
            number = value.item() if isinstance(value, Tensor) else value
            if number is not None and (not isinstance(number, int | float) or not 0 <= number <= MOST):
                raise _OtherError(f"{what} is {number!r}")


def describe(states: Mapping[str, Any]) -> dict[str, str]:
    """Return the name and kind, in words, of each state that an optimizer has of one slot."""
    return {str(name): _kind(value) for name, value in sorted(states.items())}


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _check(value: Any, shape: tuple[int, ...], dtype: torch.dtype | None, what: str) -> None:
    kind = "missing" if value is None else _kind(value)
    wanted = _kind(torch.empty(shape, dtype=dtype or getattr(value, "dtype", None), device="meta"))
    if kind != wanted or value.layout != torch.strided:
        raise _OtherError(f"{what} is {kind}, and must be {wanted}")


def _length(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else 0


def _check_scaler(saved: Mapping[str, Any], own: Any) -> None:
    for name in ("dynamic_loss_scale", "overflow"):
        if type(saved.get(name)) is not bool:
            raise _OtherError(f"{name} is {saved.get(name)!r}")
    if own is None:
        return
    scaler = saved.get("loss_scaler")
    if saved["dynamic_loss_scale"] != own.dynamic or type(scaler) is not type(own):
        raise _OtherError(f"loss_scaler is a {type(scaler).__name__}, and must be a {type(own).__name__}")
    kept = vars(scaler)
    if kept.keys() != vars(own).keys():
        raise _OtherError(f"loss_scaler has {', '.join(sorted(kept))}")
    for name, value in vars(own).items():
        now = kept[name]
        if type(value) in (int, float):
            is_good = type(now) in (int, float) and math.isfinite(now) and (name != "cur_scale" or now > 0)
        else:
            is_good = type(now) is type(value)
        if not is_good or (not own.dynamic and now != value):
            raise _OtherError(f"{name} of loss_scaler is {now!r}")


def wrong_tiling(layouts: Sequence[StateLayout], expected: Expected) -> str | None:
    """Return a parameter of which the pieces of all ranks do not have each element once; None if there is none.

    `layouts`: of the ranks that keep parts, or of one if each keeps all.
    """
    extents: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for rank, layout in enumerate(layouts):
        for is_frozen, slots in ((False, layout.slots), (True, (layout.frozen,))):
            if is_frozen and rank > 0 and expected.zero_stage < 3:
                continue
            for pieces in slots:
                end = 0
                for piece in sorted(pieces, key=lambda piece: piece.place):
                    if piece.number < 0 or (piece.place < end and not is_frozen):
                        return f"{piece.name} is kept in place {piece.place}, which is another's"
                    end = piece.place + piece.number
                    extents.setdefault((piece.name, is_frozen), []).append((piece.first, piece.number))
    for name, (shape, _) in expected.parameters.items():
        is_frozen, end = name not in expected.trained, 0
        if is_frozen and not expected.has_base:
            continue
        for first, number in sorted(extents.pop((name, is_frozen), [])):
            if first != end:
                break
            end += number
        if end != torch.Size(shape).numel():
            return f"of {name}, elements up to {end} of {torch.Size(shape).numel()} are kept once"
    others = [name for name, is_frozen in extents if expected.has_base or not is_frozen]
    return f"{others[0]} is none of the model's parameters" if others else None


def wrong_generators(saved: Any) -> str | None:
    """Return why saved states of random number generators cannot be put back, tried on new ones; None if they can."""
    try:
        random.Random().setstate(saved["python"])
        np.random.RandomState().set_state(saved["numpy"])
        torch.Generator().set_state(saved["torch"])
        if (cuda := saved["cuda"]) is not None and (cuda.dtype, cuda.dim()) != (torch.uint8, 1):
            return f"the state of CUDA's generator is {_kind(cuda)}"
    except Exception as error:  # each generator has its own
        return f"a random number generator cannot be put back: {first_line(error)}"
    return None


def of_module(module: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the part of `Expected` that a model decides, whose parameters have these `shapes`."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "parameters": {name: (shapes[name], parameter.dtype) for name, parameter in module.named_parameters()},
        "names": {name: first[id(each)] for name, each in module.named_parameters(remove_duplicate=False)},
        "trained": frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad),
        "buffers": {name: (tuple(b.shape), b.dtype) for name, b in torch_internals.saved_buffers(module).items()},
    }


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
        raise refusal(path, f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _is_of_content(error: Exception) -> bool:
    """Return whether an error of reading is about the content; subclasses of RuntimeError come from collectives."""
    if not isinstance(error, RuntimeError):
        return True
    return type(error) is RuntimeError and not (lost_connection(error) or torch_internals.is_out_of_memory(error))
