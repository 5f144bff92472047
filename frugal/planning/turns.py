"""In which order a search looks at strategies, so that most are never traced: the plain first, then what saves more."""

from collections.abc import Sequence

from frugal.planning.choice import Option
from frugal.planning.request import Request
from frugal.planning.strategy import ActivationCheckpointing, Strategy

TURNS: tuple[tuple[ActivationCheckpointing, ...], ...] = (("off",), ("full", "selective"), ("offloaded",))
"""Modes of activation checkpointing, in the order they are looked at."""

LIKE: dict[ActivationCheckpointing, tuple[ActivationCheckpointing, ...]] = {
    "off": ("off",),
    "full": ("full", "off"),
    "selective": ("selective", "off"),
    "offloaded": ("offloaded", "full", "off"),
}
"""Whose work a mode's best case is taken from: its own, or that of one which does no more."""

BUCKET_SHARE = 0.05
"""Of a device's memory: where buckets take more, smaller ones are tried, too."""


def turns(strategies: Sequence[Strategy]) -> list[list[Strategy]]:
    """The strategies of each turn, in their order."""
    return [[each for each in strategies if each.activation_checkpointing in modes] for modes in TURNS]


def buckets_matter(options: Sequence[Option], request: Request, usable_bytes: int) -> bool:
    """Whether smaller buckets could make something fit where nothing does, or make much room on a small device."""
    usual = next((option.strategy for option in options if option.strategy.zero_stage), None)
    if usual is None or request.reduce_bucket_elements or usual.offload_optimizer == "nvme":
        return False
    elements = usual.reduce_bucket_elements * (2 if usual.overlap_comm else 1)
    if any(option.strategy.zero_stage == 3 for option in options):
        elements += usual.prefetch_bucket_elements + min(usual.max_live_elements, usual.prefetch_bucket_elements)
    saved_bytes = elements * (4 if request.precision == "fp32" else 2)
    if any(option.fits for option in options):
        return saved_bytes > BUCKET_SHARE * usable_bytes
    known = [option.headroom_bytes for option in options if option.headroom_bytes is not None]
    return bool(known) and -max(known) < saved_bytes
