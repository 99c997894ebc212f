"""What users do between backward, clip, unscale and step: each program against torch on the averaged gradients."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def _compare(
    world_size: int,
    stage: int,
    program: Callable[..., Any],
    reference: Callable[..., Any],
    *,
    one_order: bool = True,
) -> list[Any]:
    """Run ``program(rank, world_size, stage)`` on ranks and ``reference(world_size)`` here; both give (parameters,
    numbers). Returns the numbers of ours, already compared."""
    theirs, expected = reference(world_size)
    results = run_ranks(world_size, program, stage, one_order=one_order)
    for params, numbers in results:
        _close(params, theirs, 4)
        assert numbers == pytest.approx(expected, rel=1e-5)
    return [numbers for _, numbers in results]


def _factors(rank: int) -> tuple[float, float | None, float]:
    """Only rank 0 uses the second parameter."""
    return 1.0 + rank, 3.0 if rank == 0 else None, 2.0


@dataclass(frozen=True)
class Side:
    """What a program is run on: a rank, or one process that has the averages (``alone``)."""

    params: list[nn.Parameter]
    opt: Any
    ranks: Sequence[int]
    alone: bool

    def backward(self) -> None:
        _averaged(self.params[:3], [_factors(rank) for rank in self.ranks])

    def clip(self, limit: float, of: list[nn.Parameter] | None = None) -> Tensor:
        if self.alone:
            return nn.utils.clip_grad_norm_(of or self.params, limit)
        return self.opt.clip_grad_norm_(limit, parameters=of)


def _on_a_rank(rank: int, world_size: int, stage: int, program: Callable[[Side], list[Any]]) -> tuple:
    params = _params()
    numbers = program(Side(params, _ours(params, stage), [rank], False))
    return _copies(params), [float(number) for number in numbers]


def _compare_sides(world_size: int, stage: int, program: Callable[[Side], list[Any]]) -> None:
    params = _params()
    expected = program(Side(params, _torch(params), range(world_size), True))
    for found, numbers in run_ranks(world_size, _on_a_rank, stage, program):
        _close(found, _copies(params), 4)
        assert numbers == pytest.approx([float(number) for number in expected], rel=1e-5)


# -- gradients dropped between clip and step ---------------------------------------------------------------------------


def _drop(side: Side) -> list[Any]:
    norms = []
    for _ in range(2):
        side.backward()
        norms.append(side.clip(5.0))
        side.params[1].grad = None
        norms.append(side.clip(1e9))
        side.params[2].grad = None
        side.opt.step()
        side.opt.zero_grad()
    return norms


@WORLDS
@STAGES
def test_a_gradient_dropped_after_clipping_is_dropped_on_every_rank(stage: int, world_size: int) -> None:
    _compare_sides(world_size, stage, _drop)


# -- parameters that come between clip and step ------------------------------------------------------------------------


def _add(side: Side) -> list[Any]:
    for step in range(3):
        side.backward()
        side.clip(1e-3, side.params[:2])
        if step < 2:
            side.params.append(nn.Parameter(torch.ones(40), requires_grad=step == 0))
            added = side.params[-1]
            side.opt.add_param_group({"params": [added if side.alone else (f"p{3 + step}", added)]})
        side.opt.step()
        side.opt.zero_grad()
    return []


@WORLDS
@STAGES
def test_a_group_added_after_clipping_leaves_the_clip(stage: int, world_size: int) -> None:
    _compare_sides(world_size, stage, _add)


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
    _compare(world_size, stage, _scaled_ours, _scaled_torch)


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


def _unequal_ours(rank: int, world_size: int, stage: int) -> tuple:
    """After the synchronised backward, one under no_sync that only rank 0's parameters are in."""
    params, elsewhere = _params(), nn.Parameter(torch.ones(3))
    opt = _ours(params, stage)
    for _ in range(3):
        _loss(params, *_factors(rank)).backward()
        with opt.no_sync():
            (_loss(params, None, None, 1.0) if rank == 0 else elsewhere.sum()).backward()
        opt.step()
        opt.zero_grad()
    return _copies(params), []


def _unequal_torch(world_size: int) -> tuple:
    params = _params()
    opt = _torch(params)
    for _ in range(3):
        _averaged(params, [_factors(rank) for rank in range(world_size)])
        _averaged(params, [(None, None, 1.0 / world_size)])
        opt.step()
        opt.zero_grad()
    return _copies(params), []


@WORLDS
@STAGES
def test_a_no_sync_backward_that_only_one_rank_has_part_in(stage: int, world_size: int) -> None:
    _compare(world_size, stage, _unequal_ours, _unequal_torch)


def _both_ours(rank: int, world_size: int, stage: int) -> tuple:
    """Two optimizers, two synchronised backwards a step, in which the ranks meet them in opposite order; then calls
    that communicate, on one of them, while the other's round is open."""
    first, second = _params(4), _params(4)
    a, b = _ours(first, stage), _ours(second, stage)
    factors = (1.0, 2.0, 3.0, 4.0)
    for step in range(3):
        for _ in range(2):
            x, y = (first, second) if rank == 0 else (second, first)
            (_loss(x, *factors) + 2 * _loss(y, *factors)).backward()
        b.step()
        if step == 1:
            a.observe()
        if step == 2:
            a.add_param_group({"params": [("new", nn.Parameter(torch.ones(3)))]})
            zero_optim.full_state_dict(a)
        a.step()
        a.zero_grad()
        b.zero_grad()
    return _copies(first + second), []


def _both_torch(world_size: int) -> tuple:
    params = _params(4) + _params(4)
    opt = _torch(params)
    factors = (1.0, 2.0, 3.0, 4.0)
    for _ in range(3):
        for _ in range(2):
            for rank in range(world_size):
                scales = (1, 2) if rank == 0 else (2, 1)
                of_rank = [s * f / world_size for s in scales for f in factors]
                _loss(params, *of_rank).backward()
        opt.step()
        opt.zero_grad()
    return _copies(params), []


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_optimizers_and_two_backwards(stage: int, world_size: int) -> None:
    _compare(world_size, stage, _both_ours, _both_torch, one_order=False)


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
