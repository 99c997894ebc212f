"""Parameter groups that bring a rule of their own: one optimizer, beside as many as it has rules, and torch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zero_optim
from cells import slow
from harness import run_ranks
from torch import Tensor, nn
from training_cases import assert_bitwise, copies, linear_backward, make_gradients, make_parameters
from zero_optim import ParameterError, RankMismatchError, StateMismatchError, rules

MATRICES = ((24, 40), (72, 8), (8, 72))
OTHERS = ((30, 8), (300,), (1,), (40,))
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.875}  # of which torch's lerp has nothing to fuse
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1}
LION: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.98), "weight_decay": 0.1}
CAP_MB = 0.002
STEPS = 4


def _parameters(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    """The matrices and the others, one after another."""
    made = make_parameters((*MATRICES, *OTHERS), dtype)
    return [p for pair in itertools.zip_longest(made[:3], made[3:]) for p in pair if p is not None]


def _split(params: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    matrices = [p for p in params if p.dim() == 2 and p.shape[0] != OTHERS[0][0]]
    return matrices, [p for p in params if all(p is not matrix for matrix in matrices)]


def _mixed(params: Sequence[Any], **options: Any) -> zero_optim.ShardedMuon:
    matrices, others = _split(params)
    groups = [{"params": matrices, "lr": MUON["lr"]}, {"params": others, "rule": rules.AdamW(**ADAM)}]
    return zero_optim.ShardedMuon(groups, **{**MUON, "lr": 9.0, "bucket_cap_mb": CAP_MB, **options})


def _two(params: Sequence[Any], **options: Any) -> list[zero_optim.ShardedOptimizer]:
    matrices, others = _split(params)
    muon = zero_optim.ShardedMuon(matrices, **MUON, bucket_cap_mb=CAP_MB, **options)
    return [muon, zero_optim.ShardedAdamW(others, **ADAM, bucket_cap_mb=CAP_MB, **options)]


def _step(
    opts: Sequence[Any], params: Sequence[Tensor], rank: int, step: int, micros: int = 1, rate: float = 1.0
) -> None:
    """``rate``: what multiplies the learning rates, when the gradients are there."""
    for micro in range(micros):
        linear_backward(params, make_gradients(params, rank, step, micro))
    for opt in opts:
        for group in opt.param_groups:
            group["lr"] *= rate
        opt.step()
        opt.zero_grad()


def _state(opts: Sequence[Any]) -> list[dict[str, Tensor]]:
    """Of each parameter, whole, in the order of the optimizers and their groups."""
    whole = [zero_optim.full_state_dict(opt, rank=None)["state"] for opt in opts]
    return [of[index] for of in whole for index in sorted(of)]


def _trained(make: Callable[..., Any], rank: int, micros: int, **options: Any) -> tuple[list[Tensor], list[Any]]:
    params = _parameters()
    made = make(params, **options)
    opts = made if isinstance(made, list) else [made]
    for step in range(STEPS):
        _step(opts, params, rank, step, micros, rate=0.5 if step == STEPS - 1 else 1.0)
    found = copies(params), _state(opts)
    for opt in opts:
        opt.close()
    return found


def _same(one: tuple[list[Tensor], list[Any]], other: tuple[list[Tensor], list[Any]]) -> None:
    assert_bitwise(one[0], other[0])
    for mine, its in zip(one[1], other[1], strict=True):
        assert list(mine) == list(its)
        assert_bitwise(list(mine.values()), list(its.values()))


def _beside_two(rank: int, world_size: int, stage: int) -> None:
    for options in ({}, {"ema_decay": 0.5, "grad_accumulation_dtype": torch.float32}):
        for micros in (1, 3):
            one = _trained(_mixed, rank, micros, stage=stage, **options)
            _same(one, _trained(_two, rank, micros, stage=stage, **options))
            assert {name for entry in one[1] for name in entry} > {"momentum_buffer", "exp_avg_sq", "master"}


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=slow), 2])
def test_one_has_the_bits_of_two(stage: int) -> None:
    run_ranks(2, _beside_two, stage)


def _elsewhere(rank: int, world_size: int, options: dict[str, Any]) -> None:
    one = _trained(_mixed, rank, 1, **options)
    _same(one, _trained(_two, rank, 1, **options))
    if "state_offload" in options:
        _same(one, _trained(_mixed, rank, 1))
        clipped = {"max_grad_norm": 0.5}
        _same(_trained(_mixed, rank, 1, **options, **clipped), _trained(_mixed, rank, 1, **clipped))


@pytest.mark.parametrize(
    "options",
    [
        {"state_offload": "cpu"},
        {"state_offload": "paged", "device_budget": 0},
        {"master": "split", "state_dtype": "int8"},
    ],
    ids=["cpu", "paged", "split"],
)
def test_state_elsewhere_and_in_other_forms(options: dict[str, Any]) -> None:
    run_ranks(2, _elsewhere, options)


# -- saved and loaded -------------------------------------------------------------------------------------------------


class _Net(nn.Module):
    """Parameters with names."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(_parameters())


