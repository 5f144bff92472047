"""How far a run is: what a checkpoint keeps of it beside weights and optimizer states."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from frugal import file_errors, files
from frugal.config.learning_rate import Curve
from frugal.errors import RequestError
from frugal.training.checkpoint import manifest
from frugal.training.data.batches import Position
from frugal.training.data.sources import Provenance
from frugal.training.oom_limits import LearntLimits

TRAINING = "training.json"
EXTRA = "extra.pt"

_PLAIN = (type(None), bool, int, float, str, bytes, Tensor)


@dataclass(frozen=True, kw_only=True)
class BestSoFar:
    """A run's best evaluation: its `value` `by` which criterion, after which step, and how many have come since."""

    by: str
    value: float
    step: int
    num_since: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        position: where the order of the data stands.
        data: where the training data comes from.
        learning_rate: over the run as it was planned then; None in checkpoints that are older than this record.
        seed: of the order of the data.
        validation_loss: of exactly these weights, where it was measured.
        metrics: and what a metric of the user's own says of them, by name.
        best: the best evaluation up to here.
        extra: whatever the user's own loop wants back, plain data, from a file of its own; rank 0's on all ranks.
        learnt: what the run has learnt of the memory there is; saving fills it in.
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
    """How far the run was at the checkpoint `path`.

    Raises:
        ValueError: its record cannot be read; the message says why.
    """
    try:
        return msgspec.json.decode(files.read_regular(path / TRAINING, manifest.MOST_BYTES), type=Progress)
    except OSError as error:
        raise ValueError(file_errors.explain(error, path / TRAINING).because) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path / TRAINING} is no record of a run: {error}") from None


def check_plain(extra: Any, name: str = "extra") -> None:
    """Whether a checkpoint can hold this, and the restricted unpickler, which runs no code, can give it back.

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
