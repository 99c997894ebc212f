"""Kills ranks of a training run at random instants, and compares what comes of it with a run that nobody disturbs.

    python tests/checkpoint/kills.py --kills 50

Each attempt loses one rank in a backward, in a step, or in a save; ``torchrun --max-restarts`` starts all anew, and
they go on from the newest whole checkpoint. Losses and the last checkpoint have to have the same bits in the end.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (HERE.parent / "helpers", HERE.parent / "train"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from checkpoint_files import read_tensors  # noqa: E402
from training import environment, read_log, saved_steps, without_speed, write_text  # noqa: E402

PHASES = ("backward", "step", "save")
MODEL = ["--layers", "2", "--hidden", "64", "--heads", "2", "--seq", "32", "--batch", "2", "--device", "cpu"]
SAVE_EVERY = 2
MOST_SECONDS = {"backward": 0.05, "step": 0.05, "save": 0.06}
"""About as long as each takes here, or longer: then the rank dies in what follows."""


@dataclass(frozen=True)
class Death:
    """Of ``rank``: ``delay`` seconds after it has begun the ``count``-th ``phase`` of an attempt."""

    rank: int
    phase: str
    count: int
    delay: float

    def __str__(self) -> str:
        return f"{self.rank} {self.phase} {self.count} {self.delay:.6f}"


def draw(kills: int, ranks: int, seed: int) -> list[Death]:
    """Every second attempt lives to save, and so gets further."""
    generator = random.Random(seed)
    deaths = []
    for number in range(kills):
        phase = PHASES[number % len(PHASES)]
        count = generator.randint(1, 2) if phase == "save" else generator.randint(1, 2 * SAVE_EVERY)
        delay = generator.uniform(0, MOST_SECONDS[phase])
        deaths.append(Death(generator.randrange(ranks), phase, count, delay))
    return deaths


def train(folder: Path, ranks: int, flags: Sequence[str], deaths: Sequence[Death], limit: float) -> str:
    """``zero-optim train`` under torchrun, its run in ``folder``. Returns what was said; raises where it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "plan"
    plan.write_text("".join(f"{death}\n" for death in deaths))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--max-restarts", str(len(deaths)), str(HERE / "victim.py")]
    command = [*launcher, "train", "--resume", "auto", "--out", str(folder / "run"), *flags]
    # Else a second attempt finds the first one's addresses in the launcher's store (pytorch issue 135712).
    variables = environment() | {"VICTIM_PLAN": str(plan), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    return done.stdout + done.stderr


def assert_same(ours: Path, theirs: Path) -> None:
    """Two runs: every step's loss, norm and rate, and all tensors of the last checkpoint."""
    assert without_speed(read_log(ours)) == without_speed(read_log(theirs))
    last = saved_steps(theirs)[-1]
    assert saved_steps(ours)[-1] == last
    pair = [read_tensors(run / "checkpoint" / f"step-{last}") for run in (ours, theirs)]
    assert pair[0].keys() == pair[1].keys() and len(pair[0]) > 20
    assert all(torch.equal(pair[0][key], pair[1][key]) for key in pair[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    steps = SAVE_EVERY * (arguments.kills + 2)
    deaths = draw(arguments.kills, arguments.ranks, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="kills-") as work:
        text = write_text(Path(work) / "text")
        flags = [*MODEL, "--stage", str(arguments.stage), "--steps", str(steps), "--data", str(text)]
        flags += ["--save-every", str(SAVE_EVERY), "--keep-last", "2"]
        undisturbed, killed = Path(work) / "undisturbed", Path(work) / "killed"
        train(undisturbed, arguments.ranks, flags, [], 600)
        start = time.perf_counter()
        said = train(killed, arguments.ranks, flags, deaths, 60.0 * (arguments.kills + 1))
        seconds = time.perf_counter() - start
        assert_same(killed / "run", undisturbed / "run")
    resumed = said.count(", after step ")
    fallen = said.count("was loaded, and none that is newer")
    print(
        f"{arguments.kills} kills on {arguments.ranks} ranks at stage {arguments.stage}, {steps} steps in "
        f"{seconds:.0f} s, {resumed} times resumed, {fallen} times from an older checkpoint: losses and the last "
        "checkpoint have the bits of the undisturbed run"
    )


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
