"""Output of commands: reports, verdicts of plans and their drafts, drawn on a terminal, plain text everywhere else.

`frugal.cli.drawing`, and rich with it, is imported only for a terminal, so that a plan from the cache stays fast in a
pipe.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Timer
from typing import Any

import click
import msgspec

from frugal.planning.plan import NAME_WIDTH, UNPROVEN, Plan
from frugal.planning.report import Block, as_text
from frugal.units import format_bytes

PATIENCE = 3.0
"""Seconds until a line says what is being done where no spinner can."""


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
    else:
        from rich.console import Console  # takes a tenth of a second

        with Console(stderr=True).status(what):
            yield


def print_json(content: Any) -> None:
    """Print content for programs, as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(content), indent=2).decode())


def show(blocks: Iterable[Block]) -> None:
    """Print blocks with an empty line between them."""
    blocks = [block for block in blocks if block]
    if not is_terminal():
        click.echo(as_text(blocks))
    else:
        from frugal.cli import drawing

        drawing.draw_blocks(blocks)


def show_verdict(plan: Plan, *, err: bool = False) -> None:
    """Print a plan in short; on a terminal with a bar of the memory."""
    if err or not is_terminal():
        click.echo(plan, err=err)
    else:
        from frugal.cli import drawing

        drawing.draw_verdict(plan)


def show_row(name: str, words: str) -> None:
    """Print one row of a verdict."""
    if not is_terminal():
        click.echo(f"{name:<{NAME_WIDTH - 1}} {words}")
    else:
        from frugal.cli import drawing

        drawing.draw_row(name, words)


def fits_a_line(words: str) -> bool:
    """Return True if a row of these words is one line, as every row is without a terminal."""
    if not is_terminal():
        return True
    from frugal.cli import drawing

    return NAME_WIDTH + len(words) <= drawing.terminal().width


def show_draft(draft: Plan, before: Plan | None) -> None:
    """Print a draft, while its dry run runs; `before` is the one that a dry run refused, if any."""
    if before is not None:
        show_row("draft", "refused, a dry run takes more; the next:")
    show_verdict(replace(draft, warnings=tuple(note for note in draft.warnings if note != UNPROVEN)))


def conclude_draft(plan: Plan, draft: Plan) -> str:
    """Return the proof of the last draft; empty where it is not the plan, which is printed then.

    With short samples dry runs also decide how many of them share a micro-batch: changes of that are printed.
    """
    size, drafted = (format_bytes(each.memory.total_bytes) for each in (plan, draft))
    proof = "by a dry run of DeepSpeed's own code"
    samples, of_draft = (replace(each.batch, shortest=None) for each in (plan, draft))
    if (plan.strategy, samples) != (draft.strategy, of_draft):
        show_row("draft", f"refused, and this is the plan, which takes {size} {proof}:")
        show_verdict(plan)
        return ""
    rows = [row for row in plan.verdict if row[0] != "fits" and row not in draft.verdict]
    for name, words in [*rows, *(("note", note) for note in plan.warnings if note not in draft.warnings)]:
        show_row(name, words)
    return proof if size == drafted else f"{size} {proof}"
