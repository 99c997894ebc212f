"""Ranks that make different calls, lack disk space or die: all raise, and the checkpoint from before stays whole."""

from __future__ import annotations

import os
import random
import resource
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compare import same
from harness import RankFailure, run_ranks
from small_jobs import FIRST, INDEX, SECOND, all_of, trained
from torch import nn


class _Stateful:
    """A data loader, or a scheduler, that takes a state, or raises what it is given."""

    def __init__(self, state: Any = None, loading: Exception | None = None) -> None:
        self.state, self.loading = state, loading

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if self.loading is not None:
            raise self.loading
        self.state = state


def _function() -> None:
    """What cannot be saved without pickle."""


class _Growing(nn.Module):
    def __init__(self, inner: nn.Module, grown: bool) -> None:
        super().__init__()
        self.inner = inner
        if grown:
            self.register_buffer("more", torch.ones(3))


def _disagreements(odd: bool, rank: int, folder: str, model: nn.Module, opt: Any) -> dict[str, Callable[[], Any]]:
    """Calls that differ on the odd rank, each of which all ranks must refuse."""
    from zero_optim import checkpoint

    def saves(**options: Any) -> Callable[[], Any]:
        return lambda: checkpoint.save(options.pop("path", f"{folder}/good"), model, opt, **options)

    def loads(path: Any = f"{folder}/good", model: nn.Module = model, opt: Any = opt, **options: Any) -> Any:
        return lambda: checkpoint.load(path, model, opt, **options)

    boom = ValueError("boom") if odd else None
    return {
        "save: a step that is none": saves(step="x" if odd else 6),
        "save: extra that cannot be saved": saves(step=7, extra=_function if rank == 0 else {}),
        "save: data without a state": saves(step=7, data=5 if odd else _Stateful()),
        "save: a scheduler without a state": saves(step=7, scheduler=5 if odd else _Stateful()),
        "save: keep_last of nothing": saves(step=7, keep_last=0 if odd else 1),
        "save: a path below a file": saves(step=7, path=f"{folder}/good/step-1/index.json/below"),
        "save: no optimizer": lambda: checkpoint.save(f"{folder}/good", model, None if odd else opt, step=7),
        "save: another model": lambda: checkpoint.save(
            f"{folder}/good", nn.Linear(2, 2) if odd else nn.Linear(2, 3), step=7
        ),
        "load: strict, which does not fit": loads(scheduler=_Stateful(), strict=odd),
        "load: a scheduler": loads(scheduler=_Stateful() if odd else None),
        "load: data": loads(data=_Stateful() if odd else None),
        "load: a buffer": loads(model=_Growing(model, odd), opt=None),
        "load: the state of a scheduler raises": loads(f"{folder}/more", scheduler=_Stateful(loading=boom)),
        "load: nothing is there": loads(f"{folder}/nothing"),
        # From here on one by one: a rank that waits for others in vain takes the process group with it.
        "load: no optimizer": loads(opt=None if odd else opt),
        "load: the state of data raises": loads(f"{folder}/data", data=_Stateful(loading=boom)),
        "save: a path that is none": saves(step=7, path=5 if odd else f"{folder}/good"),
        "save: no model": lambda: checkpoint.save(f"{folder}/good", None if odd else model, opt, step=7),
        "save: no optimizer but a text": lambda: checkpoint.save(
            f"{folder}/good", model, "opt" if odd else opt, step=7
        ),
        "save: data": saves(step=7, data=_Stateful() if odd else None),
    }


DISAGREEMENTS = [
    "save: a step that is none",
    "save: extra that cannot be saved",
    "save: data without a state",
    "save: a scheduler without a state",
    "save: keep_last of nothing",
    "save: a path below a file",
    "save: no optimizer",
    "save: another model",
    "load: strict, which does not fit",
    "load: a scheduler",
    "load: data",
    "load: a buffer",
    "load: the state of a scheduler raises",
    "load: nothing is there",
]
ONE_BY_ONE = [
    "load: no optimizer",
    "load: the state of data raises",
    "save: a path that is none",
    "save: no model",
    "save: no optimizer but a text",
    "save: data",
]