def _part(rank: int, world_size: int, folder: Path, steps: range, make: Callable[..., Any], clip: float | None) -> Any:
    """Some steps of a job, which goes on from what was saved. Gradients are the same on all ranks."""
    model = _Net()
    params = list(model.weights)
    made = make(params, max_grad_norm=clip)
    opts = made if isinstance(made, list) else [made]
    if steps.start:
        zero_optim.checkpoint.load(folder, model, made)
    for step in steps:
        _step(opts, params, 0, step)
    zero_optim.checkpoint.save(folder, model, made, step=steps.stop)
    found = copies(params), _state(opts)
    for opt in opts:
        opt.close()
    return found


def test_checkpoints_load_at_any_scale_and_into_two(tmp_path: Path) -> None:
    """Two ranks, one, two; and one optimizer, two, one. Each step has the bits of a job that nothing has disturbed."""
    through = run_ranks(2, _part, tmp_path / "through", range(6), _mixed, None)[0]
    for name, parts in (
        ("ranks", ((2, _mixed), (1, _mixed), (2, _mixed))),
        ("optimizers", ((2, _mixed), (2, _two), (2, _mixed))),
    ):
        for number, (ranks, make) in enumerate(parts):
            last = run_ranks(ranks, _part, tmp_path / name, range(2 * number, 2 * number + 2), make, None)[0]
        _same(last, through)


def test_a_job_that_goes_on_clips_by_the_same_bits(tmp_path: Path) -> None:
    """Terms of the norm are added up bucket by bucket, of whatever rule: their order is saved."""
    through = run_ranks(2, _part, tmp_path / "through", range(4), _mixed, 0.5)[0]
    for steps in (range(2), range(2, 4)):
        last = run_ranks(2, _part, tmp_path / "parts", steps, _mixed, 0.5)[0]
    _same(last, through)
    index = (tmp_path / "parts/step-4/index.json").read_text()
    assert '"ShardedMuon"' in index and '"ShardedAdamW"' in index


def _moved(rank: int, world_size: int, folder: Path) -> None:
    """Groups that have changed their rules."""
    model = _Net()
    params = list(model.weights)
    made = [rules.AdamW(**ADAM), rules.Lion(**LION)]

    def make(of: Sequence[rules.UpdateRule]) -> zero_optim.ShardedOptimizer:
        groups = [{"params": own, "rule": rule} for own, rule in zip((params[:4], params[4:]), of, strict=True)]
        return zero_optim.ShardedOptimizer(groups, rules.SGD(), bucket_cap_mb=CAP_MB)

    opt = make(made)
    _step([opt], params, rank, 0)
    zero_optim.checkpoint.save(folder, model, opt, step=1)
    states = opt.state_dict(), zero_optim.full_state_dict(opt, rank=None)
    opt.close()
    opt = make(made[::-1])
    _step([opt], params, rank, 1)
    before = copies(params), _state([opt])
    says = "the state of parameter . of group 0.* holds exp_avg_sq, which this optimizer does not keep"
    for load in (lambda: opt.load_state_dict(states[0]), lambda: zero_optim.load_full_state_dict(opt, states[1])):
        with pytest.raises(StateMismatchError, match=says):
            load()
    says = (
        r"missing in the checkpoint: the state \(exp_avg_sq\) of 3 .* not kept here: the state \(exp_avg_sq, exp_avg\)"
    )
    with pytest.raises(StateMismatchError, match=says):
        zero_optim.checkpoint.load(folder, model, opt)
    _same((copies(params), _state([opt])), before)
    opt.close()


