"""Which checkpoint is the newest after somebody has gone back to an older one: the one that was saved last."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from harness import run_ranks
from mutations import sealed
from torch import nn
from zero_optim import CheckpointError, ShardedAdamW, checkpoint
from zero_optim.checkpoint.folder import checkpoints
from zero_optim.checkpoint.inspection import inspect
from zero_optim.checkpoint.lineage import Lineage, standings


def make(seed: int = 0) -> tuple[nn.Module, ShardedAdamW]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    return model, ShardedAdamW(model.named_parameters(), lr=1e-2)


def train(model: nn.Module, opt: ShardedAdamW, steps: int, sign: float = 1.0) -> None:
    for _ in range(steps):
        (sign * model(torch.ones(2, 5))).sum().backward()
        opt.step()
        opt.zero_grad()


def names(path: Path) -> list[str]:
    """Of its checkpoints, the newest first."""
    return [folder.name for folder in checkpoints(path)]


def forget_lineage(folder: Path) -> None:
    """As earlier versions have written it."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    del index["lineage"]
    path.write_text(sealed(index))


def go_back(rank: int, world_size: int, path: str, background: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Train to 8, go back to 4, train to 7, the other way. Returns the weights there, and what is loaded then."""
    model, opt = make()
    save = {"background": background, "keep_last": 2}
    for step in (4, 4):
        train(model, opt, step)
        checkpoint.save(path, model, opt, background=background)
    checkpoint.wait()
    checkpoint.load(f"{path}/step-4", model, opt)
    for steps in (2, 1):
        train(model, opt, steps, -1.0)
        checkpoint.save(path, model, opt, **save)
    checkpoint.wait()
    want = model.weight.detach().clone()
    opt.close()
    model, opt = make(1)  # the job has died, and is started again
    assert checkpoint.load(path, model, opt).step == 7
    return want, model.weight.detach().clone()


@pytest.mark.parametrize(("ranks", "background"), [(1, False), (2, True)])
def test_the_branch_that_lives_is_loaded_and_kept(tmp_path: Path, ranks: int, background: bool) -> None:
    for want, loaded in run_ranks(ranks, go_back, str(tmp_path), background):
        assert torch.equal(want, loaded)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-7"
    assert checkpoint.info(tmp_path).step == 7
    assert "saved: as number 4 in its folder, after step 6" in inspect(tmp_path, quick=True)[0]
    # Two of this branch are kept; the one that was left has a higher step, and nobody has asked to remove it.
    assert names(tmp_path) == ["step-7", "step-6", "step-8"]
    # Where the newest is damaged, the one that it came from is taken, and not the one that was saved before it.
    os.truncate(tmp_path / "step-7" / "rank-0.safetensors", 10)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-6"


def test_a_branch_is_kept_where_the_one_that_was_left_was_saved_later(tmp_path: Path) -> None:
    model, opt = make()
    for _ in range(4):
        train(model, opt, 2)
        checkpoint.save(tmp_path, model, opt)
    checkpoint.load(tmp_path / "step-4", model, opt)
    train(model, opt, 5)
    checkpoint.save(tmp_path, model, opt, keep_last=2)
    # 6 and 8 were left. 4 was saved before both, and is what 9 came from.
    assert names(tmp_path) == ["step-9", "step-4", "step-8", "step-6"]
    train(model, opt, 1)
    checkpoint.save(tmp_path, model, opt, keep_last=2)
    assert names(tmp_path) == ["step-10", "step-9"]


def test_a_replaced_step_counts_as_saved_anew(tmp_path: Path) -> None:
    model, opt = make()
    for _ in range(3):
        train(model, opt, 2)
        checkpoint.save(tmp_path, model, opt)
    checkpoint.load(tmp_path / "step-2", model, opt)
    train(model, opt, 2)
    checkpoint.save(tmp_path, model, opt)
    assert names(tmp_path) == ["step-4", "step-2", "step-6"]


def test_another_model_that_is_loaded_beside_changes_nothing(tmp_path: Path) -> None:
    """Such as one that is evaluated while training goes on."""
    model, opt = make()
    for _ in range(3):
        train(model, opt, 2)
        checkpoint.save(tmp_path, model, opt)
    checkpoint.load(tmp_path / "step-2", make()[0])
    train(model, opt, 2)
    checkpoint.save(tmp_path, model, opt, keep_last=3)
    assert names(tmp_path) == ["step-8", "step-6", "step-4"]


def test_checkpoints_of_earlier_versions_come_first_by_their_steps(tmp_path: Path) -> None:
    model, opt = make()
    for _ in range(3):
        train(model, opt, 2)
        forget_lineage(checkpoint.save(tmp_path, model, opt))
    assert names(tmp_path) == ["step-6", "step-4", "step-2"]
    checkpoint.load(tmp_path / "step-4", model, opt)
    train(model, opt, 1)
    checkpoint.save(tmp_path, model, opt, keep_last=2)
    assert names(tmp_path) == ["step-5", "step-4", "step-6"]
    assert checkpoint.load(tmp_path, model, opt).step == 5


def test_a_lineage_with_other_values_is_damage(tmp_path: Path) -> None:
    model, opt = make()
    train(model, opt, 2)
    checkpoint.save(tmp_path, model, opt)
    train(model, opt, 2)
    path = checkpoint.save(tmp_path, model, opt) / "index.json"
    index = json.loads(path.read_text())
    assert index["lineage"]["number"] == 2 and index["lineage"]["after"] == [1, 2]
    for wrong in (
        {"number": -1},
        {"number": True},
        {"number": 1.5},
        {"after": 3},
        {"after": [1]},
        {"after": [1, None]},
    ):
        path.write_text(sealed({**index, "lineage": {**index["lineage"], **wrong}}))
        with pytest.raises(CheckpointError, match="index.json cannot be read: ValueError: its lineage"):
            checkpoint.load(path.parent, model, opt)
        assert checkpoint.latest(tmp_path) == tmp_path / "step-2"
        with pytest.warns(match="step-2 was loaded, and none that is newer"):
            checkpoint.load(tmp_path, model, opt)
    path.write_text(json.dumps({**index, "lineage": {**index["lineage"], "number": 3}}))
    with pytest.raises(CheckpointError, match="the checksum of its lineage"):
        checkpoint.info(path.parent)


@pytest.mark.parametrize("seed", range(30))
def test_any_history_is_put_in_its_order(seed: int) -> None:
    """Saves and returns drawn at random, against a list of what was saved: the newest, its ancestors, then the rest."""
    rng = random.Random(seed)
    there: dict[int, tuple[int, tuple[int, int] | None]] = {}  # by step: number and ancestor
    at: tuple[int, int] | None = None
    ancestors: dict[tuple[int, int], tuple[int, int] | None] = {}
    for number in range(1, rng.randint(2, 12)):
        if there and rng.random() < 0.3:
            step = rng.choice([*there])
            at = (there[step][0], step)
        step = (at[1] if at else 0) + rng.randint(1, 3)
        there[step], ancestors[number, step] = (number, at), at
        at = (number, step)
    branch, one = [], at
    while one is not None:
        branch.append(one)
        one = ancestors[one]
    steps = {Path(f"step-{step}"): step for step in there}
    found = standings(steps, {Path(f"step-{step}"): Lineage(*there[step]) for step in there})
    assert found[0].stamp == at
    # As far as none of them was replaced: what came before one that is gone is not known.
    known = [*itertools.takewhile(lambda place: there[place[1]][0] == place[0], branch)]
    assert known and [one.stamp for one in found if one.lives][: len(known)] == known
    others = [one.stamp for one in found if not one.lives]
    assert others == sorted(others, reverse=True) and len(found) == len(there)
