"""Files that pages are made of: our style sheet and scripts, and the drawing library with its licence."""

from functools import cache
from importlib.resources import files

LIBRARY = "uPlot 1.6.32"
"""The library that draws charts: https://github.com/leeoniya/uPlot, in `vendor/`."""


@cache
def asset(name: str) -> str:
    """Return the text of `assets/name`."""
    return (files("frugal.html") / "assets" / name).read_text(encoding="utf-8")


@cache
def drawing_library() -> str:
    """Return the drawing library as a script, under its licence."""
    return f"/*!\n{LIBRARY}\n\n{_vendored('uPlot.LICENSE')}*/\n{_vendored('uPlot.iife.min.js')}"


@cache
def styles() -> str:
    """Return the style sheets of the drawing library and of all pages."""
    return f"{_vendored('uPlot.min.css')}\n{asset('page.css')}"


def _vendored(name: str) -> str:
    return (files("frugal.html") / "vendor" / name).read_text(encoding="utf-8")
