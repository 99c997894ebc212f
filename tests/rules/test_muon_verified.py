"""``verify`` of ``ShardedMuon``: a right update differs by what bf16 makes of it, and a wrong one is found out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from cells import slow
from harness import run_ranks
from muon_cases import assert_rounding_alone
from sharded_cases import Given, GivenNet
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from training_cases import error_of, impatient, make_gradients
from zero_optim.rules import Begins, Number, StateTensor, UpdateRule
from zero_optim.rules.homes import MatrixHomes
from zero_optim.rules.muon import Muon, scale_of
from zero_optim.rules.newton_schulz import POLAR_EXPRESS, QUINTIC, orthogonalized
from zero_optim.rules.update_rule import MASTER
from zero_optim.shadows import furthest

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
    exactly = rule.matrices_in_float64()
    of_steps = iteration.get("ns_coefficients", [QUINTIC] * 5)
    for (kind, make), shape in itertools.product(KINDS.items(), [(1, 9), (20, 20), (48, 16), (30, 200), (128, 96)]):
        matrix = make(shape, generator) / 100
        x = matrix / matrix.norm()
        for a, b, c in of_steps:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        rate = 0.02 * scale_of(shape, "spectral_unclamped")
        exact, _ = exactly.subtracted(matrix, GROUP)
        torch.testing.assert_close(exact, rate * x, rtol=1e-6, atol=1e-9)
        live = rate * orthogonalized(matrix.float(), of_steps, len(of_steps), 1e-7, form).double()
        found = furthest(torch.stack((matrix, live, torch.zeros_like(live))), exactly, GROUP)
        assert 0 < found.of_bound < 1, (kind, shape, found)
        for wrong in (2 * live, live.flip(0, 1), -live):
            judged = furthest(torch.stack((matrix, wrong, torch.zeros_like(live))), exactly, GROUP)
            assert judged.of_bound > 1, (kind, shape, judged)


# -- a right optimizer -------------------------------------------------------------------------------------------------


def _eventful(rank: int, world_size: int, stage: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """All happens that a shadow must follow."""
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
    with zero_optim.verify(opt, every=1 if stage else 2) as shadow:
        for step in range(10):
            events.get(step, lambda: None)()
            with opt.no_sync():
                model(_gradients(rank, 100 + step, dtype)).backward()
            if step == 9:
                opt.clip_grad_norm_(0.5)
            _step(model, opt, rank, step, overflow=5)
        report = shadow.report()
    copies = world_size if stage == 0 else 1
    assert opt.stats()["skipped_steps"] == 1
    assert report.edited == (copies * 72 * 8 if stage < 3 else 0)
    assert report.compared == (10 if stage else 5) * ELEMENTS * copies
    assert report.unrounded == 0
    assert 0 < report.direction.of_bound < 1 and report.ulps <= report.bound, report
    opt.close()


FORMS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.bfloat16, {"max_grad_norm": 0.5}),
    (torch.bfloat16, {"master": "split", "state_dtype": "int8"}),
    (torch.bfloat16, {"master": "split8", "state_dtype": "bf16_stochastic", "ema_decay": 0.9}),
    (torch.bfloat16, {"state_dtype": "bf16", "ema_decay": 0.9, "ema_dtype": "bf16_stochastic"}),
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
def test_a_right_optimizer_differs_by_rounding_alone(world_size: int, stage: int, half: int) -> None:
    run_ranks(world_size, _some_forms, stage, FORMS[half::2])


@pytest.mark.parametrize("store", ["cpu", "paged", "nvme"])
def test_state_off_the_device_is_read_where_it_is(store: str, tmp_path: Path) -> None:
    place = {"paged": {"device_budget": 0}, "nvme": {"state_offload": f"nvme:{tmp_path}"}}.get(store, {})
    model, opt = _make(2, torch.bfloat16, **{"state_offload": store, **place})
    with zero_optim.verify(opt) as shadow:
        for step in range(3):
            _step(model, opt, 0, step)
    assert_rounding_alone(shadow.report())
    opt.close()


@pytest.mark.parametrize("broken, rate", [(0.0, 0.02), (1.0, 0.0), (math.nan, 0.02), (math.inf, 0.02)])
def test_zeros_a_rate_of_zero_and_what_is_not_finite_are_what_the_rule_says(broken: float, rate: float) -> None:
    """A matrix that is not finite has no update that is: so it is in all of it, and in no other."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((2, 12, 20), (16, 16))]
    opt = zero_optim.ShardedMuon(params, lr=rate, skip_nonfinite=False)
    with zero_optim.verify(opt) as shadow:
        for step in range(3):
            if step == 2:
                report = shadow.report()
                assert report.direction.of_bound < 1 and report.ulps <= report.bound, report
                assert int(params[0].isfinite().sum()) == (480 if broken in (0, 1) else 240)
                opt.engine.rules.all[0].defaults["ns_steps"] = 4  # no matrix beside hides what is wrong of another
            params[0].grad, params[1].grad = torch.randn(2, 12, 20), torch.full((16, 16), broken)
            params[0].grad[1, 0, 0] *= broken
            opt.step()
    assert (shadow.report().direction.of_bound > 1) == (rate > 0)
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


