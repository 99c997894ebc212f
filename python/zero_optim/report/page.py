"""The frame of a page: one file with its style inside. It may fetch nothing, and runs no script."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from .html import Html, join, tag

DATA_ID = "data"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Nothing may be loaded from anywhere, and no script may run."""


def page(title: str, body: Html, data: Any) -> str:
    """Make a whole HTML document. ``data``: embedded as JSON for other programs."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(files(__package__).joinpath("style.css").read_text())),
    )
    whole = tag("body", tag("main", body), _block(data))
    return "<!doctype html>\n" + tag("html", head, whole, lang="en") + "\n"


def _block(data: Any) -> Html:
    """Embed JSON with every ``<`` escaped, so that no text in it can close the script tag."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", id=DATA_ID)


def footer(*parts: str) -> Html:
    return tag("footer", join(tag("p", part) for part in parts))
