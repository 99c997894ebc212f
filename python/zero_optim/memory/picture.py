"""Plans as a picture: for each stage the bars of what a rank holds. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..drawing.figures import unit_for
from ..drawing.plot import png
from ..drawing.sheet import Bar, Bars, Role, Sheet
from .plan import Plan
from .table import kinds_of

_IN_SIGHT = 1.06  # of what a rank takes: a larger memory would press the bars to the left


def draw(path: Path, plans: Sequence[Plan], device_memory: int) -> None:
    """Write a PNG: what a rank holds on its device, by kind, and the device's memory as a line where it is in sight.

    Stages differ by factors of tens, so each has an axis of its own. Two stand beside each other.

    Raises OSError where it cannot be written, ValueError for a name that ends as no picture does.
    """
    panels = [_bars(made, device_memory) for made in plans]
    grid: list[list[Bars | None]] = [[*panels[first : first + 2]] for first in range(0, len(panels), 2)]
    grid[-1] += [None] * (len(grid[0]) - len(grid[-1]))
    first = plans[0]
    title = f"{first.model.numel / 1e9:,.3g} B parameters, {first.job.world:,} ranks: memory of a rank"
    note = "Whisker: in the first step." if any(made.first_step for made in plans) else ""
    png(Sheet(grid, note, title), path)


def _bars(made: Plan, device_memory: int) -> Bars:
    """Draw one plan in the unit that suits it."""
    unit = unit_for(made.most)

    def bar(name: str, nbytes: float, most: float, role: Role) -> Bar:
        value = nbytes / unit.nbytes
        return Bar(name, value, (value, most / unit.nbytes), [unit.cell(nbytes)], role)

    kinds = [(kind, made.memory.get(kind, 0)) for kind in kinds_of([made])]
    bars = [bar(kind, nbytes, nbytes, Role.OTHER) for kind, nbytes in kinds if nbytes]
    bars.append(bar("on the device", made.total, made.most, Role.OURS))
    seen = device_memory < _IN_SIGHT * made.most
    roof = ("the device:", device_memory / unit.nbytes) if seen else None
    return Bars(f"Stage {made.job.stage}", unit.name, bars, [unit.name], roof)
