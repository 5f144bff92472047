"""A page in one file, without a network or other files.

Its Content-Security-Policy forbids every request and every script but the ones written here, which it names by their
SHA-256. So even where a text of a user or a model were taken for a script, nothing would run it.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from frugal.html.assets import asset, drawing_library, styles
from frugal.html.elements import Html, element, escaped

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
    data = data or {}
    code = [asset("theme.js"), drawing_library(), asset("charts.js"), *scripts] if scripts else [asset("theme.js")]
    values = [Html(f'<script type="application/json" id="data-{escaped(name)}">{json_in_html(value)}</script>')
              for name, value in data.items()]  # fmt: skip
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(code)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta name="description" content="{escaped(description or title)}">',
            element("title", title),
            f"<style>{styles()}</style>",
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


def json_in_html(value: Any) -> str:
    """Return a value as JSON for a `<script>`: nothing in it ends the element or begins a comment."""
    import msgspec

    return msgspec.json.encode(value).decode().replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _unbroken(script: str) -> str:
    assert "</script" not in script.lower() and "<!--" not in script, "a script that would end its own element"
    assert "\r" not in script, "line ends that HTML changes, and with them the SHA-256"
    return script
