"""Loss curves of ``zero-optim train`` on the same text from several seeds, by form of state or by optimizer.

    python benchmarks/bench_convergence.py --steps 500 --seeds 0,1,2 --lr 0.001
    python benchmarks/bench_convergence.py --compare optimizers

For optimizers, the first seed trains with each learning rate, and the other seeds with the best one. Losses are written
as JSON, with a picture of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from zero_optim import checkpoint
from zero_optim.bench.record import make_record, write, write_anew
from zero_optim.drawing.plot import png
from zero_optim.drawing.sheet import Bar, Bars, Line, Lines, Marks, Role, Scale, Sheet
from zero_optim.train.config import TrainConfig
from zero_optim.train.data import fixed_windows, load_corpus
from zero_optim.train.model import GPT, next_byte_loss

Contenders = Mapping[str, Sequence[str]]
"""Flags of ``zero-optim train`` by contender."""

FORMS: Contenders = {
    "fp32": (),
    "split": ("--master", "split"),
    "bf16": ("--state-dtype", "bf16"),
    "bf16_stochastic": ("--state-dtype", "bf16_stochastic"),
    "int8": ("--state-dtype", "int8"),
    "split, int8": ("--master", "split", "--state-dtype", "int8"),
    "split8": ("--master", "split8"),
    "split8, int8": ("--master", "split8", "--state-dtype", "int8"),
}
OPTIMIZERS: Mapping[str, Contenders] = {
    "AdamW": {f"AdamW, lr {lr}": ("--lr", lr) for lr in ("0.001", "0.002", "0.004", "0.008")},
    "Muon": {f"Muon, lr {lr}": ("--optimizer", "muon", "--muon-lr", lr) for lr in ("0.01", "0.02", "0.04")},
}
"""Contenders of each optimizer, by learning rate. Parameters that Muon leaves to AdamW have the default rate."""
MEAN_OF = 20
"""Steps whose training losses are one point of the picture."""
VALIDATE_EVERY = 25
"""Steps between validation losses."""
WINDOWS = 128
"""Windows of held-out text that validate, as at the end of ``zero-optim train``."""


@dataclass(frozen=True)
class ConvergenceRow:
    """A training. Losses are in nats a byte.

    Attributes:
        validation_loss: at the end.
        losses: the means of ``MEAN_OF`` steps each.
        lr: the learning rate, where it is not that of ``zero-optim train``.
        validation_losses: after each ``VALIDATE_EVERY`` steps; empty where forms of state are compared.
    """

    name: str
    seed: int
    ranks: int
    steps: int
    validation_loss: float
    losses: Sequence[float]
    validation_losses: Sequence[float] = ()
    lr: float | None = None


@dataclass(frozen=True)
class Where:
    """The place of trainings: device and ranks of each. ``at_once``: how many run at the same time."""

    device: str
    ranks: int
    at_once: int = 1


def train(name: str, flags: Sequence[str], seed: int, where: Where, steps: int, *, validate: bool) -> ConvergenceRow:
    saving = ("--save-every", str(VALIDATE_EVERY)) if validate else ("--no-checkpoint",)
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["train", "--steps", str(steps), "--seed", str(seed), "--out", str(run)]
        words += ["--device", where.device, "--ranks", str(where.ranks)]
        command = [sys.executable, "-m", "zero_optim", *words, *saving, *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            raise SystemExit(f"{name}, seed {seed}: exit code {done.returncode}\n{done.stdout.decode()[-3000:]}")
        session = json.loads((run / "run.json").read_text())["sessions"][-1]
        logged = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        points = range(VALIDATE_EVERY, steps + 1, VALIDATE_EVERY) if validate else ()
        validation_losses = validate_checkpoints([run / "checkpoint" / f"step-{step}" for step in points])
    losses = [entry["loss"] for entry in logged]
    means = [statistics.mean(losses[start : start + MEAN_OF]) for start in range(0, steps, MEAN_OF)]
    ending = session["ending"]["validation_loss"]
    return ConvergenceRow(name, seed, where.ranks, steps, ending, means, validation_losses)


@torch.no_grad()
def validate_checkpoints(folders: Sequence[Path]) -> list[float]:
    """Compute the mean held-out loss of each checkpoint, as ``zero-optim train`` does at its end."""
    config = TrainConfig()
    windows = fixed_windows(load_corpus(config.data, config.seq).validation, config.seq, WINDOWS)
    model = GPT(config.model, config.torch_dtype)
    found = []
    for folder in folders:
        checkpoint.load(folder, model)
        total = sum(next_byte_loss(model, part).item() * len(part) for part in windows.split(config.batch))
        found.append(total / len(windows))
    return found


def best_of(rows: Sequence[ConvergenceRow], optimizer: str) -> str:
    """Choose the contender of ``optimizer`` whose last loss is lowest for the first seed."""
    tried = [row for row in rows if row.name in OPTIMIZERS[optimizer] and row.seed == rows[0].seed]
    return min(tried, key=lambda row: row.validation_loss).name


def steps_to(loss: float, curve: Sequence[float]) -> float | None:
    """Find the step at which a curve of validation losses reaches ``loss``, interpolated between two of its points.

    None: never. Where the first point is below ``loss`` already, it is the step of that point."""
    for number, found in enumerate(curve):
        if found <= loss:
            before = curve[number - 1] if number else found
            share = (before - loss) / (before - found) if before > found else 1.0
            return VALIDATE_EVERY * (number + share)
    return None


def draw_forms(rows: Sequence[ConvergenceRow]) -> Sheet:
    """Draw a line for each form: the mean over seeds, without the first tenth of the steps."""
    lines, off = [], []
    names = list(dict.fromkeys(row.name for row in rows))
    exact = _mean_losses(rows, "fp32")
    for name in names:
        means = _mean_losses(rows, name)
        x = [MEAN_OF * (number + 1) for number in range(len(means))]
        skipped = len(x) // 10
        lines.append(Line(name, x[skipped:], means[skipped:], f"{means[-1]:.3f}"))
        shares = [100 * (mean / of_exact - 1) for mean, of_exact in zip(means, exact, strict=True)]
        off.append(Line(name, x[skipped:], shares[skipped:], f"{shares[-1]:+.2f} %"))
    panels = [
        Lines("Training loss, the mean of seeds", "nats a byte", lines, scale=Scale.DATA, in_turn=True),
        Lines("Beside fp32", "%", off, scale=Scale.DATA, in_turn=True),
    ]
    return Sheet([panels], _note(rows, f"means of {MEAN_OF} steps"), "Training with smaller state")


def draw_optimizers(rows: Sequence[ConvergenceRow]) -> Sheet:
    """Draw a line for each optimizer at its best rate, and a bar for each rate that was tried."""
    lines, bars = [], []
    for optimizer in OPTIMIZERS:
        best = best_of(rows, optimizer)
        curves = [row.validation_losses for row in rows if row.name == best]
        means = _over_seeds(curves, statistics.mean)
        band = [*zip(_over_seeds(curves, min), _over_seeds(curves, max), strict=True)]
        x = [VALIDATE_EVERY * (number + 1) for number in range(len(means))]
        skipped = len(x) // 10
        lines.append(Line(best, x[skipped:], means[skipped:], f"{means[-1]:.3f}", band[skipped:]))
        for row in rows:
            if row.name in OPTIMIZERS[optimizer] and row.seed == rows[0].seed:
                loss, role = row.validation_loss, Role.OURS if row.name == best else Role.OTHER
                bars.append(Bar(row.name, loss, (loss, loss), [f"{loss:.3f}"], role, optimizer))
    reached = steps_to_adamw(rows)
    marks = Marks([reached], f"AdamW's last loss after {reached:.0f} steps") if reached is not None else Marks((), "")
    title = "Validation loss, the mean and the range of seeds"
    panels = [
        Lines(title, "nats a byte", lines, scale=Scale.DATA, in_turn=True, marks=marks),
        Bars(f"At the end, of seed {rows[0].seed}", "nats a byte", bars, ["loss"]),
    ]
    return Sheet([panels], _note(rows, f"validated every {VALIDATE_EVERY} steps"), "Training with AdamW and with Muon")


def steps_to_adamw(rows: Sequence[ConvergenceRow]) -> float | None:
    """Find after how many steps Muon has AdamW's last loss: means over seeds, each optimizer at its best rate."""
    curves = [
        _over_seeds([row.validation_losses for row in rows if row.name == best_of(rows, optimizer)], statistics.mean)
        for optimizer in ("AdamW", "Muon")
    ]
    return steps_to(curves[0][-1], curves[1])


