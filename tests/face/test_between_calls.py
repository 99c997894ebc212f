"""What users do between backward, unscale and step, beside what ``random_programs`` do: against torch on averages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from training_cases import assert_within

LR, EPS = 0.01, 1.0  # of the size of gradients: else AdamW would hide how they are scaled
STAGES = pytest.mark.parametrize("stage", [0, 1, 2])
WORLDS = pytest.mark.parametrize("world_size", [1, 2])


def _params(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.linspace(1, 2, 200 + 10 * index)) for index in range(count)]


def _ours(params: list[nn.Parameter], stage: int, **options: Any) -> zero_optim.ShardedAdamW:
    named = [(f"p{index}", parameter) for index, parameter in enumerate(params)]
    return zero_optim.ShardedAdamW(named, lr=LR, eps=EPS, stage=stage, bucket_cap_mb=0.001, **options)


def _torch(params: list[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=LR, eps=EPS)


def _loss(params: list[nn.Parameter], *factors: float | None) -> Tensor:
    """``factors[i]`` times params[i], squared; None leaves it out."""
    terms = [(p * p * f).sum() for p, f in zip(params, factors, strict=True) if f is not None]
    return torch.stack(terms).sum()


def _averaged(params: list[nn.Parameter], per_rank: list[tuple[float | None, ...]]) -> None:
    """The gradients that all ranks' backwards would average to."""
    for factors in per_rank:
        (_loss(params, *factors) / len(per_rank)).backward()


def _close(ours: list[Tensor], theirs: list[Tensor], steps: int) -> None:
    assert_within(ours, theirs, [torch.full_like(p, steps * 1e-6) for p in theirs], "parameters")


def _copies(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def _factors(rank: int) -> tuple[float, float | None, float]:
    """Only rank 0 uses the second parameter."""
    return 1.0 + rank, 3.0 if rank == 0 else None, 2.0


# -- loss scaling ------------------------------------------------------------------------------------------------------


def _scaled_ours(rank: int, world_size: int, stage: int) -> tuple:
    """A parameter thawed in the very step is unscaled too; a norm before unscaling does not stay."""
    params = _params()
    params[2].requires_grad_(False)
    opt, scaler = _ours(params, stage), zero_optim.GradScaler(init_scale=1024.0)
    norms = []
    for step in range(3):
        params[2].requires_grad_(step > 0)
        scaler.scale(_loss(params, *_factors(rank))).backward()
        norms.append(opt.clip_grad_norm_(1e9) / 1024)
        scaler.unscale_(opt)
        norms.append(opt.clip_grad_norm_(5.0))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        scaler = pickle.loads(pickle.dumps(scaler))
    return _copies(params), [float(n) for n in norms]


def _scaled_torch(world_size: int) -> tuple:
    params = _params()
    opt = _torch(params)
    norms = []
    for step in range(3):
        params[2].requires_grad_(step > 0)
        _averaged(params, [_factors(rank) for rank in range(world_size)])
        norms += [nn.utils.clip_grad_norm_(params, 1e9), nn.utils.clip_grad_norm_(params, 5.0)]
        opt.step()
        opt.zero_grad()
    return _copies(params), [float(n) for n in norms]


@WORLDS
@STAGES
def test_unscaling_reaches_a_thawed_parameter_and_the_next_norm(stage: int, world_size: int) -> None:
    theirs, expected = _scaled_torch(world_size)
    for params, norms in run_ranks(world_size, _scaled_ours, stage):
        _close(params, theirs, 4)
        assert norms == pytest.approx(expected, rel=1e-5)


def _overflow(rank: int, world_size: int) -> tuple[list[Tensor], float]:
    params = _params(1)
    opt, scaler = _ours(params, 2, skip_nonfinite=False), zero_optim.GradScaler(init_scale=4.0)
    scaler.scale((params[0] * torch.inf).sum()).backward()
    opt.clip_grad_norm_(1.0, parameters=params)
    scaler.step(opt)
    scaler.update()
    return _copies(params), scaler.get_scale()


@WORLDS
def test_an_overflow_after_clipping_some_parameters_is_skipped(world_size: int) -> None:
    for params, scale in run_ranks(world_size, _overflow):
        _close(params, _copies(_params(1)), 0)
        assert scale == 2.0


# -- rounds ------------------------------------------------------------------------------------------------------------


def _part_of_the_ranks(rank: int, world_size: int) -> list[Tensor]:
    """One optimizer over all ranks, one over two of them, and backwards that use one or the other."""
    everywhere, here = _params(4), _params(4)
    group = torch.distributed.new_group([0, 1])
    a = _ours(everywhere, 2)
    b = _ours(here, 2, process_group=group) if rank < 2 else None
    for _ in range(3):
        _loss(here if rank == 1 else everywhere, 1.0, 2.0, 3.0, 4.0).backward()
        for opt in (a, b) if b is not None else (a,):
            opt.step()
            opt.zero_grad()
    return _copies(everywhere + (here if rank < 2 else []))


def test_an_optimizer_over_part_of_the_ranks_of_another() -> None:
    everywhere, here = _params(4), _params(4)
    a, b = _torch(everywhere), _torch(here)
    for _ in range(3):
        _averaged(everywhere, [(1.0, 2.0, 3.0, 4.0), (0.0,) * 4, (1.0, 2.0, 3.0, 4.0)])
        _averaged(here, [(0.0,) * 4, (1.0, 2.0, 3.0, 4.0)])
        for opt in (a, b):
            opt.step()
            opt.zero_grad()
    for params in run_ranks(3, _part_of_the_ranks, one_order=False):
        _close(params, _copies(everywhere + here)[: len(params)], 4)


# -- names, graphs -----------------------------------------------------------------------------------------------------


def _named_late(rank: int, world_size: int) -> list[Any]:
    params = [nn.Parameter(torch.ones(300).half()) for _ in range(2)]
    opt = _ours(params, 2)
    for value in (4e4, 4e4):
        (params[1] * value).sum().backward()  # finite on each rank and in each backward, not in the sum
    opt.step()
    opt.zero_grad()
    opt.add_param_group({"params": [("new", nn.Parameter(torch.ones(3).half()))]})
    for _ in range(2):
        params[1].sum().backward()
        opt.step()
        opt.zero_grad()
    stats = opt.stats()
    return [stats["skipped_steps"], stats["non_finite"]]


def test_a_name_that_is_not_told_yet_survives_a_new_group() -> None:
    for skipped, first in run_ranks(2, _named_late):
        assert skipped == 1
        assert first["parameter"] == "p1" and first["step"] == 1 and first["rank"] in (0, 1)


def test_a_gradient_with_a_graph_keeps_it() -> None:
    ours, theirs = _params(2), _params(2)
    opts = (_ours(ours, 2), _torch(theirs))
    for params, opt in zip((ours, theirs), opts, strict=True):
        for _ in range(2):
            _loss(params, 1.0, 2.0).backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in params)
            for p in params:
                p.grad = None
            penalty.backward()
            opt.step()
            opt.zero_grad()
    _close(_copies(ours), _copies(theirs), 2)
