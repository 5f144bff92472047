"""How far a run is: the part of a checkpoint beside weights and optimizer states."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from frugal import files
from frugal.checkpoint import manifest
from frugal.config.learning_rate import Curve
from frugal.data.batches import MicroBatchLimits, Position
from frugal.data.sources import Provenance
from frugal.errors import RequestError

TRAINING = "training.json"
EXTRA = "extra.pt"

_PLAIN = (type(None), bool, int, float, str, bytes, Tensor)


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """A run's best evaluation: its `value` by the criterion `by`, its step, and how many came since."""

    by: str
    value: float
    step: int
    num_since: int


@dataclass(frozen=True, kw_only=True)
class LearntLimits:
    """The limits of micro-batches that a run has learnt where memory ran out.

    Attributes:
        planned: the plan's limits; under another plan nothing was learnt.
        limits: those in force in training.
        larger: those they were lowered from, the plan's first.
        evaluation: those in force in evaluation, where memory ran out in it.
        clean_steps: optimizer steps since they last changed.
        patience: clean steps until the next larger ones are tried.
        has_grown: whether the last change was to larger ones.
        recomputes: whether activation checkpointing was switched on.
    """

    planned: MicroBatchLimits
    limits: MicroBatchLimits
    larger: tuple[MicroBatchLimits, ...] = ()
    evaluation: MicroBatchLimits | None = None
    clean_steps: int = 0
    patience: int = 100
    has_grown: bool = False
    recomputes: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        position: where the order of the data stands.
        data: the origin of the training data.
        learning_rate: the planned schedule; None in checkpoints that are older than this record.
        seed: the seed of the order of the data.
        validation_loss: the loss of exactly these weights, where it was measured.
        metrics: numbers of the user's own metric for these weights, by name.
        best: the best evaluation so far.
        learnt: limits learnt where memory ran out; saving fills them in.
        extra: plain data of the user's own loop, from a file of its own; rank 0's on all ranks.
    """

    step: int
    position: Position = field(default_factory=Position)
    data: Provenance = field(default_factory=Provenance)
    learning_rate: Curve | None = None
    seed: int = 0
    validation_loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    best: BestSoFar | None = None
    learnt: LearntLimits | None = None
    extra: Any = None


def read_progress(path: Path) -> Progress:
    """Return the progress of the run at the checkpoint `path`.

    Raises:
        ValueError: its record cannot be read; the message says why.
    """
    try:
        progress = msgspec.json.decode(files.read_regular(path / TRAINING, manifest.MOST_BYTES), type=Progress)
    except OSError as error:
        raise manifest.unreadable(error, path / TRAINING) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path / TRAINING} is no record of a run: {error}") from None
    if (beyond := _beyond_sense(progress)) is not None:
        raise ValueError(f"{path / TRAINING} is no record of a run: {beyond}")
    return progress


def finite(progress: Progress) -> Progress:
    """Return the record without NaN and infinite numbers, which JSON does not have."""
    best = progress.best if progress.best is None or math.isfinite(progress.best.value) else None
    metrics = {name: value for name, value in progress.metrics.items() if math.isfinite(value)}
    return replace(progress, best=best, metrics=metrics)


MOST = 1 << 53
"""No count of a run is larger: steps, samples, tokens."""


def _beyond_sense(progress: Progress) -> str | None:
    """Return which number cannot be one of a run, and why; None if all can."""
    for name, value in _numbers(msgspec.to_builtins(replace(progress, extra=None))):
        if isinstance(value, int) and not 0 <= value <= (MOST if name != "seed" else value):
            return f"{name} is {value}"
        if name.partition(".")[0] == "learning_rate" and value < 0:
            return f"{name} is {value:g}"
    best, curve, learnt = progress.best, progress.learning_rate, progress.learnt
    if best is not None and best.step > progress.step:
        return f"best.step is {best.step}, and step is {progress.step}"
    if curve is not None and curve.warmup_steps + curve.decay_steps > max(curve.total_steps, curve.warmup_steps):
        return f"learning_rate.total_steps is {curve.total_steps}, and warmup and decay have more"
    if learnt is None:
        return None
    if learnt.patience < 1:
        return f"learnt.patience is {learnt.patience}"
    for name, limits in (
        ("limits", learnt.limits), ("evaluation", learnt.evaluation), *(("larger", each) for each in learnt.larger)
    ):  # fmt: skip
        if limits is not None and not (  # they may have come from the planned ones by halving
            (limits.seq_len, limits.overhead) == (learnt.planned.seq_len, learnt.planned.overhead)
            and limits.shortest in (learnt.planned.shortest, learnt.planned.seq_len)
            and len(limits.max_samples) == len(learnt.planned.max_samples)
            and all(
                1 <= each <= max(cap, 1)
                for each, cap in zip(limits.max_samples, learnt.planned.max_samples, strict=True)
            )
        ):
            return f"learnt.{name} is not within learnt.planned"
    return None


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield the numbers in nested dicts and lists, with their names: `position.offset`."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for place, each in enumerate(value):
            yield from _numbers(each, f"{name}[{place}]")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def check_plain(extra: Any, name: str = "extra") -> None:
    """Check that the restricted unpickler, which runs no code, can read `extra` back.

    Raises:
        RequestError: there is an object in it that is not plain data.
    """
    if type(extra) is dict:
        for key, value in extra.items():
            check_plain(key, f"a key of {name}")
            check_plain(value, f"{name}[{key!r}]")
    elif type(extra) in (list, tuple):
        for place, value in enumerate(extra):
            check_plain(value, f"{name}[{place}]")
    elif type(extra) not in _PLAIN:
        raise RequestError(
            f"{name} is of type {type(extra).__name__}, which no checkpoint holds",
            because="a checkpoint has plain data only, so that reading one cannot run code",
            hint="use numbers, text, bytes, tensors, and lists, tuples and dicts of them",
        )
