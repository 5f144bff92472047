"""A plan in a few lines: the end of `frugal plan`, and what `print(plan)` and a notebook show.

A terminal adds a bar of what fills the memory. Each part of it has a letter and a name beside its colour.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.units import format_bytes

Rows = Sequence[tuple[str, str]]
"""Short names and their texts."""

NAME_WIDTH = 7
"""Columns of a row's name, with the space behind it."""

# Okabe and Ito's colours, which colour-blind people can tell apart, for light and dark.
_PARTS = {
    "parameters": ("p", "#0072B2"), "gradients": ("g", "#E69F00"), "optimizer": ("o", "#009E73"),
    "activations": ("a", "#CC79A7"), "logits": ("l", "#56B4E9"), "communication": ("c", "#D55E00"),
    "temporary": ("t", "#F0E442"), "slack": ("s", "#999999"), "context": ("x", "#777777"),
    "headroom": (".", "none"), "margin": ("-", "none"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BarPart:
    """A part of a device's memory: a category of the breakdown, or what stays free as `headroom` and as `margin`."""

    name: str
    letter: str
    colour: str
    size_bytes: int

    @property
    def ink(self) -> str:
        """The colour of letters on it, with a contrast of at least 4.5."""
        return "#ffffff" if self.colour == "#0072B2" else "#000000"

    @property
    def is_free(self) -> bool:
        """True if it is free memory."""
        return self.name in ("headroom", "margin")


@dataclass(frozen=True, kw_only=True)
class PlanVerdict:
    """A plan in short. `headline` is the batch, `notes` are its warnings, `memory` is that of the fullest device."""

    headline: str
    rows: Rows
    notes: tuple[str, ...]
    memory: MemoryBreakdown
    device_bytes: int

    @property
    def parts(self) -> list[BarPart]:
        """The parts of the device's memory in the order of the bar; their sum is `device_bytes`."""
        sizes = {name: getattr(self.memory, name) for name in self.memory.CATEGORIES}
        sizes["headroom"] = self.memory.headroom_bytes
        sizes["margin"] = max(0, self.device_bytes - sum(sizes.values()))
        return [
            BarPart(name=name, letter=letter, colour=colour, size_bytes=sizes[name])
            for name, (letter, colour) in _PARTS.items()
        ]


def text(verdict: PlanVerdict) -> str:
    """Return plain text: the notes, then the headline and a line a row."""
    notes = [f"{'note':<{NAME_WIDTH}}{note}" for note in verdict.notes]
    rows = [f"{name:<{NAME_WIDTH}}{words}" for name, words in verdict.rows]
    return "\n".join([*notes, *([""] if notes else []), verdict.headline, *rows])


def columns(parts: Sequence[BarPart], width: int) -> list[tuple[BarPart, int]]:
    """Return each part with its number of characters, `width` in all: the largest remainders are rounded up."""
    total = sum(part.size_bytes for part in parts)
    shares = [part.size_bytes * width // total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: -(parts[i].size_bytes * width % total))
    for i in by_remainder[: width - sum(shares)]:
        shares[i] += 1
    return list(zip(parts, shares, strict=True))


def named_inside(part: BarPart, share: int) -> str:
    """Return `share` characters of a part, with name and size where there is room: `lll logits 1.00 GiB lll`."""
    for words in (f" {part.name} {format_bytes(part.size_bytes)} ", f" {part.name} "):
        if len(words) + 2 <= share:
            return words.center(share, part.letter)
    return part.letter * share
