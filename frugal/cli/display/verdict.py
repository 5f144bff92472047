"""A plan's verdict on a terminal: its rows, and a bar of the memory."""

from typing import TYPE_CHECKING

import click

from frugal.cli.display.terminal import drawing, hanging, is_terminal
from frugal.planning import verdict as verdicts
from frugal.planning.verdict import NAME_WIDTH, PlanVerdict

if TYPE_CHECKING:
    from rich.text import Text


def show_verdict(verdict: PlanVerdict, *, err: bool = False) -> None:
    """Print a verdict; on a terminal with a bar of the memory."""
    if err or not is_terminal():
        click.echo(verdicts.text(verdict), err=err)
        return
    from rich.text import Text

    console = drawing()
    for note in verdict.notes:
        show_row("note", note)
    if verdict.notes:
        console.print()
    console.print(Text(verdict.headline, style="bold"))
    for name, words in verdict.rows:
        show_row(name, words)
        if name == "fits":
            console.print(hanging("", _bar(verdict, console.width - NAME_WIDTH), NAME_WIDTH))


def show_row(name: str, words: str, *, err: bool = False) -> None:
    """Print one row of a verdict."""
    if err or not is_terminal():
        click.echo(f"{name:<{NAME_WIDTH}}{words}", err=err)
        return
    from rich.text import Text

    drawing().print(hanging(name, Text(words), NAME_WIDTH))


def fits_a_line(words: str) -> bool:
    """Return True if a row of these words is one line, as every row is without a terminal."""
    return not is_terminal() or NAME_WIDTH + len(words) <= drawing().width


def _bar(verdict: PlanVerdict, width: int) -> "Text":
    """Return the memory of the device in one line: letters on colours, with the names of parts that have the room."""
    from rich.text import Text

    bar = Text()
    for part, share in verdicts.columns(verdict.parts, width):
        words = verdicts.named_inside(part, share)
        bar.append(words, style="dim" if part.is_free else f"{part.ink} on {part.colour}")
    return bar