def test_state_of_another_rule_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _moved, tmp_path)


def _loaded(rank: int, world_size: int) -> None:
    """By way of a rank's own state, and of torch's optimizers."""
    params = _parameters(torch.float32)
    opt = _mixed(params, ns_gram=False)
    for step in range(2):
        _step([opt], params, 0, step)
    own, whole, start = copy.deepcopy(opt.state_dict()), zero_optim.full_state_dict(opt, rank=None), copies(params)
    _step([opt], params, 0, 2)
    expected = copies(params), _state([opt])
    opt.close()
    for load in (lambda opt: opt.load_state_dict(own), lambda opt: zero_optim.load_full_state_dict(opt, whole)):
        again = [nn.Parameter(value.clone()) for value in start]
        opt = _mixed(again, ns_gram=False)
        load(opt)
        _step([opt], again, 0, 2)
        _same((copies(again), _state([opt])), expected)
        opt.close()
    again = [nn.Parameter(value.clone()) for value in start]
    torchs = torch.optim.Muon(_split(again)[0]), torch.optim.AdamW(_split(again)[1])
    for number, torchs_own in enumerate(torchs):
        (group,) = [whole["param_groups"][number]]
        state = {place: whole["state"][index] for place, index in enumerate(group["params"])}
        torchs_own.load_state_dict({"state": state, "param_groups": [{**group, "params": list(state)}]})
        for parameter, gradient in zip(again, make_gradients(again, 0, 2), strict=True):
            parameter.grad = gradient
        torchs_own.step()
    for parameter, exact in zip(again, expected[0], strict=True):
        torch.testing.assert_close(parameter.detach(), exact, rtol=0, atol=1e-6)


def test_by_way_of_state_dicts_and_torch() -> None:
    run_ranks(2, _loaded)


# -- groups that come later -------------------------------------------------------------------------------------------


def _added(rank: int, world_size: int, stage: int) -> None:
    """Groups with the optimizer's rule, one that is there, and a new one, beside an optimizer that had them at once."""
    found = []
    for at_once in (True, False):
        params = _parameters()
        matrices, others = _split(params)
        groups = [
            {"params": matrices},
            {"params": others[:1], "rule": rules.AdamW(**ADAM)},
            {"params": others[1:2], "rule": rules.AdamW(lr=0.5), **ADAM},
            {"params": others[2:], "rule": rules.Lion(**LION)},
        ]
        opt = zero_optim.ShardedMuon(groups if at_once else groups[:2], **MUON, stage=stage, ema_decay=0.9)
        for group in () if at_once else groups[2:]:
            with pytest.raises(ValueError, match="lr of parameter group . must be 0 or more, got -1"):
                opt.add_param_group({**group, "lr": -1})
            before = len(opt.engine.rules.all), len(opt.param_groups)
            with pytest.raises(ParameterError, match="Muon makes matrices orthogonal"):
                opt.add_param_group({"params": group["params"]})
            assert (len(opt.engine.rules.all), len(opt.param_groups)) == before
            opt.add_param_group(group)
        for step in range(STEPS):
            _step([opt], params, rank, step)
        assert [rule.name for rule in opt.engine.rules.all] == ["Muon", "AdamW", "Lion"]
        assert set(opt.param_groups[3]) == {"params", *LION, "maximize", "ema_decay"}
        found.append((copies(params), _state([opt])))
        opt.close()
    _same(*found)


def test_groups_that_come_later() -> None:
    for stage in (1, 2):
        run_ranks(2, _added, stage)


# -- options, and what is refused -------------------------------------------------------------------------------------


