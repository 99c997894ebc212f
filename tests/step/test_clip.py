"""The global norm of the averaged gradients, and clipping by it, as ``torch.nn.utils.clip_grad_norm_`` gives them."""

from __future__ import annotations

import math

import pytest
import torch
import zero_optim
from harness import run_ranks
from oracle import FP32_EPS, averages
from torch import Tensor
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_within,
    copies,
    make_gradients,
    make_parameters,
    named,
)

NORMS = (2.0, 1.0, math.inf)
ADAM = {"lr": 1e-2, "eps": 1e-1}  # a large eps lets the update feel the coefficient
FILLED = tuple(shape for shape in SHAPES if 0 not in shape)  # torch's norm of nothing is an error for inf


def _edited_after_a_clip(rank: int, world_size: int, stage: int, edit: str, editing: int) -> list[str]:
    """What each of three steps raises. Between clip and step of the second, the first ``editing`` ranks edit."""
    params = [torch.nn.Parameter(torch.ones(600)) for _ in range(3)]
    opt = zero_optim.ShardedAdamW(named(params), lr=0.1, stage=stage, bucket_cap_mb=0.002)
    raised = []
    for step in range(3):
        torch.stack([(p * (rank + 1)).sum() for p in params]).sum().backward()
        try:
            opt.clip_grad_norm_(1.0)
            if step == 1 and rank < editing:
                if edit == "drop":
                    params[1].grad = None
                else:
                    params[1].grad.zero_()
            opt.step()
            raised.append("")
        except zero_optim.RankMismatchError as error:
            raised.append(str(error))
        opt.zero_grad()
    opt.close()
    return raised


