"""What a ZeRO optimizer is told."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One rank's part in training.

    Attributes:
        elements: of every trainable parameter, in the model's order.
        element_bytes: of the model's type.
        bucket_elements: of the gradient bucket.
    """

    zero_stage: int
    elements: tuple[int, ...]
    element_bytes: int
    bucket_elements: int
    optimizer: str
    world_size: int
    rank: int