def _disagree(rank: int, world_size: int, folder: str, odd: int, names: list[str]) -> list[str]:
    """What is wrong, in words: after each call that is refused the checkpoint from before is whole, and loads."""
    from zero_optim import checkpoint
    from zero_optim.errors import CollectiveError

    model, opt = trained(0)
    checkpoint.save(f"{folder}/good", model, opt)
    checkpoint.save(f"{folder}/more", model, opt, scheduler=_Stateful(1))
    checkpoint.save(f"{folder}/data", model, opt, data=_Stateful(rank))
    expected = all_of(model, opt)
    calls = _disagreements(rank == odd, rank, folder, model, opt)
    wrong = []
    for name in names:
        try:
            calls[name]()
            wrong.append(f"{name}: rank {rank} did not raise")
        except CollectiveError as error:
            wrong.append(f"{name}: rank {rank} has waited for the time-out: {error}"[:300])
        except Exception as error:
            if not str(error):
                wrong.append(f"{name}: {error!r} says nothing")
        dist.barrier()
        if name.startswith("save"):
            other, its_opt = trained(1)
            loaded = checkpoint.load(f"{folder}/good", other, its_opt)
            if loaded.step != 1 or not same(all_of(other, its_opt), expected):
                wrong.append(f"{name}: the checkpoint from before is step {loaded.step}, or has other bits")
            its_opt.close()
    checkpoint.save(f"{folder}/good", model, opt, step=50)
    if sorted(os.listdir(f"{folder}/good")) != ["step-1", "step-50"]:
        wrong.append(f"left: {os.listdir(f'{folder}/good')}")
    return wrong


def test_ranks_that_disagree_all_raise(tmp_path):
    for wrong in run_ranks(3, _disagree, str(tmp_path), 1, DISAGREEMENTS):
        assert not wrong


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_ranks_that_disagree_all_raise_one_by_one(tmp_path, name):
    for wrong in run_ranks(2, _disagree, str(tmp_path), 1, [name], collective_timeout=4):
        assert not wrong


def _full_disk(rank: int, world_size: int, folder: str) -> tuple[str, list[str], list[str], int]:
    """The error of a save for which rank 1 has no room, what it left, what the next save left, and what loads."""
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model, opt = trained(0)
    checkpoint.save(folder, model, opt)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(folder, model, opt, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    step = checkpoint.load(folder, model, opt).step
    dist.barrier()
    checkpoint.save(folder, model, opt, step=3)
    return str(caught.value), sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/step-3")), step


def test_a_full_disk_of_one_rank(tmp_path):
    for message, left, files, step in run_ranks(2, _full_disk, str(tmp_path)):
        assert SECOND in message and "bytes" in message
        assert (left, files, step) == (["step-1", "step-3"], [INDEX, FIRST, SECOND], 1)


class _Dies:
    def state_dict(self) -> Any:
        os._exit(7)


def _save_and_die(rank: int, world_size: int, folder: str) -> None:
    from zero_optim import checkpoint

    model, opt = trained(0)
    checkpoint.save(folder, model, opt)
    checkpoint.save(folder, model, opt, step=2, data=_Dies() if rank == 1 else _Stateful())


def _load_only(rank: int, world_size: int, folder: str) -> tuple[int, bool]:
    from zero_optim import checkpoint

    model, opt = trained(0)
    other, its_opt = trained(1)
    step = checkpoint.load(folder, other, its_opt).step
    return step, same(all_of(other, its_opt), all_of(model, opt))


def test_a_rank_that_dies_leaves_the_checkpoint_from_before(tmp_path):
    with pytest.raises(RankFailure, match="died with exit code 7") as failure:
        run_ranks(2, _save_and_die, str(tmp_path), collective_timeout=5)
    assert "did not finish" not in str(failure.value)
    assert run_ranks(2, _load_only, str(tmp_path)) == [(1, True)] * 2


def _another_generators_state(rank: int, world_size: int, folder: str) -> tuple[str, bool, bool]:
    """The error of a load whose random state rank 1 cannot take; whether model, state and generator are as before."""
    from zero_optim import checkpoint
    from zero_optim.errors import ZeroOptimError

    model, opt = trained(0)
    states = {"torch": torch.zeros(3, dtype=torch.uint8), "python": random.getstate()}
    patched = mock.patch("zero_optim.checkpoint.saving.read_random_states", lambda device: states)
    with patched if rank == 1 else nullcontext():
        checkpoint.save(folder, model, opt)
    other, its_opt = trained(1)
    before, generator = all_of(other, its_opt), torch.get_rng_state()
    with pytest.raises(ZeroOptimError) as caught:
        checkpoint.load(folder, other, its_opt)
    found = str(caught.value), same(all_of(other, its_opt), before), torch.equal(torch.get_rng_state(), generator)
    opt.close()
    its_opt.close()
    return found


def test_a_random_state_that_one_rank_cannot_take_changes_nothing_on_any(tmp_path):
    for text, kept, drawn in run_ranks(2, _another_generators_state, str(tmp_path)):
        assert "a random number generator does not take the state that rank 1 has saved" in text
        assert kept and drawn
