"""Each update of ``ShardedMuon`` against the same in float64: it differs by what bf16 makes of it, and a wrong one by
more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import oracle_float64
import pytest
import torch
import zero_optim
from cells import slow
from harness import run_ranks
from oracle_float64 import Report, assert_rounding_alone, muon_matrices
from sharded_cases import Given, GivenNet
from torch import Tensor, nn
from training_cases import make_gradients
from zero_optim.rules.muon import Muon, scale_of
from zero_optim.rules.newton_schulz import POLAR_EXPRESS, QUINTIC, orthogonalized

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


# -- exact arithmetic --------------------------------------------------------------------------------------------------


def _of_rank(shape: tuple[int, int], rank: int, generator: torch.Generator) -> Tensor:
    left, right = (torch.randn(shape[side], rank, generator=generator).double() for side in (0, 1))
    return left @ right.mT


def _of_condition(shape: tuple[int, int], condition: float, generator: torch.Generator) -> Tensor:
    u, s, vt = torch.linalg.svd(torch.randn(shape, generator=generator).double(), full_matrices=False)
    return u * torch.logspace(0, -math.log10(condition), len(s), dtype=torch.float64) @ vt


KINDS: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "random": lambda shape, generator: torch.randn(shape, generator=generator).double(),
    "rank 1": lambda shape, generator: _of_rank(shape, 1, generator),
    "rank 4": lambda shape, generator: _of_rank(shape, 4, generator),
    "condition 1e2": lambda shape, generator: _of_condition(shape, 1e2, generator),
    "condition 1e8": lambda shape, generator: _of_condition(shape, 1e8, generator),
}
GROUP = {"lr": 0.02, "view": None}


@pytest.mark.parametrize("form", [False, True], ids=["plain", "gram"])
@pytest.mark.parametrize("iteration", [{}, {"ns_coefficients": POLAR_EXPRESS, "ns_steps": 6}], ids=["quintic", "polar"])
def test_the_exact_update_is_the_iteration_in_float64_and_the_real_one_is_within_the_bounds(iteration, form) -> None:
    """The bounds hold for whatever matrix: by the rounding of each itself."""
    generator = torch.Generator().manual_seed(0)
    rule = Muon(**iteration, ns_gram=form, adjust_lr_fn="spectral_unclamped")
    of_steps = iteration.get("ns_coefficients", [QUINTIC] * 5)
    for (kind, make), shape in itertools.product(KINDS.items(), [(1, 9), (20, 20), (48, 16), (30, 200), (128, 96)]):
        matrix = make(shape, generator) / 100
        x = matrix / matrix.norm()
        for a, b, c in of_steps:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        torch.testing.assert_close(oracle_float64.muon_exactly(rule, matrix), x, rtol=1e-6, atol=1e-7)
        rate = 0.02 * scale_of(shape, "spectral_unclamped")
        live = rate * orthogonalized(matrix.float(), of_steps, len(of_steps), 1e-7, form).double()
        nothing = torch.zeros_like(live)
        assert 0 < muon_matrices(rule, matrix, live, nothing, GROUP) < 1, (kind, shape)
        for wrong in (2 * live, live.flip(0, 1), -live):
            assert muon_matrices(rule, matrix, wrong, nothing, GROUP) > 1, (kind, shape)


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
    (torch.bfloat16, {"master": "split8", "state_dtype": "bf16_stochastic", "ema_decay": 0.9}),
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


# -- a wrong one -------------------------------------------------------------------------------------------------------


def _on_update(change: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Wraps ``ShardState.begin_update``: ``change`` sees the shard and the coefficients, and returns others; None
    leaves the update out."""

    def corrupt(opt: Any) -> None:
        for shard in opt.engine.states.shards:

            def begin_update(by: Any, shard: Any = shard, right: Any = shard.begin_update) -> Any:
                changed = change(shard, by)
                return None if changed is None else right(changed)

            shard.begin_update = begin_update

    return corrupt


def _column(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    def changed(shard: Any, by: Any) -> Any:
        table = by.hyper[shard.rule].clone()
        at = shard.rule.columns.index(name)
        table[:, at] = change(table[:, at])
        return replace(by, hyper={shard.rule: table})

    return _on_update(changed)


def _unskip(shard: Any, by: Any) -> Any:
    table = by.hyper[shard.rule].clone()
    table[:, shard.rule.columns.index("active")] = 1.0
    return replace(by, hyper={shard.rule: table}, found_inf=None)


OVERFLOW = 3


@dataclass(frozen=True)
class Fault:
    """``plant`` is called before the step of that number; ``shows``: the field of a report that tells."""

    plant: Callable[[Any], None]
    shows: str
    step: int = 2


FAULTS: dict[str, Fault] = {
    "a wrong rate": Fault(_column("lr", lambda lr: 1.08 * lr), "matrices"),
    "a wrong decay": Fault(_column("decay", lambda decay: decay - 0.01), "matrices"),
    "a wrong momentum": Fault(_column("share", lambda share: 1.01 * share), "elements"),
    "no look-ahead": Fault(_column("nesterov", torch.zeros_like), "matrices"),
    "an update left out": Fault(_on_update(lambda shard, by: None), "matrices"),
    "no clipping": Fault(_on_update(lambda shard, by: replace(by, grad_scale=None)), "elements"),
    "a step not skipped": Fault(_on_update(_unskip), "matrices", OVERFLOW),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_update_is_found(name: str) -> None:
    """The oracle would find a fault: else the tests above say nothing."""
    fault = FAULTS[name]
    model, opt = _make(1, torch.bfloat16, max_grad_norm=0.5, skip_nonfinite=True)
    with oracle_float64.watch(opt) as watching:
        for step in range(fault.step + 1):
            if step == fault.step:
                assert_rounding_alone(watching.report())
                fault.plant(opt)
            _step(model, opt, 0, step, overflow=OVERFLOW)
    report: Report = watching.report()
    worst = getattr(report, fault.shows)
    assert worst.of_bound > 1 and worst.step == fault.step + 1, report
    opt.close()
