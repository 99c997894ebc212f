"""Loss curves of ``zero-optim train`` on the same text from several seeds, by form of state or by optimizer.

    python benchmarks/bench_convergence.py --steps 500 --seeds 0 1 2 --lr 0.001
    python benchmarks/bench_convergence.py --compare optimizers --steps 300

Losses are in nats a byte. ``--at-once`` trainings run at the same time, which is for a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lab import draw_beside, parser_of, run_script
from zero_optim import checkpoint
from zero_optim.bench.cases import Row
from zero_optim.bench.record import Result, title
from zero_optim.bench.run import find_device
from zero_optim.errors import ZeroOptimError
from zero_optim.rules.codec import DTYPES
from zero_optim.train.loop import fixed_windows, load_corpus
from zero_optim.train.model import GPT, TrainConfig, next_byte_loss
from zero_optim_cli.choices import at_least_one

Flags = Sequence[str]  # of ``zero-optim train``

FORMS: Mapping[str, Flags] = {
    "fp32": ("--master", "fp32"),
    "split": (),
    "split, bf16": ("--state-dtype", "bf16"),
    "split, int8": ("--state-dtype", "int8"),
    "split8": ("--master", "split8"),
    "split8, int8": ("--master", "split8", "--state-dtype", "int8"),
}
OPTIMIZERS: Mapping[str, Flags] = {
    "AdamW, lr 0.002": ("--lr", "0.002"),
    "Muon, lr 0.02": ("--optimizer", "muon", "--muon-lr", "0.02"),
}
"""Each at the best of the rates that were tried. Parameters that Muon leaves to AdamW have the default rate."""
MEAN_OF = 20  # steps whose training losses are one point of a curve
VALIDATE_EVERY = 25  # steps between validation losses, where optimizers are compared
WINDOWS = 128  # of held-out text that validate, as at the end of ``zero-optim train``


def make_parser() -> Any:
    parser = parser_of(__file__, "Trains by zero-optim train, and compares losses.", device=None, ranks=None, steps=500)
    parser.add_argument("--compare", choices=("forms", "optimizers"), default="forms", help="what is compared (forms)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="(0 1 2)")
    parser.add_argument("--lr", type=float, help="of all forms (that of zero-optim train)")
    parser.add_argument("--at-once", type=at_least_one, default=1, help="trainings of forms at the same time (1)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script(make_parser(), work, arguments)


def work(parsed: argparse.Namespace) -> None:
    """Train by each name from each seed. The first name is the one that the others are compared with."""
    device = find_device(parsed.device)
    parsed.ranks = parsed.ranks or (2 if device.type == "cpu" else 1)
    result = Result(device, parsed.out, parsed.write, f"convergence-{parsed.compare}")
    ways = FORMS if parsed.compare == "forms" else OPTIMIZERS
    first = next(iter(ways))

    def trained(job: tuple[int, str]) -> Row:
        return train(job[1], ways[job[1]], job[0], device.type, parsed)

    exact: dict[int, float] = {}
    with ThreadPoolExecutor(parsed.at_once) as pool:
        for row in pool.map(trained, [(seed, name) for seed in parsed.seeds for name in ways]):
            result.add([row])
            loss = row["validation_loss"]
            ratio = loss / exact.setdefault(row["seed"], loss)
            print(
                f"seed {row['seed']}  {row['name']:16} validation loss {loss:.4f}, {ratio:.4f} of {first}", flush=True
            )
    if parsed.compare == "optimizers":
        print("steps after which Muon has AdamW's last loss, None where never:", steps_to_adamw(result.rows))
    draw_beside(result, draw)


def train(name: str, flags: Flags, seed: int, device: str, parsed: argparse.Namespace) -> Row:
    """Run ``zero-optim train`` once. Raises ZeroOptimError where it fails."""
    validate = parsed.compare == "optimizers"
    rate = () if parsed.lr is None or validate else ("--lr", str(parsed.lr))
    saving = ("--save-every", str(VALIDATE_EVERY)) if validate else ("--no-checkpoint",)
    with TemporaryDirectory() as folder:
        run = Path(folder, "run")
        words = ["--steps", str(parsed.steps), "--seed", str(seed), "--device", device, "--ranks", str(parsed.ranks)]
        command = [sys.executable, "-m", "zero_optim", "train", *words, "--out", str(run), *saving, *flags, *rate]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise ZeroOptimError(f"{name}, seed {seed}: exit code {done.returncode}: {done.stdout[-2000:]}")
        entries = map(json.loads, (run / "log.jsonl").read_text().splitlines())
        losses = [entry["loss"] for entry in entries if "loss" in entry]
        points = range(VALIDATE_EVERY, parsed.steps + 1, VALIDATE_EVERY) if validate else ()
        curve = validation_losses([run / "checkpoint" / f"step-{step}" for step in points])
        last = re.findall(r'"validation_loss": ([\d.e-]+)', (run / "run.json").read_text())[-1]
    return {
        "op": "convergence",
        "name": name,
        "seed": seed,
        "ranks": parsed.ranks,
        "steps": parsed.steps,
        "lr": parsed.lr,
        "validation_loss": float(last),
        "losses": [statistics.mean(losses[start : start + MEAN_OF]) for start in range(0, len(losses), MEAN_OF)],
        "validation_losses": curve,
    }


@torch.no_grad()
def validation_losses(folders: Sequence[Path]) -> list[float]:
    """Compute the mean held-out loss of each checkpoint, as ``zero-optim train`` does at its end."""
    config = TrainConfig()
    windows = fixed_windows(load_corpus(config.data, config.seq).validation, config.seq, WINDOWS)
    model = GPT(config, DTYPES[config.dtype])
    found = []
    for folder in folders:
        checkpoint.load(folder, model)
        total = sum(next_byte_loss(model, part).item() * len(part) for part in windows.split(config.batch))
        found.append(total / len(windows))
    return found


# -- what is made of the losses ----------------------------------------------------------------------------------------


def steps_to_adamw(rows: Sequence[Row]) -> float | None:
    """Find after how many steps Muon has AdamW's last loss, by means over seeds."""
    adamw, muon = (over_seeds(rows, name, "validation_losses") for name in OPTIMIZERS)
    return steps_to(adamw[-1], muon)


