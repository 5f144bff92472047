"""A page in one file, without a network or other files, and the pieces of HTML that it is made of.

Every text is escaped where it becomes a piece; what is a piece already stays as it is.

Its Content-Security-Policy forbids every request and every script but the ones written here, which it names by their
SHA-256. So even where a text of a user or a model were taken for a script, nothing would run it.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

LIBRARY = "uPlot 1.6.32"
"""The library that draws charts: https://github.com/leeoniya/uPlot, in `vendor/`."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def escaped(text: object) -> Html:
    """Escape text for HTML, also between quotes."""
    return text if isinstance(text, Html) else Html(escape(str(text)))


def element(tag: str, *content: object, **attributes: object) -> Html:
    """Return an element.

    An attribute's `_` is written as `-`, as in `aria_label`, and one at its end is left out, as in `class_`. True is an
    attribute without a value; None and False are no attribute.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    written = "".join(
        f" {name}" if value is True else f' {name}="{escaped(value)}"'
        for name, value in named.items()
        if value is not None and value is not False
    )
    return Html(f"<{tag}{written}>{joined(*content)}</{tag}>")


def joined(*content: object) -> Html:
    """Join pieces and texts."""
    return Html("".join(map(escaped, content)))


def table(
    caption: str, columns: Sequence[object], rows: Sequence[Sequence[object]], *, numbers: Sequence[int] = ()
) -> Html:
    """Return a table whose first column names its rows; it scrolls where the page is narrow.

    `numbers`: indices of the columns that are set flush right.
    """

    def kind(index: int) -> str | None:
        return "number" if index in numbers else None

    head = element("tr", *(element("th", name, scope="col", class_=kind(i)) for i, name in enumerate(columns)))
    body = [
        element(
            "tr",
            *(
                element("td" if index else "th", value, scope=None if index else "row", class_=kind(index))
                for index, value in enumerate(row)
            ),
        )
        for row in rows
    ]
    whole = element("table", element("caption", caption), element("thead", head), element("tbody", *body))
    return element("div", whole, class_="scrolls", tabindex=0, role="region", aria_label=caption)


def figure(name: str, heading: str, *, says: str, below: object = "") -> Html:
    """Return a section for a chart that a script draws into the element `name`. `says`: its description for screen
    readers. `below`: its table, or other text."""
    chart = element("div", id=name, class_="chart", role="img", aria_label=says)
    return element("section", element("h2", heading, id=f"{name}-heading"), chart, below,
                   aria_labelledby=f"{name}-heading")  # fmt: skip


def details(summary: str, *content: object) -> Html:
    """Return content that is folded until opened; it is printed, too."""
    return element("details", element("summary", summary), *content)


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
    for script in code:
        assert "</script" not in script.lower() and "<!--" not in script, "a script that would end its own element"
        assert "\r" not in script, "line ends that HTML changes, and with them the SHA-256"
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
            *(f"<script>{script}</script>" for script in code),
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