def _note(rows: Sequence[ConvergenceRow], how: str) -> str:
    seeds = len({row.seed for row in rows})
    rate = "" if rows[0].lr is None else f", lr {rows[0].lr}"
    return f"{seeds} seeds, {rows[0].ranks} ranks{rate}, {how}; zero-optim train's own model and text"


def _mean_losses(rows: Sequence[ConvergenceRow], name: str) -> list[float]:
    return _over_seeds([row.losses for row in rows if row.name == name], statistics.mean)


def _over_seeds(curves: Sequence[Sequence[float]], taken: Callable[[Sequence[float]], float]) -> list[float]:
    return [taken(values) for values in zip(*curves, strict=True)]


def sheet_of(rows: Sequence[ConvergenceRow]) -> Sheet:
    return draw_optimizers(rows) if rows[0].validation_losses else draw_forms(rows)


def compare_forms(
    forms: Sequence[str], seeds: Sequence[int], where: Where, steps: int, lr: float | None
) -> Iterator[ConvergenceRow]:
    """Train by each form from each seed. ``forms``: fp32 comes first, which the others are compared with."""
    rows: list[ConvergenceRow] = []
    rate = () if lr is None else ("--lr", str(lr))

    def trained(seed: int, form: str) -> ConvergenceRow:
        return replace(train(form, (*FORMS[form], *rate), seed, where, steps, validate=False), lr=lr)

    with ThreadPoolExecutor(where.at_once) as pool:
        for row in pool.map(trained, *zip(*itertools.product(seeds, forms), strict=True)):
            rows.append(row)
            exact = next(of.validation_loss for of in rows if of.seed == row.seed)
            found = row.validation_loss
            told = f"validation loss {found:.4f}, {found / exact:.4f} of fp32"
            print(f"seed {row.seed}  {row.name:12} {told}", flush=True)
            yield row


