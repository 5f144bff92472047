"""A plan's verdict on a terminal: its rows, and a bar of the memory."""

from typing import TYPE_CHECKING

import click

from frugal.cli.display.terminal import drawing, hanging, is_terminal
from frugal.planning.plan import NAME_WIDTH, Plan
from frugal.planning.report import bar

if TYPE_CHECKING:
    from rich.text import Text


def show_verdict(plan: Plan, *, err: bool = False) -> None:
    """Print a plan in short; on a terminal with a bar of the memory."""
    if err or not is_terminal():
        click.echo(plan, err=err)
        return
    from rich.text import Text

    console = drawing()
    for note in plan.warnings:
        show_row("note", note)
    if plan.warnings:
        console.print()
    console.print(Text(plan.arithmetic, style="bold"))
    for name, words in plan.verdict:
        show_row(name, words)
        if name == "fits":
            console.print(hanging("", _bar(plan, console.width - NAME_WIDTH), NAME_WIDTH))


def show_row(name: str, words: str, *, err: bool = False) -> None:
    """Print one row of a verdict."""
    if err or not is_terminal():
        click.echo(f"{name:<{NAME_WIDTH - 1}} {words}", err=err)
        return
    from rich.text import Text

    drawing().print(hanging(name, Text(words), max(NAME_WIDTH, len(name) + 1)))


def fits_a_line(words: str) -> bool:
    """Return True if a row of these words is one line, as every row is without a terminal."""
    return not is_terminal() or NAME_WIDTH + len(words) <= drawing().width


def _bar(plan: Plan, width: int) -> "Text":
    """Return the memory of the device in one line: letters on colours, with the names of parts that have the room."""
    from rich.text import Text

    parts = bar(plan.memory, plan.device_bytes, width)
    return Text.assemble(*((part.named(share), part.style) for part, share in parts))
