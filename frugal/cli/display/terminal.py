"""Reports drawn to the width of a terminal, and as plain text everywhere else.

rich is imported only for a terminal, so that a plan from the cache stays fast in a pipe. It leaves colours out if
NO_COLOR is set or the terminal has none; nothing is shown by colour alone.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

import click

from frugal.planning.report import Block, Table, as_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDEST = 120
"""Maximum columns of a report: longer lines are hard to read."""

PATIENCE = 3.0
"""Seconds until a line says what is being done where no spinner can."""

NARROWEST = 20
"""Minimum width of the last column of a table."""

_HEAD_OF_LINE = re.compile(r"\s*(\S+\s{2,})?")
"""The start of a line: its indent, or a name and the spaces behind it."""


def is_terminal() -> bool:
    """Return True if standard output is a terminal."""
    return sys.stdout.isatty()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show a line with a spinner inside the `with` block; in a pipe or a log print it, once it takes `PATIENCE`."""
    if not sys.stderr.isatty():
        said = Timer(PATIENCE, click.echo, [f"{what} ..."], {"err": True})
        said.daemon = True
        said.start()
        try:
            yield
        finally:
            said.cancel()
        return
    from rich.console import Console  # takes a tenth of a second

    with Console(stderr=True).status(what):
        yield


def show(blocks: Iterable[Block], *, err: bool = False) -> None:
    """Print blocks with an empty line between them."""
    blocks = [block for block in blocks if block]
    if err or not is_terminal():
        click.echo(as_text(blocks), err=err)
        return
    console = drawing()
    for i, block in enumerate(blocks):
        if i:
            console.print()
        for part in [_table(block)] if isinstance(block, Table) else _lines(block):
            console.print(part)


def drawing() -> "Console":
    """Return the terminal, at most `WIDEST` columns wide."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDEST)
    return console


def hanging(head: str, words: "RenderableType", width: int | None = None) -> "RenderableType":
    """Return words that wrap below themselves, not below the head before them, which is `width` columns wide."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(expand=True)
    grid.add_column(width=width or len(head), no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(Text(head.rstrip(), style="dim" if width else ""), words)
    return grid


def _table(table: Table) -> "RenderableType":
    """Return a table that is as wide as its texts; in a narrower terminal rich wraps its widest columns."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

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


def _lines(block: list[str]) -> "Iterable[RenderableType]":
    """Yield lines that wrap below their own text; the first is the block's title, if others are indented."""
    from rich.text import Text

    for i, line in enumerate(block):
        is_title = i == 0 and len(block) > 1 and block[1].startswith(" ")
        match = _HEAD_OF_LINE.match(line)
        head = match[0] if match is not None else ""
        text = Text(line[len(head) :], style="bold" if is_title else "")
        yield hanging(head, text) if head else text
