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


@pytest.mark.slow
def test_a_run_trains_each_form_from_each_seed(monkeypatch, tmp_path, capsys):
    """The trainings are played: seed 1 ends at 2.0 with fp32, and each form a hundredth above the one before."""
    pytest.importorskip("matplotlib")
    commands = []
    real = subprocess.run

    def played(command, **words):
        if "train" not in command:
            return real(command, **words)
        flags = dict(zip(command[4::2], command[5::2], strict=False))
        run = Path(command[command.index("--out") + 1])
        run.mkdir()
        (run / "log.jsonl").write_text("".join(f'{{"step": {step}, "loss": {step}.5}}\n' for step in range(40)))
        loss = 2.0 + 0.01 * (len(commands) % len(bench_convergence.FORMS))
        (run / "run.json").write_text(json.dumps({"ending": {"validation_loss": loss}}))
        commands.append((flags["--seed"], flags["--steps"], command[-2:], "--no-checkpoint" in command))
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(bench_convergence.subprocess, "run", played)
    flags = ["--steps", "40", "--seeds", "1", "2", "--lr", "0.001", "--device", "cpu", "--out", str(tmp_path)]
    assert bench_convergence.main(flags) == 0
    (file,) = tmp_path.glob("*-convergence-forms.json")
    rows = json.loads(file.read_text())["rows"]
    assert [(r["seed"], r["name"]) for r in rows] == [(s, form) for s in (1, 2) for form in bench_convergence.FORMS]
    assert commands[0] == ("1", "40", ["--lr", "0.001"], True)
    assert rows[1]["validation_loss"] == 2.01 and rows[0]["losses"] == [10.0, 30.0], "means of 20 steps"
    assert "seed 1  split            validation loss 2.0100, 1.0050 of fp32" in capsys.readouterr().out
    assert file.with_suffix(".png").exists()


def test_a_training_that_fails_ends_the_run(monkeypatch):
    done = subprocess.CompletedProcess([], 1, "no such data")
    monkeypatch.setattr(bench_convergence.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ZeroOptimError, match="int8, seed 0: exit code 1: no such data"):
        bench_convergence.train("int8", (), 0, "cpu", bench_convergence.make_parser().parse_args([]))
