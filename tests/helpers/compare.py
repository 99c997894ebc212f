"""Where two results first differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def first_difference(want: Any, have: Any, of_leaves: Callable[[Any, Any], str | None]) -> str | None:
    """In words, by dicts and lists down to what ``of_leaves`` compares; None: all is as it should be."""
    if isinstance(want, dict) and isinstance(have, dict) and want.keys() == have.keys():
        pairs = [(key, want[key], have[key]) for key in want]
    elif isinstance(want, list) and isinstance(have, list) and len(want) == len(have):
        pairs = [(index, w, h) for index, (w, h) in enumerate(zip(want, have, strict=True))]
    else:
        return of_leaves(want, have)
    found = ((key, first_difference(w, h, of_leaves)) for key, w, h in pairs)
    return next((f"[{key}] {text}" for key, text in found if text), None)


def same(a: Any, b: Any) -> bool:
    """Equal in type and bits, all the way down."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        flat = [one.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for one in (a, b)]
        return torch.equal(flat[0].view(torch.uint8), flat[1].view(torch.uint8))
    if type(a) is not type(b):
        return False
    if hasattr(a, "tobytes"):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or repr(a) == repr(b) == "nan"


def bits(want: Any, have: Any) -> str | None:
    """Of leaves: they are the ``same``."""
    if same(want, have):
        return None
    if not (isinstance(want, Tensor) and isinstance(have, Tensor)):
        return f"{short(have)} where {short(want)} is right"
    if want.dtype != have.dtype or want.shape != have.shape:
        return f"{have.dtype} {tuple(have.shape)} where {want.dtype} {tuple(want.shape)} is right"
    a, b = want.flatten(), have.flatten()
    where = int((a != b).nonzero().flatten()[0]) if bool((a != b).any()) else 0  # else a zero has another sign
    return f"[{where}]: {b[where].item()!r} where {a[where].item()!r} is right"


def short(value: Any) -> str:
    if isinstance(value, dict):
        return f"the keys {sorted(value, key=str)}"
    text = f"plain values ({value.size})" if hasattr(value, "dtype") and hasattr(value, "size") else repr(value)
    return text if len(text) < 100 else text[:100] + " ..."