def _default(**options: Any) -> Callable[[Any], None]:
    """The rule has other options than those it was made with: the shadow has those."""
    return lambda opt: opt.engine.rules.all[0].defaults.update(options)


def _unskip(shard: Any, by: Any) -> Any:
    table = by.hyper[shard.rule].clone()
    table[:, shard.rule.columns.index("active")] = 1.0
    return replace(by, hyper={shard.rule: table}, found_inf=None)


def _state(name: str, change: Callable[[Tensor], object]) -> Callable[[Any], None]:
    """Overwritten before the update, once the shadow has looked."""

    def changed(shard: Any, by: Any) -> Any:
        with shard.opened() as state:
            change(state[name])
        return by

    return _on_update(changed)


def _swap_halves(values: Tensor) -> None:
    values.copy_(values.roll(len(values) // 2))


OVERFLOW = 3


@dataclass(frozen=True)
class Fault:
    """``plant`` is called before the step of that number; ``shows``: the fact of a report that tells; ``options``: of
    the optimizer."""

    plant: Callable[[Any], None]
    shows: str
    step: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


UPDATE, MOMENTUM = "direction", "ulps"
FAULTS: dict[str, Fault] = {
    "a wrong rate": Fault(_column("lr", lambda lr: 1.08 * lr), UPDATE),
    "a wrong decay": Fault(_column("decay", lambda decay: decay - 0.01), UPDATE),
    "a wrong momentum": Fault(_column("share", lambda share: 1.01 * share), MOMENTUM),
    "no look-ahead": Fault(_column("nesterov", torch.zeros_like), UPDATE),
    "a wrong scale": Fault(_default(adjust_lr_fn="match_rms_adamw"), UPDATE),
    "a step of the iteration missing": Fault(_default(ns_steps=4), UPDATE),
    "an update left out": Fault(_on_update(lambda shard, by: None), UPDATE),
    "no clipping": Fault(_on_update(lambda shard, by: replace(by, grad_scale=None)), MOMENTUM),
    "a step not skipped": Fault(_on_update(_unskip), UPDATE, OVERFLOW),
    "momentum touched in a step that was skipped": Fault(
        _state("momentum_buffer", lambda buffer: buffer.mul_(0.999)), MOMENTUM, OVERFLOW
    ),
    "momentum in 8 bits touched in a step that was skipped": Fault(
        _state("momentum_buffer_int8", lambda buffer: buffer.neg_()), MOMENTUM, OVERFLOW, {"state_dtype": "int8"}
    ),
    "a master touched in a step that was skipped": Fault(
        _state("master", lambda master: master.mul_(1 + 2.0**-20)), UPDATE, OVERFLOW
    ),
    "momentum overwritten": Fault(_state("momentum_buffer", _swap_halves), MOMENTUM),
    "a master overwritten": Fault(_state("master", lambda master: master.mul_(1.01)), UPDATE),
}


def _wrong(report: zero_optim.VerifyReport) -> dict[str, bool]:
    return {UPDATE: report.direction.of_bound > 1, MOMENTUM: report.ulps > 2 * report.bound}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_update_is_found_out(name: str) -> None:
    fault = FAULTS[name]
    model, opt = _make(1, torch.bfloat16, max_grad_norm=0.5, skip_nonfinite=True, **fault.options)
    with zero_optim.verify(opt) as shadow:
        for step in range(fault.step + 1):
            if step == fault.step:
                assert_rounding_alone(shadow.report())
                fault.plant(opt)
            _step(model, opt, 0, step, overflow=OVERFLOW)
    report = shadow.report()
    assert _wrong(report)[fault.shows], report
    assert (report.direction.step if fault.shows == UPDATE else report.step) == fault.step + 1
    opt.close()


def _swapped(rank: int, world_size: int) -> list[zero_optim.VerifyReport]:
    """At stage 3, and of slices: the home of the first matrix has the halves of it in the wrong order."""
    right, reports = MatrixHomes.bring, []

    def bring(homes: MatrixHomes, shards: Any) -> Tensor:
        brought = right(homes, shards)
        if homes.wholes:
            _swap_halves(homes.wholes[0].of(brought))
        return brought

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    sliced = nn.Parameter(distribute_tensor(torch.randn(21, 12), mesh["tp"], [Shard(0)]))
    model, opt = _make(3, torch.bfloat16)
    of_slices = zero_optim.ShardedMuon([("sliced", sliced)], mesh=mesh["dp"])

    def step_slices(step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        sliced.grad = distribute_tensor(torch.randn(21, 12, generator=generator), mesh["tp"], [Shard(0)])
        of_slices.step()

    for own, train in ((opt, lambda step: _step(model, opt, rank, step)), (of_slices, step_slices)):
        with zero_optim.verify(own) as shadow:
            train(0)
            assert_rounding_alone(shadow.report())
            with mock.patch.object(MatrixHomes, "bring", bring):
                train(1)
            reports.append(shadow.report())
        own.close()
    return reports


def test_parts_of_a_matrix_that_are_swapped_are_found_out() -> None:
    first, second = run_ranks(2, _swapped)
    assert first == second
    for report in first:
        assert report.direction.of_bound > 3 and report.direction.step == 2 and report.ulps <= report.bound, report


def _other_matrices(rank: int, world_size: int) -> tuple[str, str]:
    model, opt = _make(3, torch.bfloat16)
    names = [name for name, _ in model.named_parameters()]
    with impatient(), zero_optim.verify(opt, parameters=[names[rank]]):
        return error_of(lambda: _step(model, opt, rank, 0))


def test_ranks_that_choose_other_matrices_are_told() -> None:
    for kind, text in run_ranks(2, _other_matrices):
        assert kind == "RankMismatchError" and "brings" in text and "units.0.weights.1" in text, text


def _alone(rank: int, world_size: int) -> tuple[str, str]:
    model, opt = _make(3, torch.bfloat16)
    with impatient():
        if rank == 0:
            zero_optim.verify(opt)
        return error_of(lambda: [_step(model, opt, rank, step) for step in range(2)])


def test_a_rank_that_verifies_alone_does_not_wait_for_ever() -> None:
    found = run_ranks(2, _alone)
    assert {kind for kind, _ in found} == {"RankMismatchError"}, found
    assert "verify, which brings" in found[0][1]


class Unfollowed(UpdateRule):
    """A rule without a counterpart in float64."""

    options = (Number("lr", 0.1, rate=True),)
    tensors = (StateTensor(MASTER, Begins.PARAMETER),)
    own_columns = ("lr",)

    def update_rows(
        self, g: Tensor, p: Tensor, state: Any, c: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return p - c["lr"] * g, {}


def _brought(rank: int, world_size: int) -> tuple[str, str]:
    """With a group that only one of two ranks has elements of."""
    first, second = nn.Parameter(torch.ones(12, 8)), nn.Parameter(torch.ones(3))
    opt = zero_optim.ShardedMuon([first])
    with zero_optim.verify(opt):
        opt.add_param_group({"params": [second], "rule": Unfollowed()})
        first.grad, second.grad = torch.ones(12, 8), torch.ones(3)
        return error_of(opt.step)


def test_a_rule_that_cannot_be_followed_is_told_on_every_rank_as_a_group_brings_it() -> None:
    for kind, text in run_ranks(2, _brought):
        assert kind == "ZeroOptimError" and "verify cannot follow Unfollowed" in text, text