def compare_optimizers(seeds: Sequence[int], where: Where, steps: int) -> Iterator[ConvergenceRow]:
    rows: list[ConvergenceRow] = []
    for seed in seeds:
        for optimizer, rates in OPTIMIZERS.items():
            for name in rates if seed == seeds[0] else [best_of(rows, optimizer)]:
                rows.append(train(name, rates[name], seed, where, steps, validate=True))
                print(f"seed {seed}  {name:15} validation loss {rows[-1].validation_loss:.4f}", flush=True)
                yield rows[-1]
    reached = steps_to_adamw(rows)
    print(
        "Muon does not come down to AdamW's last loss"
        if reached is None
        else f"Muon has AdamW's last loss after {reached:.0f} steps"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compare", choices=("forms", "optimizers"), default="forms", help="what is compared (forms)")
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=tuple(FORMS),
        default=[*FORMS],
        metavar="FORM",
        help="of state (all); fp32 comes first",
    )
    parser.add_argument("--steps", type=int, default=500, help="of each training (500)")
    parser.add_argument("--seeds", default="0,1,2", help="as in 0,1,2 (0,1,2)")
    parser.add_argument("--lr", type=float, help="of all forms (that of zero-optim train)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where they train (cpu)")
    parser.add_argument("--ranks", type=int, default=2, help="of each training (2)")
    parser.add_argument("--at-once", type=int, default=1, help="trainings of forms at the same time (1)")
    parser.add_argument(
        "--out", type=Path, default="convergence", help="folder of the JSON and the picture (convergence)"
    )
    parser.add_argument("--redraw", type=Path, metavar="FILE.json", help="train nothing: draw this file again")
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    if given.redraw is not None:
        read = [ConvergenceRow(**row) for row in json.loads(given.redraw.read_text())["rows"]]
        png(sheet_of(read), given.redraw.with_suffix(".png"))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    seeds = [*map(int, given.seeds.split(","))]
    where = Where(given.device, given.ranks, given.at_once)
    if given.compare == "optimizers":
        trained = compare_optimizers(seeds, where, given.steps)
    else:
        forms = ["fp32", *(form for form in given.forms if form != "fp32")]
        trained = compare_forms(forms, seeds, where, given.steps, given.lr)
    rows: list[ConvergenceRow] = []
    path: Path | None = None
    for row in trained:  # the record is written after each training: a run that ends early keeps its rows
        rows.append(row)
        record = make_record(rows, torch.device(given.device), {})
        if path is None:
            path = write(record, given.out, given.compare)
        else:
            write_anew(record, path)
    assert path is not None  # there is a seed
    png(sheet_of(rows), path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
