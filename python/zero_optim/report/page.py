"""The frame of a page: one file with its style and script within, which may fetch nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from .html import Html, join, tag

DATA_ID = "data"


def page(title: str, body: Html, data: Any) -> str:
    """A whole HTML document. ``data``: JSON for the script, which readers may take out too."""
    style, script = (files(__package__).joinpath(name).read_text() for name in ("style.css", "script.js"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(style)),
    )
    toggle = tag("button", "Dark", id="theme", type="button", hidden=True)
    whole = tag("body", toggle, tag("main", body), _block(data), tag("script", Html(script)))
    return "<!doctype html>\n" + tag("html", head, whole, lang="en") + "\n"


def _policy(script: str) -> str:
    """Nothing may be loaded from anywhere, and no script may run but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"


def _block(data: Any) -> Html:
    """JSON in which no ``</script>`` can be, whatever a file's name was."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return tag("script", Html(text), type="application/json", id=DATA_ID)


def footer(*parts: str) -> Html:
    return tag("footer", join(tag("p", part) for part in parts))
