"""Which tests ``make test`` leaves out."""

from __future__ import annotations

import itertools

from slow import Only, every, none, not_there, pairs

AXES = (range(4), range(3), range(2), range(2))
TABLE = {str(cell): cell for cell in itertools.product(*AXES)}


def test_few_cells_have_every_pair_of_values() -> None:
    found = [TABLE[name] for name in pairs(TABLE)]
    assert len(found) <= 14 < len(TABLE)
    for (i, of_i), (j, of_j) in itertools.combinations(enumerate(AXES), 2):
        assert {(cell[i], cell[j]) for cell in found} == set(itertools.product(of_i, of_j))


def test_all_cells_of_one_or_of_two_settings_have_pairs_of_their_own() -> None:
    for axes in (AXES[:1], AXES[:2]):
        table = {str(cell): cell for cell in itertools.product(*axes)}
        assert sorted(pairs(table)) == sorted(table)


def test_choices() -> None:
    table = {name: (i,) for i, name in enumerate("abcde")}
    assert every(2)(table) == ["a", "c", "e"] and every(2, first=1)(table) == ["b", "d"]
    assert [*Only("b", "e")(table)] == ["b", "e"] and none("another")(table) == []


def test_a_name_that_no_test_has_is_found() -> None:
    stays = {"a.py::test_x": Only("1", "3"), "a.py::test_gone": none("another"), "b.py::test_y": none("another")}
    assert not_there({"a.py::test_x": ["1", "2"]}, stays) == ["a.py::test_gone", "a.py::test_x[3]"]
    assert not_there({"a.py::test_x": ["1", "3"], "a.py::test_gone": [""]}, stays) == []
