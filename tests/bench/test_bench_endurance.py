"""``bench_endurance.py``: what is counted, the slopes, and a run of a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import bench_endurance
import pytest
import torch
from bench_endurance import NUMEL, contenders, make_row, most, slope
from census import take

COUNTERS = ("resident", "objects", "tensors", "nodes", "hooks", "files", "threads", "ms")


def test_a_slope_leaves_odd_samples_alone():
    steps = list(range(0, 1000, 100))
    assert slope(steps, [3 * step + 7 for step in steps]) == 3
    assert slope(steps, [5.0] * 10) == 0
    assert slope(steps, [5.0] * 4 + [900.0] + [5.0] * 5) == 0
    assert slope([100], [5]) == 0


def test_the_growth_is_that_of_the_second_half():
    samples = {"step": [1, 2, 3, 4, 5, 6], "objects": [0, 10, 20, 20, 22, 24], "ms": [9.0, 1.0, 1.0, 1.0, 1.0, 1.0]}
    row = make_row("stage2", 2, 6, samples)
    assert row.growth == {"objects": 2, "ms": 0} and row.samples == samples and (row.ranks, row.steps) == (2, 6)


def test_the_rank_that_has_most_counts_in_each_sample():
    assert most([{"step": [1, 2], "files": [3, 9]}, {"step": [1, 2], "files": [4, 8]}]) == {
        "step": [1, 2],
        "files": [4, 9],
    }


class LeavesGarbage:
    """A cycle whose collection leaves another, ``depth`` times, each with a tensor."""

    def __init__(self, depth: int) -> None:
        self.itself, self.depth, self.tensor = self, depth, torch.ones(1)

    def __del__(self) -> None:
        if self.depth:
            LeavesGarbage(self.depth - 1)


def test_garbage_that_leaves_garbage_is_not_counted():
    before = take()
    LeavesGarbage(depth=3)
    assert take().tensors == before.tensors


def test_a_tensor_that_is_kept_shows_in_memory():
    before = take()
    kept = torch.ones(2**24)  # over 32 MiB glibc asks the system for it, and takes nothing that was freed before
    after = take()
    assert after.tensors - before.tensors == 1
    assert after.resident - before.resident >= 0.9 * kept.nbytes


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--rounds", "3"], ["--rounds"]),
        (["--numel", "1Mi"], ["--numel"]),
        (["pack"], ["pack"]),
        (["--device", "cuda"], ["--device cuda", "measured on the CPU"]),
        (["--dtypes", "bf16"], ["--dtypes bf16", "fp32"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
    ],
    ids=" ".join,
)
def test_what_it_cannot_have(run_here, refuses, arguments, parts):
    refuses(*arguments, saying=["bench_endurance.py: ", *parts], by=run_here(bench_endurance.main))


def test_nothing_in_the_package_takes_steps(refuses):
    refuses("pack", "--steps", "5", saying=["--steps"])


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(run_here, draws_again, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench_endurance, "SAMPLES", 3)
    first = run_here(bench_endurance.main)("--steps", "6", "--out", ".")
    assert first.code == 0, first.err
    (file,) = Path().glob("*-endurance.json")
    (plot,) = Path().glob("*-endurance.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["ranks"], row["backend"]) for row in rows] == [
        (ranks, name) for ranks in (1, 2) for name in contenders(ranks)
    ]
    for row in rows:
        assert (row["dtype"], row["numel"], row["steps"]) == ("fp32", NUMEL, 6)
        assert tuple(row["growth"]) == COUNTERS and tuple(row["samples"]) == ("step", *COUNTERS)
        assert row["samples"]["step"][-1] == 6 and row["samples"]["files"][-1] > 0
        assert {len(figures) for figures in row["samples"].values()} == {len(row["samples"]["step"])}
    assert "resident, bytes" in first.out and "growth a step in the second half" in first.out
    draws_again(first, file, plot)
