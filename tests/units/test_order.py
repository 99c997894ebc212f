"""One order of units from those that the ranks have seen: every unit is there, directly before those within it."""

from __future__ import annotations

import random

import pytest
from zero_optim.units.cycle import calls_ended, merged, nested


class FakeUnit:
    """A unit as far as an order knows one."""

    def __init__(self, number: int, within: FakeUnit | None) -> None:
        self.number = number
        self.within = within
        self.enclosing: set[FakeUnit] = set() if within is None else {within, *within.enclosing}

    def __repr__(self) -> str:
        return str(self.number)


def _tree(chance: random.Random, count: int) -> list[FakeUnit]:
    """The root first; each other unit within one that is there, in the order in which modules would be listed."""
    units = [FakeUnit(0, None)]
    for number in range(1, count):
        units.append(FakeUnit(number, chance.choice(units)))
    return nested(units)


def _calls(chance: random.Random, units: list[FakeUnit], skip: float, again: float) -> list[FakeUnit]:
    """A forward's calls: those within a unit in any order, some not at all, some twice."""

    def call(unit: FakeUnit) -> list[FakeUnit]:
        inner = [other for other in units if other.within is unit and chance.random() >= skip]
        inner += [other for other in inner if chance.random() < again]
        chance.shuffle(inner)
        return [unit, *(called for other in inner for called in call(other))]

    return call(units[0])


def _assert_nested(order: list[FakeUnit]) -> None:
    for at, unit in enumerate(order):
        if unit.within in order:
            start = max(place for place in range(at) if order[place] is unit.within)
            assert all(unit.within in other.enclosing for other in order[start + 1 : at]), f"{unit} in {order}"


@pytest.mark.parametrize("again", [0.0, 0.4])
@pytest.mark.parametrize("skip", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_a_unit_is_within_comes_directly_before(ranks: int, skip: float, again: float) -> None:
    chance = random.Random(f"{ranks} {skip} {again}")
    for _ in range(200):
        units = _tree(chance, 9)
        known = units
        for _ in range(2):  # an evaluation, and then a forward that trains
            orders = [_calls(chance, units, skip, again) for _ in range(ranks)]
            order = merged(orders, known)
            assert set(order) == set(units)
            _assert_nested(order)
            known = nested(order)
        _assert_nested(merged(orders, calls_ended(known)[::-1]))


def test_the_order_of_rank_0_stays_where_it_has_all_that_any_has() -> None:
    root = FakeUnit(0, None)
    a, b, c = (FakeUnit(number, root) for number in (1, 2, 3))
    assert merged([[root, c, a, c], [root, a]], [root, a, b, c]) == [root, c, a, b, c]
    assert merged([[root, c, c, a], [root, a]], [root, a, b, c]) == [root, c, a, b]


def test_units_of_several_ranks_follow_what_they_followed_there() -> None:
    root = FakeUnit(0, None)
    a, b, c = (FakeUnit(number, root) for number in (1, 2, 3))
    assert merged([[root, c, a], [root, c, b]], [root, a, b, c]) == [root, c, a, b]
