"""Saving in the background writes what a blocking save does, whatever training does meanwhile; errors are not lost."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import slow
from checkpoint_cases import Job, make_zoo, train_zoo
from checkpoint_files import read_contents, read_tensors
from harness import run_ranks
from torch import nn
from zero_optim import CheckpointError, ShardedAdamW, checkpoint
from zero_optim.checkpoint import background, saving


class Held:
    """``os.fsync`` of this process waits until it is let go: so long a save is under way."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._may_go, sync = threading.Event(), os.fsync

        def held(file: int) -> None:
            assert self._may_go.wait(60)
            sync(file)

        patch.setattr(os, "fsync", held)

    def let_go(self) -> None:
        self._may_go.set()


def save_both_ways(rank: int, world_size: int, folder: str, job: Job) -> list[int]:
    """Train on, load weights and save again while the first save is under way. Returns sizes of the slab."""
    model, opt = make_zoo(job, seed=rank)
    train_zoo(model, opt, range(2), rank, world_size)
    checkpoint.save(f"{folder}/blocking", model, opt, extra=[1])
    sizes = []
    for step in (2, 3, 4):
        with pytest.MonkeyPatch.context() as patch:
            held = Held(patch)
            path = checkpoint.save(f"{folder}/beside", model, opt, extra=[1], background=True)
            assert path == Path(folder) / "beside" / f"step-{step}" and not path.exists()
            train_zoo(model, opt, range(step, step + 1), rank, world_size)
            opt.stats()
            assert not path.exists()
            held.let_go()
            checkpoint.wait()
        assert path.exists()
        sizes.append(background.SAVE_BUFFER._memory.data_ptr())
    checkpoint.wait()  # nothing is under way
    for step in (5, 6):  # a save waits for the one before it
        path = checkpoint.save(f"{folder}/later", model, opt, step=step, background=True)
    checkpoint.wait()
    return sizes


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), pytest.param(2, 0, marks=slow), (2, 2), (3, 3)])
def test_it_is_what_a_blocking_save_writes(tmp_path: Path, ranks: int, stage: int) -> None:
    for places in run_ranks(ranks, save_both_ways, str(tmp_path), Job(stage=stage, dtype=torch.bfloat16)):
        assert len(set(places)) == 1  # host memory is allocated once
    assert sorted(path.name for path in (tmp_path / "later").iterdir()) == ["step-5", "step-6"]
    blocking, beside = tmp_path / "blocking" / "step-2", tmp_path / "beside" / "step-2"
    ours, theirs = read_tensors(beside), read_tensors(blocking)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert read_contents(beside) == read_contents(blocking)


def fail(rank: int, world_size: int, folder: str, how: str) -> list[str]:
    """Rank 1 cannot write. Returns what is raised, and when."""
    model, opt = make_zoo(Job(), seed=rank)
    checkpoint.save(folder, model, opt, step=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(saving, "write_file", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        checkpoint.save(folder, model, opt, step=2, background=True)
        train_zoo(model, opt, range(2), rank, world_size)
        ask: dict[str, Any] = {
            "wait": checkpoint.wait,
            "save": lambda: checkpoint.save(folder, model, opt, step=3),
            "load": lambda: checkpoint.load(folder, model, opt),
        }
        with pytest.raises(CheckpointError) as raised:
            ask[how]()
    assert sorted(path.name for path in Path(folder).iterdir()) == ["step-1"]
    checkpoint.wait()  # told once
    checkpoint.save(folder, model, opt, step=3)
    return [str(raised.value), str(checkpoint.load(folder, model, opt).step)]


@pytest.mark.parametrize("how", ["wait", "save", "load"])
def test_an_error_surfaces_at_the_next_call_on_every_rank(tmp_path: Path, how: str) -> None:
    for message, step in run_ranks(2, fail, str(tmp_path), how):
        assert "the save in the background has failed: " in message and "Input/output error" in message
        assert step == "3"


def test_a_relative_path_stays_what_it_was_when_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on in another folder while the thread has not published what it writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    model = nn.Linear(3, 3)
    opt = ShardedAdamW(model.named_parameters(), state_offload="nvme:.")
    with pytest.MonkeyPatch.context() as patch:
        held = Held(patch)
        saved = checkpoint.save("ck", model, opt, background=True)
        monkeypatch.chdir(tmp_path / "elsewhere")
        held.let_go()
        checkpoint.wait()
    assert saved == tmp_path / "ck" / "step-0" == checkpoint.latest(tmp_path / "ck")
    opt.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ck", "elsewhere"]  # and no file of pages
    assert not list((tmp_path / "elsewhere").iterdir())
