"""Tables of tests of which ``make test`` runs a part, and ``make test-all`` every cell.

What two settings do to each other shows in any cell in which the two meet. So the cells that ``make test`` runs have
every pair of values, and the others are marked ``slow``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

slow = pytest.mark.slow


def slow_where(condition: Callable[[Any], bool], cells: Iterable[Any]) -> list[Any]:
    """Every cell, for ``parametrize``; those that meet the condition are slow. A tuple is a cell of several values."""
    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=slow if condition(cell) else ())
        for cell in cells
    ]


def slow_after(first: int, cells: Iterable[Any]) -> list[Any]:
    """Every cell; those behind the first ``first`` are slow: they differ in what no fault depends on."""
    cells = list(cells)
    return slow_where(lambda cell: cell not in cells[:first], cells)


def pairs(*axes: Sequence[Any]) -> list[Any]:
    """Every cell of the table of these axes, in order, for ``pytest.mark.parametrize``."""
    return pairs_of(itertools.product(*axes))


def pairs_of(cells: Iterable[tuple[Any, ...]]) -> list[Any]:
    """As ``pairs``, of a table in which not every cell makes sense."""
    cells = list(cells)
    needed = covering(cells)
    return slow_where(lambda cell: cell not in needed, cells)


def halves_of(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Every cell of two axes, every second one slow: each value of either axis stays."""
    return slow_where(
        lambda cell: (first.index(cell[0]) + second.index(cell[1])) % 2 == 1, itertools.product(first, second)
    )


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


def halves(kinds: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Each kind with each half of a list of cells, 0 or 1: in turns one of the two is slow. So a cell of the list meets
    every other kind, and its neighbour, which differs in one thing, the others."""
    cells = [(*kind, half) for kind in kinds for half in (0, 1)]
    other = {(*kind, 1 - turn % 2) for turn, kind in enumerate(kinds)}
    return slow_where(other.__contains__, cells)
