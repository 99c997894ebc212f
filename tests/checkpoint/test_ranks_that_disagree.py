"""Ranks that make different calls: all raise, and the checkpoint from before stays whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare import same
from harness import run_ranks
from small_jobs import Stateful, all_of, trained
from torch import nn
from zero_optim import checkpoint
from zero_optim.errors import CollectiveError


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

    def saves(**options: Any) -> Callable[[], Any]:
        return lambda: checkpoint.save(options.pop("path", f"{folder}/good"), model, opt, **options)

    def loads(path: Any = f"{folder}/good", model: nn.Module = model, opt: Any = opt, **options: Any) -> Any:
        return lambda: checkpoint.load(path, model, opt, **options)

    return {
        "save: a step that is none": saves(step="x" if odd else 6),
        "save: extra that cannot be saved": saves(step=7, extra=_function if rank == 0 else {}),
        "save: data without a state": saves(step=7, data=5 if odd else Stateful()),
        "save: a scheduler without a state": saves(step=7, scheduler=5 if odd else Stateful()),
        "save: keep_last of nothing": saves(step=7, keep_last=0 if odd else 1),
        "save: a path below a file": saves(step=7, path=f"{folder}/good/step-1/index.json/below"),
        "save: no optimizer": lambda: checkpoint.save(f"{folder}/good", model, None if odd else opt, step=7),
        "save: another model": lambda: checkpoint.save(
            f"{folder}/good", nn.Linear(2, 2) if odd else nn.Linear(2, 3), step=7
        ),
        "load: strict, which does not fit": loads(scheduler=Stateful(), strict=odd),
        "load: a scheduler": loads(scheduler=Stateful() if odd else None),
        "load: data": loads(data=Stateful() if odd else None),
        "load: a buffer": loads(model=_Growing(model, odd), opt=None),
        "load: the state of a scheduler raises": loads(f"{folder}/more", scheduler=Stateful(refuses=odd)),
        "load: nothing is there": loads(f"{folder}/nothing"),
        "load: no optimizer": loads(opt=None if odd else opt),
        "load: the state of data raises": loads(f"{folder}/data", data=Stateful(refuses=odd)),
        "save: a path that is none": saves(step=7, path=5 if odd else f"{folder}/good"),
        "save: no model": lambda: checkpoint.save(f"{folder}/good", None if odd else model, opt, step=7),
        "save: no optimizer but a text": lambda: checkpoint.save(
            f"{folder}/good", model, "opt" if odd else opt, step=7
        ),
        "save: data": saves(step=7, data=Stateful() if odd else None),
    }


ONE_BY_ONE = [  # a rank that waits for others in vain takes the process group with it
    "load: no optimizer",
    "load: the state of data raises",
    "save: a path that is none",
    "save: no model",
    "save: no optimizer but a text",
    "save: data",
]


def _disagree(rank: int, world_size: int, folder: str, odd: int, *names: str) -> list[str]:
    """What is wrong, in words: after each call that is refused the checkpoint from before is whole, and loads. Without
    ``names`` it makes all calls but those of ONE_BY_ONE."""
    model, opt = trained(0)
    checkpoint.save(f"{folder}/good", model, opt)
    checkpoint.save(f"{folder}/more", model, opt, scheduler=Stateful(1))
    checkpoint.save(f"{folder}/data", model, opt, data=Stateful(rank))
    expected = all_of(model, opt)
    calls = _disagreements(rank == odd, rank, folder, model, opt)
    wrong = []
    for name in names or [name for name in calls if name not in ONE_BY_ONE]:
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
    for wrong in run_ranks(3, _disagree, str(tmp_path), 1):
        assert not wrong


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_ranks_that_disagree_all_raise_one_by_one(tmp_path, name):
    for wrong in run_ranks(2, _disagree, str(tmp_path), 1, name, collective_timeout=4):
        assert not wrong
