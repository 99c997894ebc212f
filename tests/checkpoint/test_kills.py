"""Ranks that are killed: the others raise, the launcher starts all anew, and what comes of it has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from kills import MODEL, SAVE_EVERY, Death, assert_same, train
from script_ranks import run_script
from training import write_text
from zero_optim import checkpoint

LIMIT = 240.0


DEATHS = [
    Death(1, "backward", SAVE_EVERY + 2, 0.001),
    Death(0, "save", 1, 0.002),
]


@pytest.mark.slow
def test_a_run_that_loses_ranks_is_one_that_nobody_disturbed(tmp_path: Path) -> None:
    """Each attempt gets a checkpoint further, or dies in saving it. ``kills.py`` does it fifty times."""
    text = write_text(tmp_path / "text")
    flags = [*MODEL, "--stage", "3", "--steps", "8", "--data", str(text), "--save-every", str(SAVE_EVERY)]
    train(tmp_path / "undisturbed", 2, flags, [], LIMIT)
    said = train(tmp_path / "killed", 2, flags, DEATHS, LIMIT)
    assert said.count("reading the text") == 1 + len(DEATHS)
    assert ", after step 2\n" in said
    assert_same(tmp_path / "killed" / "run", tmp_path / "undisturbed" / "run")


SAVES = """
import os, signal, sys
import torch, torch.distributed as dist
import zero_optim
from zero_optim import checkpoint
rank, _, store, folder, how = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
model = torch.nn.Linear(300, 300)
opt = zero_optim.ShardedAdamW(model.parameters())
checkpoint.save(folder, model, opt, step=1)
write, left = os.pwrite, [3]
def die(*arguments):
    left[0] -= 1
    if dist.get_rank() == 1 and left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
os.pwrite = die
try:
    checkpoint.save(folder, model, opt, step=2, background=how == "background")
    checkpoint.wait()
except zero_optim.ZeroOptimError as error:
    print(type(error).__name__, error)
    os._exit(3)
"""


def test_a_rank_that_dies_while_it_saves(tmp_path: Path) -> None:
    for how in ("blocking", "background"):
        folder, scripts = tmp_path / how, tmp_path / f"scripts {how}"
        scripts.mkdir()
        left, died = run_script(SAVES, 2, scripts, str(folder), how)  # no launcher ends the one that is left
        said = left.output + left.errors
        assert (left.code, died.code) == (3, -9), said
        assert "Another rank died" in said
        assert checkpoint.latest(folder) == folder / "step-1"
        assert [path.name for path in folder.iterdir()] == ["step-1"], said
