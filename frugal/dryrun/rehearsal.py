"""What a rehearsal finds out. Plain data: no torch here."""

from dataclasses import dataclass

from frugal.planning.timeline import Peak, Recording, Timeline
from frugal.planning.work import Counts


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What is known of a model before it runs. Parameters are counted in elements.

    `trainable_sizes`: those of each trainable parameter, in the model's order.
    `can_recompute`: whether it takes activation checkpointing; `can_tile`: whether it takes the tiled loss.
    """

    task: str
    max_positions: int | None
    parameters: int
    trainable_parameters: int
    trainable_sizes: tuple[int, ...]
    largest_parameter: int
    can_recompute: bool
    can_tile: bool


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What one rank does in two optimizer steps of equal micro-steps.

    `counts` are those of one micro-step. `host_bytes` is the peak of the rank's tensors on its host.
    `notes`: what was assumed where memory depends on data, see `frugal.dryrun.data_dependent`.
    """

    recording: Recording
    host_bytes: int
    counts: Counts
    notes: tuple[str, ...] = ()

    @property
    def timeline(self) -> Timeline:
        """The recording, with sizes that do not depend on the micro-batch."""
        return Timeline.constant(self.recording)

    @property
    def peak(self) -> Peak:
        """The fullest moment."""
        return self.timeline.peak(self.recording.micro_batch)

    @property
    def phases(self) -> dict[str, int]:
        """The peak of each phase, bytes."""
        return self.timeline.phase_peaks(self.recording.micro_batch)

    def explain(self, category: str) -> list[tuple[str, int]]:
        """The modules (dotted names) that hold the bytes of a category at the peak, largest first."""
        return self.timeline.holders(self.recording.micro_batch, category)
