"""``bench_convergence.py``: what it reads of a training, what is made of losses, and the committed files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import bench_convergence
import pytest
from bench_convergence import draw, steps_to, steps_to_adamw
from zero_optim.errors import ZeroOptimError

COMMITTED = sorted((Path(bench_convergence.__file__).parent / "convergence").glob("*.json"))


def row(name: str, seed: int, *curve: float) -> dict:
    return {"name": name, "seed": seed, "validation_loss": curve[-1], "losses": curve, "validation_losses": curve}


ROWS = [
    row("AdamW, lr 0.002", 0, 5.0, 4.0, 3.0),
    row("Muon, lr 0.02", 0, 4.0, 2.0, 1.5),
    row("AdamW, lr 0.002", 1, 5.0, 4.0, 4.0),
    row("Muon, lr 0.02", 1, 6.0, 4.0, 1.0),
]


def test_steps_to_a_loss_lie_on_the_line_between_two_points():
    curve = [4.0, 3.0, 2.0]
    assert steps_to(2.5, curve) == 62.5 and steps_to(3.0, curve) == 50
    assert steps_to(4.5, curve) == 25 and steps_to(1.9, curve) is None


def test_curves_are_means_of_seeds():
    """AdamW ends at 3.5. Muon has 5, 3 and 1.25: it is there three quarters of the way from the first to the second."""
    assert steps_to_adamw(ROWS) == pytest.approx(43.75)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_files_are_drawn(path, tmp_path):
    pytest.importorskip("matplotlib")
    draw(json.loads(path.read_text()), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_that_fails_ends_the_run(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "no such data")
    monkeypatch.setattr(bench_convergence.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ZeroOptimError, match="int8, seed 0: exit code 1: no such data"):
        bench_convergence.train("int8", (), 0, "cpu", bench_convergence.make_parser().parse_args([]))