@pytest.mark.parametrize("edit", ["drop", "write"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_after_a_clip_on_one_rank_are_told_in_the_next_step(stage: int, edit: str) -> None:
    """To all ranks; and nobody waits for anybody before."""
    for *before, last in run_ranks(2, _edited_after_a_clip, stage, edit, 1):
        assert before == ["", ""]
        assert "'layer1.weight'" in last and "were dropped or written in place on some ranks" in last, last
    assert run_ranks(2, _edited_after_a_clip, stage, edit, 2) == [["", "", ""]] * 2


# -- any p, whatever the size of the gradients -------------------------------------------------------------------------

ALL_NORMS = (0.5, 1.0, 1.5, 2.0, 3.0, 8.0, 16.0, 64.0, math.inf)
SIZES = {"ordinary": 1.0, "huge": 2.0**33, "tiny": 2.0**-50}  # powers of two: they change no rounding
SCALERS = {"no scaler": None, "unscaled": True, "not unscaled": False}
SCALE = 2.0**16
SOME = (0, 2, 5)  # of the parameters


class Given(torch.nn.Module):
    """Its forward is a loss that gives each parameter the gradient that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(make_parameters(FILLED))

    def forward(self, grads: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.weights, grads, strict=True))


def _steps() -> list[tuple[float, bool]]:
    """Norm type, and whether some of the parameters are clipped or all."""
    return [(norm_type, some) for norm_type in ALL_NORMS for some in (False, True)]


def _sizes_and_scalers(turn: int) -> list[tuple[str, str]]:
    """Each size, and each scaler, once. Three turns in a row have all pairs."""
    scalers = list(SCALERS)
    return [(size, scalers[(number + turn) % len(scalers)]) for number, size in enumerate(SIZES)]


def _any_norm(
    rank: int, world_size: int, stage: int, turn: int
) -> dict[tuple[str, str], tuple[list[float], list[Tensor]]]:
    results = {}
    for size, scaling in _sizes_and_scalers(turn):
        model = torch.nn.Sequential(Given())
        model = zero_optim.shard_module(model, [Given]) if stage == 3 else model
        opt = zero_optim.ShardedAdamW(model.parameters(), **ADAM, stage=stage, bucket_cap_mb=TINY_CAP_MB)
        unscale = SCALERS[scaling]
        scaler = zero_optim.GradScaler(init_scale=SCALE, enabled=unscale is not None)
        norms = []
        for step, (norm_type, some) in enumerate(_steps()):
            grads = [g * SIZES[size] for g in make_gradients(make_parameters(FILLED), rank, step)]
            scaler.scale(model(grads)).backward()
            if unscale:
                scaler.unscale_(opt)
            chosen = [p for i, p in enumerate(model.parameters()) if i in SOME] if some else None
            norms.append(opt.clip_grad_norm_(1.0, norm_type, parameters=chosen))
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert opt.stats()["skipped_steps"] == 0
        with zero_optim.gather_parameters(model):
            results[size, scaling] = [float(norm) for norm in norms], copies(model.parameters())
        opt.close()
    return results


def _any_norm_expected(world_size: int, size: str, scaling: str) -> tuple[list[float], list[Tensor]]:
    """Norms are torch's in float64 of gradients of ordinary size, where they are right for every p; times the size."""
    params = make_parameters(FILLED)
    adamw = torch.optim.AdamW(params, **ADAM)
    norms, held = [], SCALE if SCALERS[scaling] is False else 1.0
    for step, (norm_type, some) in enumerate(_steps()):
        grads = averages([make_gradients(params, rank, step) for rank in range(world_size)])
        chosen = SOME if some else range(len(params))
        doubles = [torch.nn.Parameter(g.double()) for g in grads]
        for double in doubles:
            double.grad = double.detach().clone()
        norm = float(torch.nn.utils.clip_grad_norm_([doubles[i] for i in chosen], math.inf, norm_type))
        norms.append(norm * SIZES[size] * held)
        for index, (p, g) in enumerate(zip(params, grads, strict=True)):
            p.grad = g * SIZES[size] * (min(1.0, 1.0 / (norms[-1] + 1e-6)) if index in chosen else 1.0)
        adamw.step()
    return norms, copies(params)


@pytest.mark.parametrize(
    ("turn", "stage", "world_size"), [(0, 2, 1), (0, 0, 2), (1, 1, 2), (2, 2, 2), (0, 3, 2), (1, 3, 2)]
)
def test_any_norm_of_gradients_of_any_size(turn, stage, world_size):
    """|g|^64 leaves fp32 and float64 at sizes that gradients have; a loss scale makes that of |g|^8."""
    results = run_ranks(world_size, _any_norm, stage, turn, timeout=90)
    for size, scaling in results[0]:
        norms, params = _any_norm_expected(world_size, size, scaling)
        bounds = [FP32_EPS * len(norms) * (4 * p.abs() + 64 * ADAM["lr"]) for p in params]
        for result in results:
            own_norms, own = result[size, scaling]
            assert own_norms == pytest.approx(norms, rel=32 * FP32_EPS), (size, scaling)
            assert_within(own, params, bounds, f"{size}, {scaling}")
        assert all(result[size, scaling][0] == results[0][size, scaling][0] for result in results)


@pytest.mark.parametrize("norm_type", [p for p in ALL_NORMS if p not in NORMS])
@pytest.mark.parametrize(
    "values", [(3e38, 1e38, 5.0), (1e-45, 3e-45), (0.0, 1e-30), (0.0, 0.0), (1.0, math.inf), (0.0,)]
)
def test_a_norm_at_the_ends_of_fp32(values, norm_type):
    """Given by logarithms. Parts of a norm that are clipped by different factors add up as parameters do."""
    from zero_optim.step.clip import Norms

    exact = torch.tensor(values).double()
    logs = norm_type * exact.log()
    norm = float((logs.logsumexp(0) / norm_type).exp())
    parts = Norms.of([torch.tensor([value]) for value in values], norm_type)
    whole = Norms.of([torch.tensor(values)], norm_type)
    for got in (parts.together(norm_type).norm(norm_type), whole.norm(norm_type)):
        assert float(got) == pytest.approx(norm, rel=1e-12)
