"""A script that raises while optimizers are alive prints the user's traceback, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from script_ranks import run_script

SCRIPT = """
import contextlib, os, sys
import torch
import torch.distributed as dist
import zero_optim
from torch import nn


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("the user's own error")


def layers():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


rank, world_size, store, where = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
stages = [2]
if world_size > 1:
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world_size)
    stages = [0, 1, 2, 3]
models = [layers() for _ in stages]
if 3 in stages:
    zero_optim.shard_module(models[-1], units=(nn.Linear,))
opts = [zero_optim.ShardedAdamW(m.named_parameters(), stage=s, bucket_cap_mb=1e-4) for m, s in zip(models, stages)]
if where == "step":
    os.kept = opts  # as a library may keep them: they outlive the modules of torch


def loss(model, boom=False):
    x = model[0](torch.ones(2, 8))
    return model[2](model[1](Boom.apply(x) if boom else x)).sum()


def train(opts):
    for _ in range(2):
        for model, opt in zip(models, opts):
            loss(model).backward()
            opt.step()
            opt.zero_grad()
    for model in models:
        loss(model).backward()
    if where == "backward":
        for model in models[:-1]:
            with contextlib.suppress(ArithmeticError):
                loss(model, boom=True).backward()
        loss(models[-1], boom=True).backward()
    raise ArithmeticError("the user's own error")


train(opts)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "world_size"), [("step", 2), ("backward", 2)])
def test_an_error_that_nobody_catches_is_all_that_is_printed(where: str, world_size: int, tmp_path: Path) -> None:
    """Before a step, or within a backward whose reductions have begun to leave; at every stage."""
    for code, output, errors in run_script(SCRIPT, world_size, tmp_path, where):
        errors = re.sub(r"^\[rank\d\]: ?", "", errors, flags=re.MULTILINE)  # torch's own hook says whose it is
        traceback = r"Traceback \(most recent call last\):\n(  .*\n)+ArithmeticError: the user's own error\n"
        assert re.fullmatch(traceback, errors), errors
        assert (code, output) == (1, "")
