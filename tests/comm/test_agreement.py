"""Ranks that disagree, bad arguments and closed optimizers: an error on every rank, in words, and never a hang."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import nn
from training_cases import TINY_CAP_MB, copies, error_of, linear_backward, make_gradients, make_parameters, named
from zero_optim import RankMismatchError
from zero_optim.comm.together import values_of_one_call

SHAPES = ((8, 4), (5,), (3, 3))


Case = Callable[[int], tuple[Any, dict[str, Any]]]
"""What a rank gives the constructor: parameters and options."""


def _named(rank: int, **options: Any) -> tuple[Any, dict[str, Any]]:
    return named(make_parameters(SHAPES)), options


def _grouped(rank: int) -> tuple[Any, dict[str, Any]]:
    params = make_parameters(SHAPES)
    return [{"params": params[: rank + 1]}, {"params": params[rank + 1 :], "lr": 0.1}], {}


DISAGREEMENTS: dict[str, Case] = {
    "shape": lambda rank: (named(make_parameters(SHAPES if rank == 0 else ((4, 8), *SHAPES[1:]))), {}),
    "groups": _grouped,
    "stage": lambda rank: _named(rank, stage=1 if rank == 0 else 2),
    "cap": lambda rank: _named(rank, bucket_cap_mb=25.0 if rank == 0 else TINY_CAP_MB),
    "reduce dtype": lambda rank: _named(rank, grad_reduce_dtype=None if rank == 0 else torch.bfloat16),
    "norm": lambda rank: _named(rank, max_grad_norm=None if rank == 0 else 1.0),
}


def _construct_all(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """Name and text of the error that each case raises here. A good optimizer must work right after it."""
    import zero_optim

    found = {}
    for name, case in DISAGREEMENTS.items():
        params, options = case(rank)
        flat = [p for group in params for p in group["params"]] if name == "groups" else [p for _, p in params]
        before = copies(flat)
        found[name] = error_of(lambda params=params, options=options: zero_optim.ShardedAdamW(params, **options))
        assert all(map(torch.equal, flat, before)) or rank > 0, "a failed constructor changed rank 0's parameters"
        assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in flat), "it left a hook"
        good = make_parameters(SHAPES)
        opt = zero_optim.ShardedAdamW(good)
        linear_backward(good, make_gradients(good, rank, 0))
        opt.step()
        opt.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_disagree_all_raise(world_size):
    for rank, errors in enumerate(run_ranks(world_size, _construct_all, timeout=40)):
        for name, (kind, text) in errors.items():
            assert kind == "RankMismatchError" and "rank" in text, f"{name} on rank {rank}: {kind or 'nothing'} {text}"
            assert "layer0.weight" in text or name != "shape"


# -- the order of parameters without names -----------------------------------------------------------------------------


def _unnamed(rank: int, world_size: int, how: str, stage: int) -> str:
    """What the constructor raises, or ``add_param_group``, where the last rank has another order."""
    import zero_optim

    torch.manual_seed(rank if "seeds" in how else 0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2))
    for layer in model[:2]:
        layer.weight.requires_grad_("frozen" not in how)
    groups = [[*model[0].parameters()], [*model[1].parameters(), model[2].weight]]
    if rank == world_size - 1 and "swapped" in how:
        groups = [[*model[1].parameters()], [*model[0].parameters(), model[2].weight]]
    if rank == world_size - 1 and "added" in how:
        groups[1] = [groups[1][2], groups[1][1], groups[1][0]]
    before = [p.detach().clone() for p in model.parameters()]
    opt = zero_optim.ShardedAdamW(model[3].parameters(), stage=stage)
    try:
        if "added" in how:
            opt.add_param_group({"params": groups[0]})
            opt.add_param_group({"params": groups[1]})
        else:
            zero_optim.ShardedAdamW([{"params": group} for group in groups], stage=stage)
    except zero_optim.RankMismatchError as error:
        assert all(map(torch.equal, before, model.parameters()))  # nothing was broadcast
        assert len(opt.param_groups) == ("added" in how) + 1
        opt.add_param_group({"params": model[2].bias})  # and it goes on
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "stage", "ranks"),
    [
        ("same", 2, 2),
        ("swapped", 0, 2),
        ("swapped", 2, 3),
        ("swapped, frozen", 1, 2),
        ("added", 2, 2),
        ("swapped, other seeds", 2, 2),  # nothing shows it
    ],
)
def test_unnamed_parameters_in_another_order(how: str, stage: int, ranks: int) -> None:
    seen = how != "same" and "seeds" not in how
    for raised in run_ranks(ranks, _unnamed, how, stage):
        assert (f"the values of another parameter on rank {ranks - 1} than on rank 0" in raised) == seen == bool(raised)


def _not_dense(rank: int, world_size: int) -> list[str]:
    """What the constructor raises for unnamed parameters with gaps, or elements that share memory."""
    import zero_optim

    torch.manual_seed(0)
    wide = torch.randn(8, 6)
    wide[:, 1::2] = rank  # what is in the gaps is no parameter's
    own = [wide[:4, ::2], wide[4:, ::2]]
    raised = []
    for given in (own, own[:: -1 if rank else 1], [torch.zeros(1).expand(300), torch.ones(2, 3)]):
        try:
            zero_optim.ShardedAdamW([nn.Parameter(tensor) for tensor in given]).close()
            raised.append("")
        except zero_optim.RankMismatchError as error:
            raised.append(str(error))
    return raised


def test_unnamed_parameters_that_are_not_dense() -> None:
    for same, reversed_, expanded in run_ranks(2, _not_dense):
        assert not same and not expanded
        assert "has the values of another parameter on rank 1" in reversed_


def _close(rank: int, world_size: int, stage: int) -> None:
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(params, stage=stage)
    linear_backward(params, make_gradients(params, rank, 0))
    opt.step()
    opt.zero_grad()
    linear_backward(params, make_gradients(params, rank, 1))
    opt.close()
    opt.close()
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in params)

    for p in params:
        p.grad = None
    local = make_gradients(params, rank, 2)
    linear_backward(params, local)  # autograd's own again
    assert all(torch.equal(p.grad, g) for p, g in zip(params, local, strict=True))
    for p in params:
        p.grad = None
    again = zero_optim.ShardedAdamW(params, stage=stage)
    linear_backward(params, make_gradients(params, rank, 3))
    again.step()
    again.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_closed_optimizer_lets_go_of_the_parameters(stage, world_size):
    run_ranks(world_size, _close, stage)


def _unraisable(rank: int, world_size: int) -> list[str]:
    """What destructors complain about after failed constructors and dropped optimizers."""
    import zero_optim

    complaints: list[str] = []
    sys.unraisablehook = lambda args: complaints.append(f"{args.object}: {args.exc_value}")
    try:
        for options in ({"lr": -1.0}, {"stage": 9}, {"betas": (1.5, 0.9)}, {"no_such_argument": 1}, {}):
            try:
                opt = zero_optim.ShardedAdamW(make_parameters(SHAPES), **options)
            except (ValueError, TypeError):
                continue
            linear_backward(opt.param_groups[0]["params"], make_gradients(opt.param_groups[0]["params"], rank, 0))
            del opt
        gc.collect()
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    return complaints


def test_destructors_are_quiet():
    assert run_ranks(2, _unraisable) == [[], []]


def test_values_are_of_one_call_of_one_optimizer():
    assert values_of_one_call([4, 6], [("save", "1", 5), ("save", "1", 6)]) == [5, 6]
    with pytest.raises(RankMismatchError, match="rank 4 is in save, rank 6 in load"):
        values_of_one_call([4, 6], [("save", "1", 5), ("load", "1", 6)])
    with pytest.raises(RankMismatchError, match="ranks 4 and 8 are in save of different optimizers"):
        values_of_one_call([4, 6, 8], [("save", "1", 5), ("save", "1", 6), ("save", "2", 7)])
