"""A damaged checkpoint is named and changes nothing, and the checkpoint before it loads."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from compare import same
from harness import run_ranks
from small_jobs import FIRST, INDEX, SECOND, all_of, network, train, trained


def _flip(step: Path, file: str, place: float) -> None:
    content = bytearray((step / file).read_bytes())
    content[min(int(place * len(content)), len(content) - 1)] ^= 4
    (step / file).write_bytes(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {  # by name: what the error must name, and the damage
    "the last byte of rank 0": (FIRST, lambda step: _flip(step, FIRST, 1)),
    "a byte late in rank 1": (SECOND, lambda step: _flip(step, SECOND, 0.9)),
    "a byte of the index": (INDEX, lambda step: _flip(step, INDEX, 0.5)),
    "rank 1 cut": (SECOND, lambda step: os.truncate(step / SECOND, (step / SECOND).stat().st_size // 2)),
    "rank 1 deleted": (SECOND, lambda step: (step / SECOND).unlink()),
    "rank 1 grown": (SECOND, lambda step: (step / SECOND).write_bytes((step / SECOND).read_bytes() + b"more")),
    "rank 1 of the checkpoint before": (
        SECOND,
        lambda step: shutil.copy(step.parent / "step-1" / SECOND, step / SECOND),
    ),
}
"""On two ranks. ``test_safety.py`` has one rank, and every kind of damage."""


def _load_damaged(rank: int, world_size: int, folder: str) -> list[str]:
    """What is wrong, in words: each damaged checkpoint is refused, by name, and its folder loads the one before it."""
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model, opt = trained(0)
    checkpoint.save(f"{folder}/whole", model, opt, extra=1)
    expected = all_of(model, opt)
    train(model, opt, 1)
    checkpoint.save(f"{folder}/whole", model, opt, extra=2)
    wrong = []
    for name, (file, damage) in DAMAGE.items():
        copy = Path(folder, "copy")
        if rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(Path(folder, "whole"), copy)
            damage(copy / "step-2")
        dist.barrier()
        other, its_opt = trained(1)
        before = all_of(other, its_opt)
        try:
            checkpoint.load(copy / "step-2", other, its_opt)
            wrong.append(f"{name}: it was loaded")
        except CheckpointError as error:
            if file not in str(error):
                wrong.append(f"{name}: {file} is not named in {error}")
        if not same(all_of(other, its_opt), before):
            wrong.append(f"{name}: it was refused, and something has changed")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = checkpoint.load(copy, other, its_opt)
        if (loaded.step, loaded.extra) != (1, 1) or not same(all_of(other, its_opt), expected):
            wrong.append(f"{name}: the folder gave something else than the checkpoint before")
        if rank == 0 and not any("step-2" in str(warning.message) for warning in caught):
            wrong.append(f"{name}: no warning")
        its_opt.close()
        dist.barrier()
    return wrong


def test_damage_is_named_and_the_checkpoint_before_is_loaded(tmp_path):
    for wrong in run_ranks(2, _load_damaged, str(tmp_path)):
        assert not wrong


def test_an_index_of_deep_nesting_is_damage(tmp_path):
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model = network(0)
    checkpoint.save(tmp_path, model, step=1)
    (checkpoint.save(tmp_path, model, step=2) / INDEX).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=INDEX):
        checkpoint.load(tmp_path / "step-2", model)
    with pytest.warns(match="step-2"):
        assert checkpoint.load(tmp_path, model).step == 1
