"""A backward raised on one rank, and the user zeroes a part of the gradients before ``step`` completes its round."""

from __future__ import annotations

import contextlib

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from training_cases import Planned, raise_in_backward

SIZES = (1200, 100, 100)  # the first has a bucket to itself, the others share one
LR = 0.125


def _backward(params: list[nn.Parameter], scale: float, *, raises: bool) -> None:
    """Gradients come in the order of the parameters: all are ``scale``. It raises before the last one."""
    x = torch.ones((), requires_grad=True)
    x = x + (params[2] * scale).sum()
    x = raise_in_backward(x) if raises else x
    x = x * 1.0 + (params[1] * scale).sum()
    (x * 1.0 + (params[0] * scale).sum()).backward()


def _program(rank: int, world_size: int, stage: int, zeroed: int, to_none: bool) -> list[float]:
    import zero_optim

    params = [nn.Parameter(torch.zeros(size)) for size in SIZES]
    opt = zero_optim.ShardedAdamW(params, lr=LR, eps=0.25, weight_decay=0.0, stage=stage, bucket_cap_mb=0.001)
    for _ in range(2):
        _backward(params, 1.0, raises=False)
        opt.step()
        opt.zero_grad()
    opt.state = {}  # begin anew, with the layout and the counts that were learned
    with torch.no_grad():
        for parameter in params:
            parameter.zero_()
    try:
        _backward(params, 1.0 + 2 * rank, raises=rank == 0)
    except Planned:
        assert params[1].grad is not None, "it has come"
    nn.ParameterList([params[zeroed]]).zero_grad(set_to_none=to_none)
    opt.step()
    values = [float(parameter.detach()[0]) for parameter in params]
    opt.close()
    return values


def _step(gradient: float) -> float:
    """The first step of AdamW from 0, with eps 0.25."""
    return -LR * gradient / (abs(gradient) + 0.25)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_other_gradients_stay(stage: int, to_none: bool):
    """The head alone is zeroed, whose bucket had left on both ranks."""
    for values in run_ranks(2, _program, stage, 0, to_none):
        assert values == pytest.approx([0.0, _step(2.0), _step(1.5)], abs=1e-6)


class _Chain(nn.Module):
    """Units called one after the other; a backward comes to the last first."""

    def __init__(self, raises: bool = False) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.raises = raises

    def forward(self, x: Tensor) -> Tensor:
        for index, unit in enumerate(self.units):
            x = unit(x)
            x = raise_in_backward(x) if self.raises and index == 1 else x
        return x.sum()


def _between_forward_and_backward(rank: int, world_size: int, overlap: bool, to_none: bool) -> list[Tensor]:
    """Gradients zeroed after the forward that has joined the raised backward's gathers; then its backward."""
    import zero_optim

    torch.manual_seed(0)
    model = _Chain()
    zero_optim.shard_module(model, (nn.Linear,))
    opt = zero_optim.ShardedAdamW(model.parameters(), lr=LR, eps=0.25, weight_decay=0.0, overlap_grad_reduce=overlap)
    x = torch.ones(1, 16)
    for _ in range(2):
        model(x).backward()
        opt.zero_grad()
    model.raises = rank == 0
    with contextlib.suppress(Planned):
        model(x * 5.0).backward()
    model.raises = False
    loss = model(x)
    model.zero_grad(set_to_none=to_none)
    loss.backward()
    opt.step()
    with zero_optim.gather_parameters(model):
        values = [parameter.detach().clone() for parameter in model.parameters()]
    opt.close()
    return values


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_zeroed_between_a_forward_and_its_backward(overlap: bool, to_none: bool):
    """Only the last backward counts, whose gradients are the same on both ranks."""
    torch.manual_seed(0)
    model = _Chain()
    plain = torch.optim.AdamW(model.parameters(), lr=LR, eps=0.25, weight_decay=0.0)
    model(torch.ones(1, 16)).backward()
    plain.step()
    for values in run_ranks(2, _between_forward_and_backward, overlap, to_none):
        assert all(map(torch.allclose, values, model.parameters()))
