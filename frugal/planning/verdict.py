"""A plan in a few lines: what `print(plan)` and a notebook show."""

from collections.abc import Sequence
from html import escape

from frugal.planning.memory.breakdown import MemoryBreakdown
from frugal.units import format_bytes

Rows = Sequence[tuple[str, str]]
"""A short name and what is said of it."""

# Okabe and Ito's colours, which colour-blind people can tell apart; the legend names each, too.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#555555")


def text(headline: str, rows: Rows) -> str:
    """Plain lines, the same in a terminal and a pipe."""
    return "\n".join([headline, *(f"{name:<5} {words}" for name, words in rows)])


def html(headline: str, rows: Rows, memory: MemoryBreakdown, device_bytes: int) -> str:
    """A table and a bar of what fills a device of `device_bytes`; no script, no style sheet, colours for any theme."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(words)}</td></tr>'
        for name, words in rows
    )
    return f"<div><b>{escape(headline)}</b>{_bar(memory, device_bytes)}<table>{lines}</table></div>"


def _bar(memory: MemoryBreakdown, device_bytes: int) -> str:
    parts = [
        (name, getattr(memory, name), colour) for name, colour in zip(memory.CATEGORIES, _COLOURS, strict=True)
        if getattr(memory, name) * 1000 >= device_bytes
    ]  # fmt: skip
    label = f"{format_bytes(memory.total_bytes)} of {format_bytes(device_bytes)}"
    pieces = "".join(
        f'<span title="{name} {format_bytes(size)}" style="display:inline-block;height:100%;background:{colour};'
        f'width:{100 * size / device_bytes:.2f}%"></span>'
        for name, size, colour in parts
    )
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{colour}">&#9632;</span> {name} '
        f"{format_bytes(size)}</span>"
        for name, size, colour in parts
    )
    return (
        f'<div role="img" aria-label="memory: {label}" style="display:flex;height:1.2em;max-width:40em;margin:.4em 0;'
        f'outline:1px solid currentColor">{pieces}</div><div style="max-width:40em;font-size:smaller">{legend}</div>'
    )