def steps_to(loss: float, curve: Sequence[float]) -> float | None:
    """Find the step at which a curve of validation losses reaches ``loss``, interpolated between two of its points.

    None: never. Where the first point is below ``loss`` already, it is the step of that point."""
    for number, found in enumerate(curve):
        if found <= loss:
            before = curve[number - 1] if number else found
            part = (before - loss) / (before - found) if before > found else 1.0
            return VALIDATE_EVERY * (number + part)
    return None


def over_seeds(rows: Sequence[Row], name: str, key: str) -> list[float]:
    """Compute the mean curve of a name."""
    return [statistics.mean(values) for values in zip(*(row[key] for row in rows if row["name"] == name), strict=True)]


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw a curve for each form, or for each optimizer: means over seeds, without the first tenth."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = record["rows"]
    validated = bool(rows[0].get("validation_losses"))
    key, every = ("validation_losses", VALIDATE_EVERY) if validated else ("losses", MEAN_OF)
    # an older file has other rates, of the first seed alone
    names = OPTIMIZERS if validated else dict.fromkeys(row["name"] for row in rows)
    figure, axis = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name in names:
        means = over_seeds(rows, name, key)
        skipped = len(means) // 10
        steps = [every * (number + 1) for number in range(len(means))]
        axis.plot(steps[skipped:], means[skipped:], label=f"{name}: {means[-1]:.3f}")
    axis.set_xlabel("steps")
    axis.set_ylabel(f"{'validation' if validated else 'training'} loss, nats a byte")
    axis.legend(fontsize=7)
    figure.suptitle(f"{title(record)}; {len({row['seed'] for row in rows})} seeds", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
