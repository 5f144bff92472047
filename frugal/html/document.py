"""A page in one file, without a network or other files.

Its Content-Security-Policy forbids every request and every script but the ones written here, which it names by their
SHA-256. So even where a text of a user or a model were taken for a script, nothing would run it.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from frugal.html.elements import Html, element, escaped

LIBRARY = "uPlot 1.6.32"
"""The library that draws charts: https://github.com/leeoniya/uPlot, in `vendor/`."""

_THEME_BUTTON = Html('<button id="theme" type="button" aria-pressed="false">Dark</button>')
"""Light or dark, where the reader wants another than the system's."""


def document(
    title: str,
    body: Html,
    *,
    header: object,
    data: Mapping[str, Any] | None = None,
    scripts: Sequence[str] = (),
    description: str = "",
) -> str:
    """Return an HTML file.

    `header`: one line above all, beside the button that changes light and dark. `data`: values that scripts read with
    `frugal.data(name)`, by name; made JSON here. `scripts`: JavaScript, run in order after the body was read; what
    `assets/charts.js` has is there. `description`: what is shown with a link.
    """
    code = [asset("assets/theme.js")]
    if scripts:
        library = f"/*!\n{LIBRARY}\n\n{asset('vendor/uPlot.LICENSE')}*/\n{asset('vendor/uPlot.iife.min.js')}"
        code += [library, asset("assets/charts.js"), *scripts]
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in code)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    values = [Html(f'<script type="application/json" id="data-{escaped(name)}">{json_in_html(value)}</script>')
              for name, value in (data or {}).items()]  # fmt: skip
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta name="description" content="{escaped(description or title)}">',
            element("title", title),
            f"<style>{asset('vendor/uPlot.min.css')}\n{asset('assets/page.css')}</style>",
            "</head>",
            "<body>",
            element("header", element("span", header), _THEME_BUTTON),
            element("main", body),
            *values,
            *(f"<script>{_unbroken(script)}</script>" for script in code),
            "</body>",
            "</html>\n",
        ]
    )


@cache
def asset(name: str) -> str:
    """Return the text of a file of this package: our style sheet and scripts, or the drawing library's."""
    return (files("frugal.html") / name).read_text(encoding="utf-8")


def json_in_html(value: Any) -> str:
    """Return a value as JSON for a `<script>`: nothing in it ends the element or begins a comment."""
    import msgspec

    return msgspec.json.encode(value).decode().replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _unbroken(script: str) -> str:
    assert "</script" not in script.lower() and "<!--" not in script, "a script that would end its own element"
    assert "\r" not in script, "line ends that HTML changes, and with them the SHA-256"
    return script
