"""Rows of text: aligned by spaces in a pipe, drawn to the width of a terminal by the command line."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of equally many texts under a title; the last column is the one that may be long. `has_head`: the first row
    names the columns. `note` stands below."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    has_head: bool = False

    @property
    def lines(self) -> list[str]:
        """As plain text."""
        return [self.title, *aligned(self.rows), *([f"  {self.note}"] if self.note else [])]


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, indented; all columns but the last aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(f"{text:>{width}}" for text, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
