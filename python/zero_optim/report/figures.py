"""Numbers as a reader wants them."""

from __future__ import annotations

from datetime import timedelta

MINUS = "\N{MINUS SIGN}"
NONE = "\N{EN DASH}"


def short(value: float | None, digits: int = 4) -> str:
    """With so many significant digits and no exponent where it can be read without one: ``0.004``, ``17,456``."""
    if value is None:
        return NONE
    if value != 0 and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{max(1, digits - 2)}g}"
    text = f"{value:.{digits}g}"
    if "e" in text or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{float(text):,.{digits}g}" if abs(value) >= 1000 else text


def megabytes(nbytes: float) -> str:
    """In units of 10**6 bytes, as ``zero-optim train`` prints."""
    return f"{nbytes / 1e6:,.3f}" if nbytes < 1e9 else f"{nbytes / 1e6:,.0f}"


def size(nbytes: float) -> str:
    """``496 MB``, ``1.38 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}" if nbytes < 1000 * scale else f"{nbytes / scale:,.0f} {unit}"
    return f"{nbytes:,.0f} bytes"


def percent(share: float) -> str:
    """A change, signed: ``+0.12 %``."""
    return f"{100 * share:+.2f}\N{NO-BREAK SPACE}%".replace("-", MINUS)


def duration(seconds: float) -> str:
    """``39.6 s``, ``2 min 44 s``, ``3 h 05 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    days = timedelta(minutes=minutes).days
    hours = minutes // 60 - 24 * days
    return (f"{days} d " if days else "") + f"{hours} h {minutes % 60:02} min"


def count(number: int, thing: str, plural: str | None = None) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{number:,} {thing if number == 1 else plural or thing + 's'}"
