"""Reports and verdicts drawn to the width of a terminal by rich.

It leaves colours out if NO_COLOR is set or the terminal has none; nothing is shown by colour alone.
"""

import re
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from frugal.planning.plan import NAME_WIDTH, Plan
from frugal.planning.report import Block, Table, bar

WIDEST = 120
"""Maximum columns of a report: longer lines are hard to read."""

NARROWEST = 20
"""Minimum width of the last column of a table."""

_HEAD_OF_LINE = re.compile(r"\s*(\S+\s{2,})?")
"""The start of a line: its indent, or a name and the spaces behind it."""


def terminal() -> Console:
    """Return the terminal, at most `WIDEST` columns wide."""
    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDEST)
    return console


def draw_blocks(blocks: Sequence[Block]) -> None:
    """Draw blocks with an empty line between them.

    Lines wrap below their own text; the first of a block is its title, if others are indented.
    """
    console = terminal()
    for number, block in enumerate(blocks):
        if number:
            console.print()
        if isinstance(block, Table):
            console.print(_table(block))
            continue
        for i, line in enumerate(block):
            is_title = i == 0 and len(block) > 1 and block[1].startswith(" ")
            match = _HEAD_OF_LINE.match(line)
            head = match[0] if match is not None else ""
            text = Text(line[len(head) :], style="bold" if is_title else "")
            console.print(_hanging(head, text) if head else text)


def draw_verdict(plan: Plan) -> None:
    """Draw a plan in short, with a bar of the memory: letters on colours, and names of parts that have the room."""
    console = terminal()
    for note in plan.warnings:
        draw_row("note", note)
    if plan.warnings:
        console.print()
    console.print(Text(plan.arithmetic, style="bold"))
    for name, words in plan.verdict:
        draw_row(name, words)
        if name == "fits":
            parts = bar(plan.memory, plan.device_bytes, console.width - NAME_WIDTH)
            drawn = Text.assemble(*((part.named(share), part.style) for part, share in parts))
            console.print(_hanging("", drawn, NAME_WIDTH))


def draw_row(name: str, words: str) -> None:
    """Draw one row of a verdict."""
    terminal().print(_hanging(name, Text(words), max(NAME_WIDTH, len(name) + 1)))


def _hanging(head: str, words: RenderableType, width: int | None = None) -> RenderableType:
    """Return words that wrap below themselves, not below the head before them, which is `width` columns wide."""
    grid = Grid.grid(expand=True)
    grid.add_column(width=width or len(head), no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(Text(head.rstrip(), style="dim" if width else ""), words)
    return grid


def _table(table: Table) -> RenderableType:
    """Return a table that is as wide as its texts; in a narrower terminal rich wraps its widest columns."""
    grid = Grid(box=None, show_header=table.has_head, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    head = table.rows[0] if table.has_head else ("",) * len(table.rows[0])
    for name in head[:-1]:
        grid.add_column(Text(name), justify="right", overflow="fold")
    grid.add_column(Text(head[-1]), overflow="fold", min_width=NARROWEST)
    for row in table.rows[1:] if table.has_head else table.rows:
        grid.add_row(*map(Text, row))
    parts: list[RenderableType] = [Text(table.title, style="bold"), Padding(grid, (0, 0, 0, 2))]
    if table.note:
        parts.append(Padding(Text(table.note, style="dim"), (0, 0, 0, 2)))
    return Group(*parts)
