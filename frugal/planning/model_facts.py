"""The sizes of a model, where its weights come from, and what it can do: what is known before it runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Origin = Literal["pretrained", "random", "factory"]
"""Where weights come from: files, a random generator, or a user's function."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The most bytes on a host while weights are read, tensors and touched pages of their files.

    `passing_bytes`: where every parameter goes elsewhere. `keeping_bytes`: where all of them stay on the host, too.
    """

    passing_bytes: int
    keeping_bytes: int

    def keeping(self, kept_bytes: int, whole_bytes: int) -> int:
        """Return the bytes where `kept_bytes` of a model of `whole_bytes` stay: an upper bound, as each moment's bytes
        are affine.
        """
        return self.passing_bytes + (self.keeping_bytes - self.passing_bytes) * kept_bytes // max(1, whole_bytes)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """`origin`, and of pretrained ones what reading them takes of a host by precision, where that is known."""

    origin: Origin
    reading: Mapping[str, Reading]


RANDOM = Weights(origin="random", reading={})


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Weights that are kept in fewer bits: how many, what they take, and their scales, which every rank has whole."""

    elements: int = 0
    packed_bytes: int = 0
    scales_bytes: int = 0

    def weight_bytes(self, parameters: int, element_bytes: int) -> int:
        """Return the bytes of all of a model's `parameters`, without the scales."""
        return element_bytes * (parameters - self.elements) + self.packed_bytes


NOT_PACKED = Packed()

FUSED_LOSS = "the tiled loss"
"""The word in `ModelFacts.fused` for the cross entropy of the tiled loss."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The facts about a model before it runs. Parameters are counted in elements.

    Attributes:
        task: what is trained.
        max_positions: tokens in the longest sample that it can read; None: any number.
        parameters: all of them.
        trainable_parameters: those that are trained.
        trainable_sizes: elements of each trainable parameter, in the model's order.
        largest_parameter: elements of the largest one.
        can_recompute: whether it takes activation checkpointing.
        can_tile: whether it takes the tiled loss.
        notes: warnings about training it, see `frugal.models.trials.model_check`.
        weights: where they come from.
        packed: weights that are kept in fewer bits.
        fused: modules that run in Liger's kernels where the strategy says so, in words: `33 RMSNorm`. Empty: none, or
            they are not wanted, not installed, or not for these devices.
    """

    task: str
    max_positions: int | None
    parameters: int
    trainable_parameters: int
    trainable_sizes: tuple[int, ...]
    largest_parameter: int
    can_recompute: bool
    can_tile: bool
    notes: tuple[str, ...] = ()
    weights: Weights = RANDOM
    packed: Packed = NOT_PACKED
    fused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """The model the plan is for: parameters (elements) and FLOPs of forward and backward of one full-length sample."""

    task: str
    parameters: int
    trainable_parameters: int
    largest_parameter: int
    flops_per_sample: float
