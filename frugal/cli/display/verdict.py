"""A plan's verdict on a terminal: its rows, and a bar of what fills the memory."""

from typing import TYPE_CHECKING

import click

from frugal.cli.display.terminal import drawing, is_terminal
from frugal.planning import verdict as verdicts
from frugal.planning.verdict import NAME_WIDTH, PlanVerdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text


def show_verdict(verdict: PlanVerdict, *, err: bool = False) -> None:
    """Print a verdict; on a terminal with a bar of the memory."""
    if err or not is_terminal():
        click.echo(verdicts.text(verdict), err=err)
        return
    from rich.text import Text

    console = drawing()
    for note in verdict.notes:
        console.print(_row("note", Text(note)))
    if verdict.notes:
        console.print()
    console.print(Text(verdict.headline, style="bold"))
    for name, words in verdict.rows:
        show_row(name, words)
        if name == "fits":
            console.print(_row("", _bar(verdict, console.width - NAME_WIDTH)))


def show_row(name: str, words: str, *, err: bool = False) -> None:
    """Print one row of a verdict."""
    if err or not is_terminal():
        click.echo(f"{name:<{NAME_WIDTH}}{words}", err=err)
        return
    from rich.text import Text

    drawing().print(_row(name, Text(words)))


def fits_a_line(words: str) -> bool:
    """Whether a row of these words is one line; where there is no terminal every row is."""
    return not is_terminal() or NAME_WIDTH + len(words) <= drawing().width


def _row(name: str, words: "Text") -> "RenderableType":
    """A name and its words, which continue below themselves."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(expand=True)
    grid.add_column(width=NAME_WIDTH, no_wrap=True)
    grid.add_column(ratio=1, overflow="fold")
    grid.add_row(Text(name, style="dim"), words)
    return grid


def _bar(verdict: PlanVerdict, width: int) -> "Text":
    """The memory of the device in one line: letters on colours, and the names of parts in those that have the room."""
    from rich.text import Text

    bar = Text()
    for part, share in verdicts.columns(verdict.parts, width):
        words = verdicts.named_inside(part, share)
        bar.append(words, style="dim" if part.is_free else f"{part.ink} on {part.colour}")
    return bar
