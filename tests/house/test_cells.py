"""Tables of which ``make test`` runs a part."""

from __future__ import annotations

import itertools

from cells import covering, halves, pairs, slow_after

AXES = (range(4), "abc", (True, False), (None, 1))


def test_every_pair_of_values_is_covered_by_few_cells() -> None:
    cells = list(itertools.product(*AXES))
    found = covering(cells)
    assert set(found) <= set(cells) and len(found) <= 14 < len(cells)
    for (i, of_i), (j, of_j) in itertools.combinations(enumerate(AXES), 2):
        assert {(cell[i], cell[j]) for cell in found} == set(itertools.product(of_i, of_j))


def test_all_cells_are_there_and_the_others_are_slow() -> None:
    made = pairs(*AXES)
    assert [parameters.values for parameters in made] == list(itertools.product(*AXES))
    quick = [parameters.values for parameters in made if not parameters.marks]
    assert quick == sorted(covering(itertools.product(*AXES)), key=list(itertools.product(*AXES)).index)


def test_no_cell_of_one_or_of_two_axes_is_left_out() -> None:
    assert not any(parameters.marks for axes in (AXES[:1], AXES[:2]) for parameters in pairs(*axes))


def test_after_the_first() -> None:
    made = slow_after(2, ["a", ("b", 1), "c"])
    assert [parameters.values for parameters in made] == [("a",), ("b", 1), ("c",)]
    assert [[mark.name for mark in parameters.marks] for parameters in made] == [[], [], ["slow"]]


def test_every_kind_has_both_halves_and_one_of_them_is_slow() -> None:
    made = halves([("a", 1), ("b", 2)])
    assert [parameters.values for parameters in made] == [("a", 1, 0), ("a", 1, 1), ("b", 2, 0), ("b", 2, 1)]
    assert [parameters.values for parameters in made if not parameters.marks] == [("a", 1, 0), ("b", 2, 1)]
