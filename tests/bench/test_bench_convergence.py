"""``bench_convergence.py``: what is made of losses, and the committed files that it draws."""

from __future__ import annotations

import json
from pathlib import Path

import bench_convergence
import pytest
from bench_convergence import ConvergenceRow, best_of, draw_optimizers, sheet_of, steps_to, steps_to_adamw

COMMITTED = sorted((Path(bench_convergence.__file__).parent / "convergence").glob("*.json"))


def row(name: str, seed: int, *curve: float) -> ConvergenceRow:
    return ConvergenceRow(name, seed, 2, 25 * len(curve), curve[-1], curve, curve)


ROWS = [
    row("AdamW, lr 0.002", 0, 5.0, 4.0, 3.0),
    row("AdamW, lr 0.004", 0, 5.0, 4.0, 3.5),
    row("Muon, lr 0.01", 0, 4.0, 3.5, 2.5),
    row("Muon, lr 0.02", 0, 4.0, 2.0, 1.5),
    row("AdamW, lr 0.002", 1, 5.0, 4.0, 4.0),
    row("Muon, lr 0.02", 1, 6.0, 4.0, 1.0),
]


def test_steps_to_a_loss_lie_on_the_line_between_two_points():
    curve = [4.0, 3.0, 2.0]
    assert steps_to(2.5, curve) == 62.5 and steps_to(3.0, curve) == 50
    assert steps_to(4.5, curve) == 25 and steps_to(1.9, curve) is None


def test_the_best_rate_is_the_first_seeds_and_curves_are_means_of_seeds():
    """AdamW ends at 3.5. Muon has 5, 3 and 1.25: it is there three quarters of the way from the first to the second."""
    assert [best_of(ROWS, name) for name in ("AdamW", "Muon")] == ["AdamW, lr 0.002", "Muon, lr 0.02"]
    assert steps_to_adamw(ROWS) == pytest.approx(43.75)
    curves, bars = draw_optimizers(ROWS).drawings
    assert [line.label for line in curves.lines] == ["AdamW, lr 0.002: 3.500", "Muon, lr 0.02: 1.250"]
    assert curves.lines[1].band == [(4.0, 6.0), (2.0, 4.0), (1.0, 1.5)] and curves.marks.x == [pytest.approx(43.75)]
    assert [bar.value for bar in bars.bars] == [3.0, 3.5, 2.5, 1.5]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_files_are_drawn(path):
    rows = [ConvergenceRow(**row) for row in json.loads(path.read_text())["rows"]]
    first = sheet_of(rows).drawings[0]
    assert len(first.lines) == (2 if "optimizers" in path.stem else len({row.name for row in rows}))
