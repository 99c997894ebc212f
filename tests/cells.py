"""Tables of tests of which ``make test`` runs a part, and ``make test-all`` every cell.

What two settings do to each other shows in any cell in which the two meet. So the cells that ``make test`` runs have
every pair of values, and the others are marked ``slow``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

slow = pytest.mark.slow


def pairs(*axes: Sequence[Any]) -> list[Any]:
    """Every cell of the table of these axes, in order, for ``pytest.mark.parametrize``."""
    return pairs_of(itertools.product(*axes))


def pairs_of(cells: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As ``pairs``, of a table in which not every cell makes sense."""
    cells = list(cells)
    needed = covering(cells)
    return [pytest.param(*cell, marks=() if cell in needed else slow) for cell in cells]


def covering(cells: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Few of the cells, which have every pair of values that all cells have; of one axis, all of them.

    Greedy: next comes the cell with most pairs that are not there yet, the first of equals.
    """
    met = {cell: set(itertools.combinations(enumerate(cell), min(2, len(cell)))) for cell in cells}
    missing = set().union(*met.values())
    found = []
    while missing:
        best = max(met, key=lambda cell: len(met[cell] & missing))
        missing -= met[best]
        found.append(best)
    return found


def after(first: int, cells: Sequence[Any]) -> list[Any]:
    """All of the cells, of which those behind the first ``first`` are slow: they differ in what no fault depends on."""
    return [cell if i < first else pytest.param(cell, marks=slow) for i, cell in enumerate(cells)]


def halves(kinds: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Each kind with each half of a list of cells, 0 or 1: in turns one of the two is slow. So a cell of the list meets
    every other kind, and its neighbour, which differs in one thing, the others."""
    marked = [(kind, turn, half) for turn, kind in enumerate(kinds) for half in (0, 1)]
    return [pytest.param(*kind, half, marks=slow if (turn + half) % 2 else ()) for kind, turn, half in marked]
