"""A plan in a few lines: what `frugal plan` ends with, what `print(plan)` and a notebook show.

Its rows are the same everywhere; a terminal and a notebook add a bar of what fills the memory. Each part of the bar has
a letter and a name beside its colour, so that nothing is told by colour alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.units import format_bytes

Rows = Sequence[tuple[str, str]]
"""A short name and what is said of it."""

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
        """The colour of letters on it, with a contrast of 4.5 at least."""
        return "#ffffff" if self.colour == "#0072B2" else "#000000"

    @property
    def is_free(self) -> bool:
        """Whether nothing fills it."""
        return self.name in ("headroom", "margin")


@dataclass(frozen=True, kw_only=True)
class PlanVerdict:
    """What a plan comes to. `headline` is the batch, `notes` what must not be missed, `memory` the fullest device's."""

    headline: str
    rows: Rows
    notes: tuple[str, ...]
    memory: MemoryBreakdown
    device_bytes: int

    def with_rows(self, *rows: tuple[str, str]) -> "PlanVerdict":
        """The same with more rows; those that say nothing are left out."""
        return replace(self, rows=(*self.rows, *(row for row in rows if row[1])))

    @property
    def parts(self) -> list[BarPart]:
        """Of the device's memory, in the order of the bar; all together are `device_bytes`."""
        sizes = {name: getattr(self.memory, name) for name in self.memory.CATEGORIES}
        sizes["headroom"] = self.memory.headroom_bytes
        sizes["margin"] = max(0, self.device_bytes - sum(sizes.values()))
        return [
            BarPart(name=name, letter=letter, colour=colour, size_bytes=sizes[name])
            for name, (letter, colour) in _PARTS.items()
        ]


def text(verdict: PlanVerdict) -> str:
    """Plain lines, the same in a pipe and a log: the notes, then the headline and a line a row."""
    notes = [f"{'note':<{NAME_WIDTH}}{note}" for note in verdict.notes]
    rows = [f"{name:<{NAME_WIDTH}}{words}" for name, words in verdict.rows]
    return "\n".join([*notes, *([""] if notes else []), verdict.headline, *rows])


def columns(parts: Sequence[BarPart], width: int) -> list[tuple[BarPart, int]]:
    """The parts as so many characters each, `width` in all, rounded so that the largest remainders gain."""
    total = sum(part.size_bytes for part in parts)
    shares = [part.size_bytes * width // total for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda i: -(parts[i].size_bytes * width % total))
    for i in by_remainder[: width - sum(shares)]:
        shares[i] += 1
    return list(zip(parts, shares, strict=True))


def named_inside(part: BarPart, share: int) -> str:
    """So many characters of a part: its letter, and between its letters name and size, or the name, if there is room:
    `aaa activations 4.11 GiB aaa`."""
    for words in (f" {part.name} {format_bytes(part.size_bytes)} ", f" {part.name} "):
        if len(words) + 2 <= share:
            return words.center(share, part.letter)
    return part.letter * share


def legend(parts: Sequence[BarPart]) -> list[str]:
    """What the letters of the bar are, largest first, and last what stays free: `a activations 4.11 GiB`."""
    largest_first = sorted(parts, key=lambda part: (part.is_free, -part.size_bytes))
    return [f"{part.letter} {part.name} {format_bytes(part.size_bytes)}" for part in largest_first if part.size_bytes]


def html(verdict: PlanVerdict) -> str:
    """A bar and a table; no script, no style sheet, for light and dark, and for columns of any width."""
    style = "text-align:left;vertical-align:top;padding:.1em .6em .1em 0"
    name_style, words_style = f"{style};white-space:nowrap", f"{style};white-space:normal;overflow-wrap:anywhere"
    rows = (*verdict.rows, *(("note", note) for note in verdict.notes))
    lines = "".join(
        f'<tr><th scope="row" style="{name_style}">{escape(name)}</th>'
        f'<td style="{words_style}">{escape(words)}</td></tr>'
        for name, words in rows
    )
    return (
        f'<div style="max-width:48em"><b>{escape(verdict.headline)}</b>{_bar(verdict)}'
        f'<table style="border-collapse:collapse;margin:0">{lines}</table></div>'
    )


def _bar(verdict: PlanVerdict) -> str:
    """Pieces in percent of the device; what is less than a thousandth of it is left out."""
    device = verdict.device_bytes
    parts = [part for part in verdict.parts if part.size_bytes * 1000 >= device]
    label = f"{format_bytes(verdict.memory.total_bytes)} of {format_bytes(device)}: {', '.join(legend(parts))}"
    pieces = "".join(
        f'<span title="{part.name} {format_bytes(part.size_bytes)}" style="width:{100 * part.size_bytes / device:.2f}%;'
        f"background:{part.colour};{'' if part.is_free else f'color:{part.ink};'}overflow:hidden;"
        f'text-align:center;box-sizing:border-box;border-right:1px solid currentColor">{part.letter}</span>'
        for part in parts
    )
    names = " &nbsp; ".join(
        f'<span style="white-space:nowrap"><span style="background:{part.colour};'
        f"{'' if part.is_free else f'color:{part.ink};'}"
        f'padding:0 .3em">{part.letter}</span> {part.name} {format_bytes(part.size_bytes)}</span>'
        for part in parts
    )
    return (
        f'<div role="img" aria-label="memory: {escape(label)}" style="display:flex;height:1.5em;line-height:1.5em;'
        f'margin:.4em 0;outline:1px solid currentColor;font-family:monospace">{pieces}</div>'
        f'<div style="font-size:smaller;line-height:1.6">{names}</div>'
    )
