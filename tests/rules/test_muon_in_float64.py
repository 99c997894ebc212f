"""Each update of ``ShardedMuon`` against the same in float64: it differs by what bf16 makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import oracle_float64
import pytest
import torch
import zero_optim
from cells import slow
from harness import run_ranks
from sharded_cases import Given, GivenNet
from torch import Tensor, nn
from training_cases import make_gradients

RUNS = (((24, 40), (72, 8), (2, 12, 20)), ((6, 4, 3, 3), (36, 30)))
ELEMENTS = sum(math.prod(shape) for run in RUNS for shape in run)
EDITED = 1  # of the parameters
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "bucket_cap_mb": 0.005}


def _make(stage: int, dtype: torch.dtype, **options: Any) -> tuple[GivenNet, zero_optim.ShardedMuon]:
    model = GivenNet(RUNS, dtype)
    if stage == 3:
        zero_optim.shard_module(model, (Given,))
    *whole, cut = model.named_parameters()
    groups = [{"params": whole}, {"params": [cut], "view": {"rows": 3}, "lr": torch.tensor(0.03)}]
    return model, zero_optim.ShardedMuon(groups, stage=stage, **{**OPTIONS, **options})


def _gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor | None]:
    return [*make_gradients([torch.empty(shape, dtype=dtype) for run in RUNS for shape in run], rank, step)]


def _step(model: GivenNet, opt: Any, rank: int, step: int, overflow: int = -1) -> None:
    """Of every second step one gradient is absent. ``overflow``: the step in which one is not finite on rank 0."""
    grads = _gradients(rank, step, opt.param_groups[0]["params"][0].dtype)
    if step % 2:
        grads[2] = None
    if step == overflow and rank == 0:
        grads[0][0, 0] = math.inf
    model(grads).backward()
    opt.step()
    opt.zero_grad()


# -- a right optimizer -------------------------------------------------------------------------------------------------


def _eventful(rank: int, world_size: int, stage: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Changed options, views and layouts, edited parameters, loaded states, a skipped step."""
    model, opt = _make(stage, dtype, skip_nonfinite=True, **options)
    first = opt.param_groups[0]
    events: dict[int, Callable[[], object]] = {
        2: lambda: first.update(lr=1e-3, weight_decay=0.0),
        3: lambda: first.update(momentum=0.5, nesterov=False),
        4: lambda: opt.param_groups[1].update(view={"columns": (20, 10)}),
        6: lambda: opt.load_state_dict(opt.state_dict()),
        7: lambda: zero_optim.load_full_state_dict(opt, zero_optim.full_state_dict(opt)),
    }
    if stage < 3:
        events[1] = lambda: list(model.parameters())[EDITED].detach().mul_(1.5)
        events[8] = lambda: opt.engine.reducer.lay_out([*reversed(opt.engine.reducer.layout.order)])
    with oracle_float64.watch(opt) as watching:
        for step in range(10):
            events.get(step, lambda: None)()
            with opt.no_sync():
                model(_gradients(rank, 100 + step, dtype)).backward()
            if step == 9:
                opt.clip_grad_norm_(0.5)
            _step(model, opt, rank, step, overflow=5)
        report = watching.report()
    assert opt.stats()["skipped_steps"] == 1
    assert report.compared == 10 * ELEMENTS * (world_size if stage == 0 else 1)
    assert report.unrounded == 0 and report.elements.of_bound <= 1, report
    assert 0 < report.matrices.of_bound < 1, report
    opt.close()


FORMS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {"max_grad_norm": 0.5}),
    (torch.bfloat16, {"master": "split", "state_dtype": "int8"}),
    (torch.bfloat16, {"master": "split8", "state_dtype": "bf16", "ema_decay": 0.9}),
    (torch.bfloat16, {"state_dtype": "int8", "state_offload": "paged", "device_budget": 0}),
]


def _some_forms(rank: int, world_size: int, stage: int, forms: list[tuple[torch.dtype, dict[str, Any]]]) -> None:
    for dtype, options in forms:
        _eventful(rank, world_size, stage, dtype, options)


# Each stage meets a half of the forms in ``make test``, and each form two of the stages.
@pytest.mark.parametrize(
    "world_size, stage, half",
    [
        pytest.param(ranks, stage, half, marks=() if half == stage // 2 % 2 else slow)
        for ranks, stage in ((1, 2), (2, 0), (2, 1), (3, 3))
        for half in (0, 1)
    ],
)
def test_each_update_is_that_in_float64(world_size: int, stage: int, half: int) -> None:
    run_ranks(world_size, _some_forms, stage, FORMS[half::2])


@pytest.mark.parametrize("broken, rate", [(0.0, 0.02), (1.0, 0.0), (math.nan, 0.02), (math.inf, 0.02)])
def test_zeros_a_rate_of_zero_and_what_is_not_finite_are_what_the_rule_says(broken: float, rate: float) -> None:
    """A matrix that is not finite has no update that is: so it is in all of it, and in no other."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((2, 12, 20), (16, 16))]
    opt = zero_optim.ShardedMuon(params, lr=rate, skip_nonfinite=False)
    with oracle_float64.watch(opt) as watching:
        for _ in range(2):
            params[0].grad, params[1].grad = torch.randn(2, 12, 20), torch.full((16, 16), broken)
            params[0].grad[1, 0, 0] *= broken
            opt.step()
        report = watching.report()
    assert report.matrices.of_bound < 1 and report.elements.of_bound <= 1, report
    assert int(params[0].isfinite().sum()) == (480 if broken in (0, 1) else 240)
    opt.close()
