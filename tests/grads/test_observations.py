"""What ranks have seen, merged in one vector: `agree` makes of it what it makes of every rank's own report."""

from __future__ import annotations

import random

import pytest
import torch
from zero_optim.grads import readiness
from zero_optim.grads.readiness import ByCounts, Observation

COUNT = 7


def _merged(reports: list[Observation]) -> list[Observation]:
    vectors = [readiness._vector(own, COUNT, orders=rank == 0) for rank, own in enumerate(reports)]
    return readiness._reports(torch.stack(vectors).amax(0), COUNT)


def _agreed(reports: list[Observation], *, learns_order: bool) -> tuple:
    counts = ByCounts(True, lambda indices: False)
    if not learns_order:
        counts.agree([Observation((0,), {0: 1}, False)], range(COUNT))
        counts.forget(order=False)
    return counts.agree(reports, list(range(COUNT))), counts.learned, {i: n for i, n in counts._counts.items() if n > 1}


def _random_report(draw: random.Random) -> Observation:
    """Some parameters came, some of them twice; a backward that was cut short may have left no counts."""
    order = [index for index in range(COUNT) for _ in range(draw.choice((0, 1, 1, 2)))]
    draw.shuffle(order)
    cut_short = draw.random() < 0.2
    if draw.random() < 0.2:
        order = []
    counts = {} if cut_short and draw.random() < 0.5 else {index: order.count(index) for index in order}
    return Observation(tuple(order), counts, cut_short)


@pytest.mark.parametrize("learns_order", [True, False])
def test_the_ranks_agree_as_if_each_had_all_reports(learns_order):
    for seed in range(200):
        draw = random.Random(seed)
        reports = [_random_report(draw) for _ in range(draw.choice((1, 2, 5)))]
        expected = _agreed(reports, learns_order=learns_order)
        assert _agreed(_merged(reports), learns_order=learns_order) == expected, f"seed {seed}"


def test_the_last_time_that_a_gradient_came_is_its_place():
    """Rank 0's order counts alone; of rank 1 remains that 3 came, and how often 0 did."""
    first, second = _merged(
        [Observation((2, 1, 2, 0), {0: 1, 1: 1, 2: 2}, False), Observation((3, 0, 0), {0: 2}, True)]
    )
    counts = {0: 2, 1: 1, 2: 2, 3: 1}
    assert first == Observation((1, 2, 0), counts, True)
    assert second == Observation((0, 1, 2, 3), counts, True)
