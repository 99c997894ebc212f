"""Free space in a file, against a map of every byte's owner."""

from __future__ import annotations

import random

import pytest
from zero_optim.stores.extents import Extent, FreeSpace, aligned
from zero_optim.stores.host_memory import ALIGNMENT


@pytest.mark.parametrize(
    ("nbytes", "space"), [(0, 4096), (1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (2**40, 2**40)]
)
def test_what_a_page_takes(nbytes, space):
    assert aligned(nbytes) == space
    assert Extent(0, nbytes).space == space


def _first_free(owners: list[int | None], length: int) -> int | None:
    for start in range(len(owners) - length + 1):
        if all(owner is None for owner in owners[start : start + length]):
            return start
    return None


@pytest.mark.parametrize("seed", range(5))
def test_random_programs_take_the_first_run_that_fits(seed):
    """Units of one: the map has an entry a byte. The file grows when nothing fits, and by no more than is missing."""
    generator = random.Random(seed)
    space, owners, taken = FreeSpace(), [], {}
    for number in range(400):
        if taken and generator.random() < 0.45:
            offset, length = taken.pop(generator.choice(list(taken)))
            space.give_back(offset, length)
            owners[offset : offset + length] = [None] * length
            continue
        length = generator.randint(1, 12)
        expected = _first_free(owners, length)
        tail = next((at for at, owner in enumerate(reversed(owners)) if owner is not None), len(owners))
        assert space.shortage(length) == (0 if expected is not None else length - tail)
        if space.shortage(length):
            owners += [None] * space.shortage(length)
            space.grow(space.shortage(length))
        offset = space.take(length)
        assert offset == _first_free(owners, length)
        owners[offset : offset + length] = [number] * length
        taken[number] = (offset, length)
        assert space.end == len(owners)


def test_the_file_has_to_grow_before():
    with pytest.raises(ValueError, match="free run"):
        FreeSpace().take(ALIGNMENT)
