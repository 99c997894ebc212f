"""The float64 shadow agrees with a right optimizer whatever its user does, and finds out a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cells import halves
from harness import run_ranks
from torch import Tensor
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    linear_backward,
    make_gradients,
    make_parameters,
    named,
)

import zero_kernels

ELEMENTS = sum(math.prod(shape) for shape in SHAPES)
UNUSED, EDITED = 4, 5  # of SHAPES
STEPS, ADDED = 16, 13  # a group is added before step 13, from 0


def _optimizer(dtype: torch.dtype, stage: int = 2, **options: Any) -> tuple[list[Any], Any]:
    import zero_optim

    params = make_parameters(SHAPES, dtype)
    entries = named(params)
    groups = [
        {"params": entries[:3], "weight_decay": 0.1},
        {"params": entries[3:], "lr": torch.tensor(5e-3), "betas": (0.8, 0.99)},
    ]
    return params, zero_optim.ShardedAdamW(groups, lr=1e-2, stage=stage, bucket_cap_mb=TINY_CAP_MB, **options)


def _step(params: list[Any], opt: Any, rank: int, step: int, *, broken: bool = False) -> None:
    grads: list[Tensor | None] = list(make_gradients(params, rank, step))
    grads[UNUSED] = None if step % 2 else grads[UNUSED]
    if broken and rank == 0:
        grads[0][0, 0] = math.inf
    order = [3, 0, 6, 1, 7, 5, 2, 4]
    linear_backward([params[i] for i in order], [grads[i] for i in order])
    opt.step()
    opt.zero_grad()


def _eventful(rank: int, world_size: int, stage: int, dtype: torch.dtype, every: int) -> Any:
    """The report on a run in which all happens that a shadow must follow."""
    import zero_optim

    params, opt = _optimizer(dtype, stage)
    more = make_parameters([(50,)], dtype)
    verifier = zero_optim.verify(opt, every=every, samples=9)
    events: dict[int, Callable[[], object]] = {
        3: lambda: opt.param_groups[0].update(lr=1e-3, weight_decay=0.0),
        4: lambda: opt.param_groups[1]["lr"].fill_(2e-2),
        6: lambda: params[EDITED].detach().mul_(1.5),
        8: lambda: opt.load_state_dict(opt.state_dict()),
        9: lambda: zero_optim.load_full_state_dict(opt, zero_optim.full_state_dict(opt)),
        11: lambda: opt.param_groups[0].update(maximize=True),
        12: lambda: _lay_out_anew(opt),
        ADDED: lambda: opt.add_param_group({"params": named(more, "more"), "decoupled_weight_decay": True}),
    }
    for step in range(STEPS):
        events.get(step, lambda: None)()
        used = params + more if step >= ADDED else params
        with opt.no_sync():
            linear_backward(used, make_gradients(used, rank, step, micro=1))
        if step % 3 == 0:
            linear_backward(used, make_gradients(used, rank, step, micro=2))
            opt.clip_grad_norm_(0.5, parameters=params[:2] if step % 2 else None)
            opt.step()
            opt.zero_grad()
        else:
            _step(params, opt, rank, step, broken=step in (5, 10))
    assert opt.stats()["skipped_steps"] == 2
    verifier.close()
    assert opt.engine.watchers == []
    _step(params, opt, rank, STEPS)
    report = verifier.report()
    opt.close()
    return report


def _lay_out_anew(opt: Any) -> None:
    opt.engine.reducer.lay_out(list(reversed(opt.engine.reducer.layout.order)))


@pytest.mark.parametrize(("world_size", "stage", "half"), halves([(1, 2), (2, 0), (2, 1), (3, 2)]))
def test_a_right_optimizer_differs_by_rounding_alone(world_size, stage, half):
    dtype = (torch.float32, torch.bfloat16)[half]
    every = 1 if stage == 2 else 4
    reports = run_ranks(world_size, _eventful, stage, dtype, every)
    assert len(set(reports)) == 1
    report = reports[0]
    assert 0 < report.ulps < 2 * report.updates < report.bound
    assert report.updates > 1 and 0 < report.step <= STEPS and 0 <= report.rank < world_size
    assert report.parameter in [name for name, _ in named(make_parameters(SHAPES))]
    copies_held = world_size if stage == 0 else 1
    compared = STEPS // every * ELEMENTS + len([n for n in range(ADDED, STEPS) if (n + 1) % every == 0]) * 50
    assert report.compared == compared * copies_held
    assert report.unrounded == 0
    assert report.edited == 128 * copies_held


def _on_update(change: Callable[[Any, Any], Any], of_step: int = 3) -> Callable[[Any], None]:
    """Wraps ``ShardState.begin_update`` of every bucket: ``change`` sees the shard and the coefficients, and returns
    others; None leaves the update out."""

    def corrupt(opt: Any) -> None:
        for shard in opt.engine.states.shards:

            def begin_update(by, shard=shard, right=shard.begin_update):
                changed = by if opt.engine.steps != of_step else change(shard, by)
                return None if changed is None else right(changed)

            shard.begin_update = begin_update

    return corrupt


def _scale_column(name: str, factor: float) -> Callable[[Any, Any], Any]:
    def change(shard: Any, by: Any) -> Any:
        table = by.hyper[shard.rule].clone()
        table[:, zero_kernels.HYPER_COLUMNS.index(name)] *= factor
        return replace(by, hyper={shard.rule: table})

    return change


def _decay_twice(shard: Any, by: Any) -> Any:
    with shard.opened() as state:
        shard.master(state).mul_(1 - 1e-2 * 1e-2)
    return by


def _unskip(shard: Any, by: Any) -> Any:
    table = by.hyper[shard.rule].clone()
    table[:, zero_kernels.HYPER_COLUMNS.index("active")] = 1.0
    return replace(by, hyper={shard.rule: table}, found_inf=None)


def _between(change: Callable[[dict[str, Any]], object]) -> Callable[[Any], None]:
    """Corrupts every shard state, right before the fourth step."""

    def corrupt(opt: Any) -> None:
        def once(opt: Any, args: Any, kwargs: Any) -> None:
            if opt.engine.steps == 3:
                for shard in opt.engine.states.shards:
                    with shard.opened() as state:
                        change(state)

        opt.register_step_pre_hook(once)

    return corrupt


CORRUPTIONS: dict[str, Callable[[Any], None]] = {
    "an update left out": _on_update(lambda shard, by: None),
    "decay applied twice": _on_update(_decay_twice),
    "a wrong lr": _on_update(_scale_column("step_size", 1.01)),
    "a wrong bias correction": _on_update(_scale_column("bias_correction2_sqrt", 1.01)),
    "a wrong beta": _on_update(_scale_column("beta1", 0.98)),
    "no clipping": _on_update(lambda shard, by: replace(by, grad_scale=None)),
    "a step not skipped": _on_update(_unskip, of_step=4),
    "a step count lost": _between(lambda state: None),
    "exp_avg overwritten": _between(lambda state: state["exp_avg"].mul_(0.99)),
    "exp_avg_sq overwritten": _between(lambda state: state["exp_avg_sq"].zero_()),
    "master overwritten": _between(lambda state: state["master"].mul_(1 + 2.0**-14)),
}


def _corrupted(rank: int, world_size: int, case: str) -> Any:
    import zero_optim

    params, opt = _optimizer(torch.bfloat16, max_grad_norm=0.5, skip_nonfinite=True)
    with zero_optim.verify(opt, every=1) as verifier:
        for step in range(6):
            if step == 1:
                assert verifier.report().ulps < 4
                CORRUPTIONS[case](opt)
            if step == 3 and case == "a step count lost":
                opt.engine.hyper.steps -= 1
            _step(params, opt, rank, step, broken=step == 4)
    report = verifier.report()
    opt.close()
    return report


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_a_wrong_optimizer_is_found_out(case):
    reports = run_ranks(2, _corrupted, case)
    assert reports[0] == reports[1]
    assert reports[0].ulps > 2 * reports[0].bound, reports[0]
    assert reports[0].step >= 4


def test_without_corruption_the_same_run_is_right(monkeypatch):
    monkeypatch.setitem(CORRUPTIONS, "nothing", lambda opt: None)
    report = _corrupted(0, 1, "nothing")
    assert report.ulps < 2 * report.updates


def test_a_parameter_that_is_not_its_master_rounded_is_counted():
    import zero_optim

    params, opt = _optimizer(torch.bfloat16)
    verifier = zero_optim.verify(opt)
    _step(params, opt, 0, 0)
    (shard,) = [shard for shard in opt.engine.states.shards if shard.bucket.params[0].shape == (300,)]
    right = shard.end_update

    def end_update() -> None:
        right()
        shard.bucket.param_shard[:7] += 1.0

    shard.end_update = end_update
    _step(params, opt, 0, 1)
    assert (verifier.report().unrounded, verifier.report().ulps < 4) == (7, True)


def test_fp32_parameters_overwritten_are_counted_as_edited():
    import zero_optim

    params, opt = _optimizer(torch.float32)
    with zero_optim.verify(opt, parameters=[params[1], "layer0.weight"]) as verifier:
        _step(params, opt, 0, 0)
        params[1].data[:5] = 7.0
        params[2].data[:] = 7.0
        _step(params, opt, 0, 1)
    report = verifier.report()
    assert (report.edited, report.compared) == (5, 2 * (300 + 17 * 9))
    assert report.ulps < 4
    assert opt.engine.watchers == []


def test_looking_on_changes_nothing():
    runs = []
    for looked_at in (False, True):
        import zero_optim

        params, opt = _optimizer(torch.bfloat16, max_grad_norm=0.5)
        if looked_at:
            zero_optim.verify(opt, every=2)
        for step in range(5):
            _step(params, opt, 0, step, broken=step == 3)
        state = zero_optim.full_state_dict(opt)["state"]
        runs.append(copies(params) + [tensor for entry in state.values() for tensor in entry.values()])
    assert_bitwise(runs[1], runs[0], "with a verifier")


def test_samples_are_spread_and_bounded():
    import zero_optim

    params = make_parameters([(3000,), (5,), (5,), (5,), (7,)])
    opt = zero_optim.ShardedAdamW(params)
    with zero_optim.verify(opt, samples=2) as verifier:
        linear_backward(params, make_gradients(params, 0, 0))
        opt.step()
    assert verifier.report().compared == 1024 + 7
    places = verifier._shadows[0].positions
    assert (int(places[0]), int(places[-1]), len(places.unique())) == (0, 2999, 1024)


def test_state_that_moves_to_another_layout_wrongly_is_found_out():
    assert any(report.ulps > 2 * report.bound for report in run_ranks(2, _moved_wrongly))


def _moved_wrongly(rank: int, world_size: int) -> Any:
    import zero_optim

    params, opt = _optimizer(torch.float32)
    verifier = zero_optim.verify(opt)
    for step in range(2):
        _step(params, opt, rank, step)
    opt.engine.states.started = False  # so that no state moves
    _lay_out_anew(opt)
    _step(params, opt, rank, 2)
    report = verifier.report()
    opt.close()
    return report


def test_bad_arguments():
    import zero_optim

    params, opt = _optimizer(torch.float32)
    for options in ({"every": 0}, {"samples": 0}):
        with pytest.raises(ValueError, match="1 or more"):
            zero_optim.verify(opt, **options)
    for wanted in ("layer9.weight", make_parameters()[0]):
        with pytest.raises(zero_optim.ParameterError, match="does not train"):
            zero_optim.verify(opt, parameters=[wanted])
    assert opt.engine.watchers == []
    opt.close()
    with pytest.raises(zero_optim.ClosedError):
        zero_optim.verify(opt)
