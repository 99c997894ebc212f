"""``bench_endurance.py``: what is counted, the slopes, and a run of a few steps."""

from __future__ import annotations

import bench_endurance
import torch
from bench_endurance import CONTENDERS, census, make_row, slope

COUNTERS = ("resident", "objects", "tensors", "nodes", "hooks", "files", "threads", "ms")


def test_a_slope_leaves_odd_samples_alone():
    steps = list(range(0, 1000, 100))
    assert slope(steps, [3 * step + 7 for step in steps]) == 3
    assert slope(steps, [5.0] * 4 + [900.0] + [5.0] * 5) == 0
    assert slope([100], [5]) == 0


def test_the_growth_is_that_of_the_second_half_of_the_rank_that_has_most():
    one = {"step": [1, 2, 3, 4, 5, 6], "objects": [0, 10, 20, 20, 22, 24]}
    other = {"step": [1, 2, 3, 4, 5, 6], "objects": [3, 9, 20, 20, 20, 20]}
    row = make_row("stage2", 6, [one, other])
    assert row["samples"] == {"step": one["step"], "objects": [3, 10, 20, 20, 22, 24]}
    assert row["growth"] == {"objects": 2} and (row["ranks"], row["steps"], row["numel"]) == (2, 6, 8448)


class LeavesGarbage:
    """A cycle whose collection leaves another, ``depth`` times, each with a tensor."""

    def __init__(self, depth: int) -> None:
        self.itself, self.depth, self.tensor = self, depth, torch.ones(1)

    def __del__(self) -> None:
        if self.depth:
            LeavesGarbage(self.depth - 1)


def test_garbage_that_leaves_garbage_is_not_counted():
    before = census()
    LeavesGarbage(depth=3)
    assert census()["tensors"] == before["tensors"]


def test_a_tensor_that_is_kept_shows_in_memory():
    before = census()
    kept = torch.ones(2**24)  # over 32 MiB glibc asks the system for it, and takes nothing that was freed before
    after = census()
    assert after["tensors"] - before["tensors"] == 1
    assert after["resident"] - before["resident"] >= 0.9 * kept.nbytes


def test_a_run(ran, monkeypatch):
    """In processes of its own, as each keeps to one core."""
    monkeypatch.setattr(bench_endurance, "SAMPLES", 3)
    outcome, rows = ran(bench_endurance.main, "--steps", "6")
    assert [(row["ranks"], row["backend"]) for row in rows] == [(n, name) for n in CONTENDERS for name in CONTENDERS[n]]
    for row in rows:
        assert tuple(row["growth"]) == COUNTERS and tuple(row["samples"]) == ("step", *COUNTERS)
        assert row["samples"]["step"] == [2, 4, 6] and row["samples"]["files"][-1] > 0
        assert {len(figures) for figures in row["samples"].values()} == {3}
    assert "growth resident" in outcome.out
