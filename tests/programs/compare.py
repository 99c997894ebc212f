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


def bits(want: Any, have: Any) -> str | None:
    """Of leaves: tensors have the same bits, and everything else is equal."""
    if isinstance(want, Tensor) and isinstance(have, Tensor):
        if want.dtype != have.dtype or want.numel() != have.numel():
            return f"{have.dtype} {have.numel()} where {want.dtype} {want.numel()} is right"
        if not want.numel() or _bytes(want) == _bytes(have):
            return None
        a, b = want.flatten(), have.flatten()
        where = int((a != b).nonzero().flatten()[0]) if bool((a != b).any()) else 0
        return f"[{where}]: {b[where].item()!r} where {a[where].item()!r} is right"
    return None if type(want) is type(have) and want == have else f"{short(have)} where {short(want)} is right"


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def short(value: Any) -> str:
    if isinstance(value, dict):
        return f"the keys {sorted(value, key=str)}"
    text = f"plain values ({value.size})" if hasattr(value, "dtype") and hasattr(value, "size") else repr(value)
    return text if len(text) < 100 else text[:100] + " ..."
