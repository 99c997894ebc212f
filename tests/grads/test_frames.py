"""From the hook that autograd calls to ``torch.distributed``: how many frames of the package are on the stack."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

MOST = 5
COLLECTIVES = ("reduce_scatter_tensor", "scatter")  # NCCL's, and what gloo's reduce-scatter consists of


def _names_of_frames(package: Path) -> list[str]:
    """The functions of the package on the stack, the caller first."""
    names = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        comprehension = frame.f_code.co_name == "<listcomp>"  # a frame of its own before Python 3.12
        if package in Path(frame.f_code.co_filename).parents and not comprehension:
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return names


def _in_a_hook(rank: int, world_size: int, stage: int) -> list[list[str]]:
    """The stacks of the collectives that hooks issue in the third step, when buckets are launched within backward."""
    import zero_optim

    package = Path(zero_optim.__file__).parent
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), stage=stage, bucket_cap_mb=0.002)
    stacks: list[list[str]] = []

    def recorded(collective: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            stacks.append(_names_of_frames(package))
            return collective(*args, **kwargs)

        return call

    for step in range(3):
        loss = model(torch.ones(2, 32)).sum()
        if step == 2:
            patched = {name: recorded(getattr(dist, name)) for name in COLLECTIVES}
            with mock.patch.multiple(dist, **patched):
                loss.backward()
        else:
            loss.backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    return [stack for stack in stacks if "Reducer._on_ready" in stack]


@pytest.mark.parametrize("stage", [1, 2])
def test_few_frames_lie_between_a_hook_and_its_collective(stage: int):
    for stacks in run_ranks(2, _in_a_hook, stage):
        assert stacks
        for stack in stacks:
            assert stack[-1] == "Reducer._on_ready" and len(stack) <= MOST, stack
