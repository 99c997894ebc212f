"""Kills ranks of a training run at random instants, and compares what comes of it with a run that nobody disturbs.

    python tests/checkpoint/kills.py --kills 50
    python tests/checkpoint/kills.py --kills 50 --replacing

Each attempt loses one rank in a backward, in a step, or in a save; ``torchrun --max-restarts`` starts all anew, and
they go on from the newest whole checkpoint. Losses and the last checkpoint have to have the same bits in the end.

With ``--replacing`` every save is of the same step, so that the new checkpoint takes the place of the old one, and rank
0 dies while it does. Whoever comes next has to find the old one or the new one, with the bits of the undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for folder in (HERE.parent, HERE.parent / "train"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

from checkpoint_files import read_tensors  # noqa: E402
from replacing_victim import live  # noqa: E402
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


# -- saves that replace ------------------------------------------------------------------------------------------------


def calls_of_a_replacement(ranks: int) -> int:
    """That change the disk: two syncs and two renames; then each rank's file, the index and their folder go."""
    return 4 + ranks + 2


def job(folder: Path, ranks: int, last: int, at: int) -> tuple[int, str]:
    """The exit code of rank 0 of a job that ``live`` describes, or minus its signal; and what it said."""
    said, store = folder.with_name("said"), folder.with_name(f"store-{time.monotonic_ns()}")
    children = []
    for rank in range(ranks):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch is loaded, and no thread of it has begun
            children.append(os.fork())
        if children[-1] == 0:
            _live(said.with_name(f"said-{rank}"), folder, store, rank, ranks, last, at)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes[0], said.with_name("said-0").read_text()


def _live(said: Path, folder: Path, store: Path, rank: int, ranks: int, last: int, at: int) -> None:
    """In a process of its own, which ends here."""
    code = 1
    try:
        signal.alarm(300)  # at the latest
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        live(folder, store, rank, ranks, last, at)
        code = 0
    except BaseException as error:
        print("lost", type(error).__name__, error, flush=True)
    finally:
        os._exit(code)


def told(said: str, word: str) -> dict[int, str]:
    """Digests by number of updates, of the lines that begin with ``word``."""
    lines = [line.split() for line in said.splitlines() if line.startswith(f"{word} ")]
    return {int(done): digest for _, done, digest in lines}


def kill_replacing(folder: Path, ranks: int, deaths: Sequence[int]) -> tuple[int, int]:
    """Two updates an attempt, with a save after each; the second dies at that call.

    Returns how many died, and how many of them had the new checkpoint in its place. Raises AssertionError.
    """
    code, said = job(folder.with_name("undisturbed"), ranks, 2 * len(deaths) + 2, -1)
    assert code == 0, said
    right = told(said, "resumed") | told(said, "saved")
    done, died, new = 0, 0, 0
    for at in [*deaths, -1]:
        before = done
        code, said = job(folder, ranks, before + 2, at)
        assert code == (0 if "saved" in said and before + 2 in told(said, "saved") else -9), said
        ((resumed, digest),) = told(said, "resumed").items()
        assert resumed >= before, f"{before} updates were saved, and {resumed} were found: {said}"
        for count, other in (told(said, "resumed") | told(said, "saved")).items():
            assert right[count] == other, f"other bits after {count} updates: {said}"
        new += resumed > before
        done, died = max([resumed, *told(said, "saved")]), died + (code != 0)
    return died, new


def replace(kills: int, ranks: int, seed: int) -> None:
    generator = random.Random(seed)
    deaths = [generator.randrange(calls_of_a_replacement(ranks)) for _ in range(kills)]
    with tempfile.TemporaryDirectory(prefix="kills-") as work:
        start = time.perf_counter()
        died, new = kill_replacing(Path(work) / "checkpoints", ranks, deaths)
    print(
        f"{died} of {kills} saves that replace were killed, on {ranks} ranks, in {time.perf_counter() - start:.0f} s; "
        f"after {new} the new checkpoint was found, after the others the old one, all with the undisturbed run's bits"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replacing", action="store_true")
    arguments = parser.parse_args()
    if arguments.replacing:
        replace(arguments.kills, arguments.ranks, arguments.seed)
        return
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
