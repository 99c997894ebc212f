"""Does smaller state train as well? ``zero-optim train`` by each form of state, from several seeds, on the same text.

    python benchmarks/bench_convergence.py --steps 500 --seeds 0,1,2

Writes the validation losses as JSON, and a picture of the training losses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from zero_optim.bench.record import make_record, write
from zero_optim.drawing.plot import png
from zero_optim.drawing.sheet import Line, Lines, Scale, Sheet

FORMS: Mapping[str, Sequence[str]] = {
    "fp32": (),
    "split": ("--master", "split"),
    "bf16": ("--state-dtype", "bf16"),
    "int8": ("--state-dtype", "int8"),
    "split, int8": ("--master", "split", "--state-dtype", "int8"),
    "split8": ("--master", "split8"),
    "split8, int8": ("--master", "split8", "--state-dtype", "int8"),
}
MEAN_OF = 20
"""Steps whose losses are one point of the picture."""


@dataclass(frozen=True)
class ConvergenceRow:
    """A training. ``losses``: the means of ``MEAN_OF`` steps each, in nats a byte."""

    form: str
    seed: int
    ranks: int
    steps: int
    validation_loss: float
    losses: Sequence[float]


def train(form: str, seed: int, ranks: int, steps: int) -> ConvergenceRow:
    with TemporaryDirectory() as folder:
        words = ["train", "--ranks", str(ranks), "--steps", str(steps), "--seed", str(seed), "--no-checkpoint"]
        command = [sys.executable, "-m", "zero_optim", *words, "--out", f"{folder}/run", *FORMS[form]]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        session = json.loads(Path(f"{folder}/run/run.json").read_text())["sessions"][-1]
        logged = [json.loads(line) for line in Path(f"{folder}/run/log.jsonl").read_text().splitlines()]
    losses = [entry["loss"] for entry in logged]
    means = [statistics.mean(losses[start : start + MEAN_OF]) for start in range(0, steps, MEAN_OF)]
    return ConvergenceRow(form, seed, ranks, steps, session["ending"]["validation_loss"], means)


def draw(rows: Sequence[ConvergenceRow], path: Path) -> None:
    """A line for each form: the mean over seeds, from a tenth of the steps on."""
    lines, off = [], []
    exact = _mean_losses(rows, "fp32")
    for form in FORMS:
        means = _mean_losses(rows, form)
        x = [MEAN_OF * (number + 1) for number in range(len(means))]
        skipped = len(x) // 10
        lines.append(Line(form, x[skipped:], means[skipped:], f"{means[-1]:.3f}"))
        shares = [100 * (mean / of_exact - 1) for mean, of_exact in zip(means, exact, strict=True)]
        off.append(Line(form, x[skipped:], shares[skipped:], f"{shares[-1]:+.2f} %"))
    seeds = len({row.seed for row in rows})
    panels = [
        Lines("Training loss, the mean of seeds", "nats a byte", lines, scale=Scale.DATA, in_turn=True),
        Lines("Beside fp32", "%", off, scale=Scale.DATA, in_turn=True),
    ]
    note = f"{seeds} seeds, {rows[0].ranks} ranks, means of {MEAN_OF} steps; zero-optim train's own model and text"
    png(Sheet([panels], note, "Training with smaller state"), path)


def _mean_losses(rows: Sequence[ConvergenceRow], form: str) -> list[float]:
    return [statistics.mean(values) for values in zip(*(row.losses for row in rows if row.form == form), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="of each training (500)")
    parser.add_argument("--seeds", default="0,1,2", help="as in 0,1,2 (0,1,2)")
    parser.add_argument("--ranks", type=int, default=2, help="of each training (2)")
    parser.add_argument(
        "--out", type=Path, default="convergence", help="folder of the JSON and the picture (convergence)"
    )
    parser.add_argument("--redraw", type=Path, metavar="FILE.json", help="train nothing: draw this file again")
    given = parser.parse_args()
    if given.redraw is not None:
        read = [ConvergenceRow(**row) for row in json.loads(given.redraw.read_text())["rows"]]
        draw(read, given.redraw.with_suffix(".png"))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in map(int, given.seeds.split(",")):
        for form in FORMS:
            rows.append(train(form, seed, given.ranks, given.steps))
            exact = next(row.validation_loss for row in rows if row.seed == seed)
            found = rows[-1].validation_loss
            print(f"seed {seed}  {form:12} validation loss {found:.4f}, {found / exact:.4f} of fp32", flush=True)
    path = write(make_record(rows, torch.device("cpu"), {}), given.out)
    draw(rows, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
