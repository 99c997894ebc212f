"""A script that raises while optimizers are alive prints the user's traceback, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


where, rank, world_size, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
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


def run(where: str, world_size: int, directory: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each rank."""
    script = directory / "script.py"
    script.write_text(SCRIPT)
    # Warnings are not what this is about. PyTorch's C++ code warns of its own as processes leave at different times.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), where, str(rank), str(world_size), str(directory / f"store {where}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize(("where", "world_size"), [("step", 1), ("step", 2), ("backward", 2)])
def test_an_error_that_nobody_catches_is_all_that_is_printed(where: str, world_size: int, tmp_path: Path) -> None:
    """Before a step, or within a backward whose reductions have begun to leave; at every stage."""
    for code, output, errors in run(where, world_size, tmp_path):
        errors = re.sub(r"^\[rank\d\]: ?", "", errors, flags=re.MULTILINE)  # torch's own hook says whose it is
        traceback = r"Traceback \(most recent call last\):\n(  .*\n)+ArithmeticError: the user's own error\n"
        assert re.fullmatch(traceback, errors), errors
        assert (code, output) == (1, "")
