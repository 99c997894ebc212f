"""Numbers as text for readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE = "\N{EN DASH}"


def short(value: float | None, digits: int = 4) -> str:
    """Write so many significant digits, without an exponent unless the number needs one: ``0.004``, ``17,456``."""
    if value is None:
        return NONE
    if value != 0 and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{max(1, digits - 2)}g}"
    text = f"{value:.{digits}g}"
    if "e" in text or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{float(text):,.{digits}g}" if abs(value) >= 1000 else text


def megabytes(nbytes: float) -> str:
    """Write in units of 10**6 bytes, for tables of MB."""
    return f"{nbytes / 1e6:,.3f}" if nbytes < 1e9 else f"{nbytes / 1e6:,.0f}"


@dataclass(frozen=True)
class SizeUnit:
    """A unit in which a table counts."""

    name: str
    nbytes: float

    def cell(self, nbytes: float) -> str:
        """Write bytes in this unit, to 3 digits or more."""
        value = nbytes / self.nbytes
        digits = 3 if abs(value) < 0.995 else 2 if abs(value) < 99.95 else 1
        return f"{value:,.{digits}f}"


_UNITS = (SizeUnit("GB", 1e9), SizeUnit("MB", 1e6), SizeUnit("kB", 1e3))


def unit_for(nbytes: float) -> SizeUnit:
    """Choose the largest unit in which so many bytes are 1 or more."""
    return next((unit for unit in _UNITS if nbytes >= unit.nbytes), _UNITS[-1])


def size(nbytes: float) -> str:
    """Write bytes with a fitting unit: ``496 MB``, ``1.38 GB``."""
    if nbytes < _UNITS[-1].nbytes:
        return f"{nbytes:.0f} bytes"
    unit = unit_for(nbytes)
    value = nbytes / unit.nbytes
    return f"{value:,.3g} {unit.name}" if value < 1000 else f"{value:,.0f} {unit.name}"


def count(number: int, thing: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{number:,} {thing if number == 1 else thing + 's'}"


def row(name: str, cells: Sequence[str]) -> str:
    """A line of a table in a terminal."""
    return f"  {name:<28}" + "".join(f"{cell:>12}" for cell in cells)
