"""How far a run is: what a checkpoint keeps of it beside weights and optimizer states."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from frugal import file_errors, files
from frugal.config.learning_rate import Curve
from frugal.training.checkpoint import manifest
from frugal.training.data.batches import Position
from frugal.training.data.sources import Provenance
from frugal.training.oom_limits import LearntLimits

TRAINING = "training.json"


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
