"""Reports as people see them: drawn to the width of a terminal, plain and the same everywhere else.

rich is imported only where there is a terminal, so that a plan from the cache stays fast in a pipe. It leaves colours
out where NO_COLOR says so or the terminal has none; nothing is told by colour alone.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from frugal.planning.report import Block, as_text
from frugal.planning.table import Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.status import Status

WIDEST = 120
"""Columns that a report takes at most: longer lines are hard to read."""

NARROWEST = 20
"""Columns that the last column of a table has at least."""

_HEAD_OF_LINE = re.compile(r"\s*(\S+\s{2,})?")
"""What stands before the text of a line: its indent, or a name and the spaces behind it."""


def is_terminal() -> bool:
    """Whether somebody looks at what is printed."""
    return sys.stdout.isatty()


class WaitingLine:
    """The line that says what is waited for; nothing in a pipe or a log."""

    def __init__(self, status: "Status | None") -> None:
        self._status = status

    def says(self, what: str) -> None:
        """Something else is waited for."""
        if self._status is not None:
            self._status.update(what)

    @contextmanager
    def gone(self) -> Iterator[None]:
        """No such line inside the `with` block, which prints."""
        if self._status is None:
            yield
            return
        self._status.stop()
        yield
        self._status.start()


@contextmanager
def waiting(what: str) -> Iterator[WaitingLine]:
    """Show people that something is going on."""
    if not sys.stderr.isatty():
        yield WaitingLine(None)
        return
    from rich.console import Console  # takes a tenth of a second

    with Console(stderr=True).status(what) as status:
        yield WaitingLine(status)


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
        for part in [_table(block, console.width)] if isinstance(block, Table) else _lines(block):
            console.print(part)


def drawing() -> "Console":
    """The terminal, no wider than is read well."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDEST)
    return console


def _table(table: Table, width: int) -> "RenderableType":
    """A table whose last column takes what the others leave; if that is too little, the widest of them wraps, too."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=None, show_header=table.has_head, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    head = table.rows[0] if table.has_head else ("",) * len(table.rows[0])
    widths = [max(len(row[i]) for row in table.rows) for i in range(len(head) - 1)]
    lacking = NARROWEST - (width - sum(widths) - 2 * (len(head) + 1))
    widest = max(widths, default=0)
    for name, wanted in zip(head, widths, strict=False):
        wraps = lacking > 0 and wanted == widest
        grid.add_column(Text(name), justify="right", no_wrap=not wraps, max_width=wanted - lacking if wraps else None)
    grid.add_column(Text(head[-1]), ratio=1, overflow="fold")
    for row in table.rows[1:] if table.has_head else table.rows:
        grid.add_row(*map(Text, row))
    parts: list[RenderableType] = [Text(table.title, style="bold"), Padding(grid, (0, 0, 0, 2))]
    if table.note:
        parts.append(Padding(Text(table.note, style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _lines(block: list[str]) -> "Iterable[RenderableType]":
    """Lines that continue below their own text; the first is the block's title, where others are indented."""
    from rich.padding import Padding
    from rich.table import Table as Grid
    from rich.text import Text

    for i, line in enumerate(block):
        is_title = i == 0 and len(block) > 1 and block[1].startswith(" ")
        match = _HEAD_OF_LINE.match(line)
        head = match[0] if match is not None else ""
        if not head:
            yield Padding(Text(line, style="bold" if is_title else ""), 0)
            continue
        grid = Grid.grid(expand=True)
        grid.add_column(width=len(head), no_wrap=True)
        grid.add_column(ratio=1, overflow="fold")
        grid.add_row(Text(head.rstrip()), Text(line[len(head) :]))
        yield grid
