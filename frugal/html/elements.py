"""Pieces of HTML. Every text is escaped where it becomes a piece; what is a piece already stays as it is."""

from collections.abc import Sequence
from html import escape


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
