"""HTML from small parts. Text is escaped unless a tag made it, so that no file's content can become markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Html(str):
    """Markup, to be used as it is."""

    __slots__ = ()


Child = str | int | Html | None
_VOID = ("meta", "br", "img")


def tag(name: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """Make a tag: ``tag("td", "a < b", class_="name")``. Attributes that are None or False are left out; True has no
    value. In names a trailing underscore is dropped, and others become hyphens: ``class_``, ``aria_label``."""
    return Html(f"<{name}{_attributes(attributes)}>" + ("" if name in _VOID else f"{join(children)}</{name}>"))


def join(parts: Iterable[Child]) -> Html:
    """Join parts, escaping all that are not Html."""
    return Html("".join(part if isinstance(part, Html) else escape(str(part)) for part in parts if part is not None))


def _attributes(attributes: dict[str, str | int | float | bool | None]) -> str:
    found = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        found.append(f" {name}" if value is True else f' {name}="{escape(str(value))}"')
    return "".join(found)


def table(headings: Iterable[Child], rows: Iterable[Iterable[Child]], caption: str, **attributes: str) -> Html:
    """Make a table whose first column names the rows. A wide table scrolls in a box of its own, by keyboard too."""
    head = tag("tr", *(tag("th", heading, scope="col") for heading in headings))
    body = (tag("tr", *_cells(row)) for row in rows)
    whole = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body), **attributes)
    return tag("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _cells(row: Iterable[Child]) -> Iterable[Html]:
    for column, cell in enumerate(row):
        yield tag("td", cell) if column else tag("th", cell, scope="row")


def details(summary: str, *children: Child) -> Html:
    return tag("details", tag("summary", summary), *children)
