"""An optimizer that is made on one stream and trains on another: who waits for what autograd adds up on the first.

It adds up a gradient on the stream on which the optimizer's hooks were made.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import run_ranks
from simulated_gpu.switch import LATE
from torch import nn
from zero_optim import ShardedAdamW, ZeroOptimError


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to("cuda")


@contextlib.contextmanager
def _on_another_stream():
    side, default = torch.cuda.Stream(), torch.cuda.default_stream()
    side.wait_stream(default)
    with torch.cuda.stream(side):
        yield
    default.wait_stream(side)


def _assigned(rank: int, world_size: int, stage: int) -> None:
    """Gradients that the program has made, to which a backward adds."""
    model = _model()
    opt = ShardedAdamW(model.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.002)
    with _on_another_stream():
        for _ in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model(torch.ones(4, 16, device="cuda")).square().mean().backward()
            opt.step()
            opt.zero_grad()
    opt.close()


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (2, 1), (2, 2)])
def test_gradients_of_the_program_are_freed_behind_what_adds_to_them(ranks: int, stage: int) -> None:
    run_ranks(ranks, _assigned, stage, simulated=LATE)


def _asleep(rank: int, world_size: int) -> str:
    """The first hook of the backward raises: autograd has added to the gradient by then."""
    model = _model()
    opt = ShardedAdamW(model.parameters(), lr=1e-2)
    said = ""
    with _on_another_stream():
        opt.sleep()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        try:
            model(torch.ones(4, 16, device="cuda")).square().mean().backward()
        except ZeroOptimError as error:
            said = str(error)
        opt.wake()
        opt.zero_grad(set_to_none=False)
    opt.close()
    return said


def test_a_gradient_at_which_the_library_raises_is_waited_for() -> None:
    (said,) = run_ranks(1, _asleep, simulated=LATE)
    assert "asleep" in said