def test_a_group_has_the_options_of_its_rule() -> None:
    params = _parameters()
    opt = _mixed(params)
    muon, adam = opt.param_groups
    assert (muon["lr"], muon["momentum"], "betas" in muon) == (0.02, 0.875, False)
    assert (adam["lr"], adam["betas"], "momentum" in adam, "rule" in adam) == (1e-2, (0.8, 0.99), False, False)
    assert opt.defaults["lr"] == 9.0 and "betas" not in opt.defaults
    adam["betas"] = (0.8, 1.0)
    with pytest.raises(ValueError, match="betas of parameter group 1 must be two numbers in"):
        opt.step()
    adam["betas"] = (0.8, 0.99)
    opt.step()
    opt.close()


def test_a_rate_may_change_by_group() -> None:
    """A schedule sets the rates of both rules; that of 0 leaves its parameters alone."""
    params = _parameters(torch.float32)
    opt = _mixed(params)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, [lambda step: 1.0, lambda step: float(step > 0)])
    before = copies(params)
    _step([opt], params, 0, 0)
    matrices, others = _split(params)
    kept = [any(torch.equal(p.detach(), b) for b in before) for p in (*matrices, *others)]
    assert kept == [False] * 3 + [True] * 4
    schedule.step()
    _step([opt], params, 0, 1)
    assert not any(torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True))
    opt.close()


class _Named(rules.AdamW):
    """A rule that differs from another of its class in more than defaults."""

    def __init__(self, power: float) -> None:
        super().__init__(**ADAM)
        self.power = power


def test_rules_that_differ_in_more_than_defaults_stay_apart() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(6)]
    given = (_Named(1.0), _Named(1.0), _Named(2.0), rules.AdamW(), rules.AdamW(amsgrad=True), rules.AdamW(False))
    groups = [{"params": [p], "rule": rule} for p, rule in zip(params, given, strict=True)]
    opt = zero_optim.ShardedOptimizer(groups, rules.Lion())
    numbers = [opt.engine.rules.all.index(rule) for rule in opt.engine.rules.by_group]
    assert numbers == [0, 0, 1, 2, 3, 4]
    for bucket in opt.engine.reducer.buckets:
        assert len({opt.engine.rules.of(slot.param) for slot in bucket.layout.slots}) == 1
    opt.close()


@pytest.mark.parametrize(
    ("group", "error", "says"),
    [
        ({"rule": "adamw"}, TypeError, "rule of parameter group 1 must be an instance of zero_optim.rules.Update"),
        ({"rule": rules.AdamW}, TypeError, "rule of parameter group 1 must be an instance"),
        ({"rule": None}, TypeError, "rule of parameter group 1 must be an instance"),
        ({"rule": rules.AdamW(betas=(0.9, 1.0))}, ValueError, "betas of parameter group 1 must be two numbers"),
        ({"rule": rules.AdamW(), "lr": -1.0}, ValueError, "lr of parameter group 1 must be 0 or more, got -1.0"),
        ({}, ParameterError, 'makes matrices orthogonal: give it to a group .*"rule": rules.AdamW'),
    ],
)
def test_errors(group: dict[str, Any], error: type[Exception], says: str) -> None:
    matrices, others = _split(_parameters())
    with pytest.raises(error, match=says):
        zero_optim.ShardedMuon([{"params": matrices}, {"params": others, **group}])


def _disagreeing(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    rule: rules.UpdateRule = rules.AdamW() if rank == 0 else rules.Lion()
    groups = [{"params": params[:1]}, {"params": params[1:], "rule": rule}]
    with pytest.raises(RankMismatchError, match="rule of group 1=AdamW; rank 1 has rule of group 1=Lion"):
        zero_optim.ShardedAdamW(groups)
    opt = zero_optim.ShardedAdamW(groups[:1])
    with pytest.raises(RankMismatchError, match="rule of group 1=AdamW; rank 1 has rule of group 1=Lion"):
        opt.add_param_group(groups[1])
    opt.close()


def test_ranks_have_the_same_rules() -> None:
    run_ranks(2, _disagreeing)
