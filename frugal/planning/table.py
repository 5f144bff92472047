"""Rows of text: aligned by spaces in a pipe, drawn to the width of a terminal by the command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

NARROW, WIDE = 80, 100
"""Columns of plain text that a table may take."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of equally many texts under a title; the last column is the one that may be long. `has_head`: the first row
    names the columns. `note` stands below. `width`: as plain text no line is longer than so many columns."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    has_head: bool = False
    width: int | None = None

    @property
    def lines(self) -> list[str]:
        """As plain text."""
        if self.width is None:
            return [self.title, *aligned(self.rows), *([f"  {self.note}"] if self.note else [])]
        before = sum(2 + max(map(len, column)) for column in list(zip(*self.rows, strict=True))[:-1])
        rows = [
            (*(row[:-1] if not number else [""] * (len(row) - 1)), line)
            for row in self.rows
            for number, line in enumerate(wrap(row[-1], self.width - before - 2, subsequent_indent="  ") or [""])
        ]
        return [self.title, *aligned(rows), *wrap(self.note, self.width, initial_indent="  ", subsequent_indent="  ")]


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as indented lines; all columns but the last are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  " + "  ".join([*(f"{text:>{width}}" for text, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
