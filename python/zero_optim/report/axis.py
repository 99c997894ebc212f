"""Axes: where they begin and end, where their ticks are, and what these say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .figures import MINUS
from .html import Html, join, tag

_TALL = 4.0  # A peak so many times above nearly all values would press them to the floor.
_NEARLY_ALL = 0.95
_MOST_TICKS = 6


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high``; ``base`` of the logarithm, 0 for a linear one. ``beyond``: values above ``high``."""

    low: float
    high: float
    base: int = 0
    beyond: int = 0

    def place(self, value: float) -> float:
        """0 at ``low``, 1 at ``high``; what is beyond an end is at that end."""
        low, high, here = (self._scaled(x) for x in (self.low, self.high, max(value, self.low)))
        return min(1.0, max(0.0, (here - low) / (high - low)))

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.base else value

    def ticks(self) -> list[float]:
        if self.base:
            return self._powers()
        step = _nice_step((self.high - self.low) / (_MOST_TICKS - 2))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [round(number * step, 12) for number in range(first, last + 1)]

    def _powers(self) -> list[float]:
        first = math.ceil(math.log(self.low, self.base) - 1e-9)
        last = math.floor(math.log(self.high, self.base) + 1e-9)
        stride = max(1, math.ceil((last - first + 1) / _MOST_TICKS))
        return [float(self.base) ** power for power in range(first, last + 1, stride)]

    def label(self, tick: float) -> Html:
        if self.base == 2 and tick >= 1024:
            return join(["2", tag("sup", str(round(math.log2(tick))))])
        return join([_tick_text(tick, self.high)])


def _tick_text(tick: float, largest: float) -> str:
    """All of an axis in one unit."""
    scale, unit = next(((s, u) for s, u in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * s), (1.0, ""))
    return f"{round(tick / scale, 12):,.6g}{unit if tick else ''}".replace("-", MINUS)


def _nice_step(at_least: float) -> float:
    """1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= at_least * (1 - 1e-9))


def linear(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """Of values, which may be none. A rare peak far above all others is left out, and counted in ``beyond``."""
    if not values:
        return Axis(0.0, 1.0)
    ordered = sorted(values)
    usual = ordered[int(_NEARLY_ALL * (len(ordered) - 1))]
    low = min(0.0, ordered[0]) if from_zero else ordered[0]
    high = ordered[-1]
    if high - low > _TALL * (usual - low) > 0:
        high = low + 2 * (usual - low)
    margin = 0.05 * (high - low) or abs(high) or 1.0
    top = high + margin
    return Axis(low if from_zero and low == 0 else low - margin, top, beyond=sum(value > top for value in ordered))


def logarithmic(values: Sequence[float], base: int = 10) -> Axis:
    """Of positive values, which may be none, with whole powers of ``base`` at its ends.

    Powers of 2, such as loss scales, would lie on the very ends: there is one more at either.
    """
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    if base == 2:
        first, last = first - 1, last + 1
    return Axis(float(base) ** first, float(base) ** max(last, first + 1), base)


def of_steps(first: float, last: float) -> Axis:
    """One step alone stands in the middle."""
    return Axis(first, last) if last > first else Axis(first - 1, last + 1)
