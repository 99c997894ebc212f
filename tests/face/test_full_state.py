"""The full state in ``torch.optim.AdamW``'s format: jobs move in and out, and over worlds and stages, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from guards import CollectiveLog
from harness import run_ranks
from oracle import Hyper, MasterAdamW, adamw_bound
from torch import Tensor, nn
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    assert_within,
    copies,
    error_of,
    linear_backward,
    make_gradients,
    make_parameters,
    named,
    through_a_file,
)

DTYPES = (torch.float32, torch.bfloat16)
UNUSED, SOMETIMES, FROZEN = 4, 1, 6  # indices of SHAPES: never in a loss, in every other, not trained
LEG = 3  # steps of each part of a run
HYPERS = [Hyper(lr=1e-2, weight_decay=0.1)] * 3 + [Hyper(lr=5e-3, betas=(0.8, 0.99))] * 5


def _gradients(params: Sequence[Tensor], step: int) -> list[Tensor | None]:
    """Few bits each, so that sharing one over 3 ranks or fewer, as ``_share`` does, and averaging it is exact."""
    grads: list[Tensor | None] = list(make_gradients(params, 0, step, grid=1))
    grads[UNUSED] = grads[FROZEN] = None
    if step % 2:
        grads[SOMETIMES] = None
    return grads


def _share(grads: Sequence[Tensor | None], rank: int, world_size: int) -> list[Tensor | None]:
    factor = world_size if rank == 0 else 0
    return [None if g is None else g * factor for g in grads]


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    params = make_parameters(SHAPES, dtype)
    params[FROZEN].requires_grad_(False)
    return params


def _groups(params: Sequence[Any], tensor_lr: bool = False) -> list[dict[str, Any]]:
    lr = torch.tensor(1e-2, dtype=torch.float64) if tensor_lr else 1e-2
    return [
        {"params": list(params[:3]), "lr": lr, "weight_decay": 0.1},
        {"params": list(params[3:]), "lr": 5e-3, "betas": (0.8, 0.99)},
    ]


def _sharded(params: Sequence[nn.Parameter], stage: int, named_too: bool = False, **options: Any) -> Any:
    entries = named(params) if named_too else params
    return zero_optim.ShardedAdamW(_groups(entries, **options), stage=stage, bucket_cap_mb=TINY_CAP_MB)


def _train_alone(params: Sequence[nn.Parameter], opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        linear_backward(params, _gradients(params, step))
        opt.step()
        opt.zero_grad()


def _train(params: Sequence[nn.Parameter], opt: Any, steps: range, rank: int, world_size: int) -> None:
    for step in steps:
        linear_backward(params, _share(_gradients(params, step), rank, world_size))
        opt.step()
        opt.zero_grad()


def _state_tensors(state: dict[str, Any], parameters: int = len(SHAPES)) -> list[Tensor]:
    """Every tensor of a full state in one order, an empty one where there is none."""
    names = ("step", "exp_avg", "exp_avg_sq", "master")
    return [state["state"].get(i, {}).get(name, torch.empty(0)) for i in range(parameters) for name in names]


# -- from AdamW, and back ------------------------------------------------------------------------------------------


def _in_and_out(rank: int, world_size: int, stage: int, tensor_lr: bool) -> tuple[list[Tensor], list[Tensor]]:
    """fp32 parameters and moments after AdamW, ShardedAdamW, AdamW; ShardedAdamW reads from and writes to rank 0."""
    params = _parameters(torch.float32)
    before = torch.optim.AdamW(_groups(params, tensor_lr))
    _train_alone(params, before, range(LEG))
    opt = _sharded(params, stage)
    zero_optim.load_full_state_dict(opt, through_a_file(before.state_dict()) if rank == 0 else None)
    assert [float(group["lr"]) for group in opt.param_groups] == [1e-2, 5e-3]
    assert isinstance(opt.param_groups[0]["lr"], Tensor) == tensor_lr
    _train(params, opt, range(LEG, 2 * LEG), rank, world_size)
    full = zero_optim.full_state_dict(opt)
    opt.close()
    if rank > 0:
        assert full == {}
        return [], []
    after = torch.optim.AdamW(_groups(params, tensor_lr), lr=7.0, weight_decay=7.0)
    after.load_state_dict(through_a_file(full))
    _train_alone(params, after, range(2 * LEG, 3 * LEG))
    moments = [after.state[p][name] for p in params if p in after.state for name in ("exp_avg", "exp_avg_sq")]
    assert [float(after.state[p]["step"]) for p in params if p in after.state] == [9.0, 5.0, 9.0, 9.0, 9.0, 9.0]
    return copies(params), copies(moments)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_job_moves_from_adamw_and_back(world_size):
    params = _parameters(torch.float32)
    opt = torch.optim.AdamW(_groups(params))
    _train_alone(params, opt, range(3 * LEG))
    moments = [opt.state[p][name] for p in params if p in opt.state for name in ("exp_avg", "exp_avg_sq")]
    bounds = [adamw_bound(p, 1e-2, 3 * LEG) for p in params]
    for stage in (0, 1, 2):
        moved, moved_moments = run_ranks(world_size, _in_and_out, stage, stage == 2)[0]
        assert_within(moved, params, bounds, f"parameters through stage {stage}")
        for actual, expected in zip(moved_moments, moments, strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-8)


def _in_16_bits(rank: int, world_size: int, direct: bool) -> list[Tensor]:
    """bf16 parameters and state after AdamW, ShardedAdamW, AdamW and ShardedAdamW again."""
    params = _parameters(torch.bfloat16)
    before = torch.optim.AdamW(_groups(params))
    _train_alone(params, before, range(LEG))
    state = before.state_dict()
    for leg in (1, 3):
        opt = _sharded(params, stage=2)
        if direct:
            opt.load_state_dict(copy.deepcopy(state))
        else:
            zero_optim.load_full_state_dict(opt, state)
        _train(params, opt, range(leg * LEG, (leg + 1) * LEG), rank, world_size)
        full = zero_optim.full_state_dict(opt, rank=None)
        opt.close()
        if leg == 1:
            between = torch.optim.AdamW(_groups(params))
            between.load_state_dict(full)
            assert between.state[params[0]]["exp_avg"].dtype == torch.bfloat16
            _train_alone(params, between, range(2 * LEG, 3 * LEG))
            state = between.state_dict()  # carries the masters along, which are out of date by now
            assert "master" in state["state"][0]
    return copies(params) + _state_tensors(full)


@pytest.mark.parametrize("direct", [False, True], ids=["load_full_state_dict", "load_state_dict"])
def test_16_bit_parameters_get_masters_from_themselves(direct):
    params = _parameters(torch.bfloat16)
    opt = torch.optim.AdamW(_groups(params))
    oracle = MasterAdamW(params, HYPERS)
    _train_alone(params, opt, range(LEG))
    for leg in (1, 3):
        oracle = MasterAdamW(params, HYPERS)
        for index, p in enumerate(params):
            entry = opt.state.get(p, {"step": 0, "exp_avg": torch.zeros(p.shape), "exp_avg_sq": torch.zeros(p.shape)})
            oracle.steps[index] = int(entry["step"])
            oracle.exp_avg[index], oracle.exp_avg_sq[index] = entry["exp_avg"].float(), entry["exp_avg_sq"].float()
        for step in range(leg * LEG, (leg + 1) * LEG):
            oracle.step(_gradients(params, step))
        state = {
            i: {"step": torch.tensor(float(oracle.steps[i])), "exp_avg": oracle.exp_avg[i]}
            | {"exp_avg_sq": oracle.exp_avg_sq[i], "master": oracle.master(i)}
            for i in range(len(SHAPES))
            if oracle.steps[i]
        }
        with torch.no_grad():
            for p, value in zip(params, oracle.params, strict=True):
                p.copy_(value)
        if leg == 1:
            opt = torch.optim.AdamW(_groups(params))
            opt.load_state_dict({"state": state, "param_groups": opt.state_dict()["param_groups"]})
            _train_alone(params, opt, range(2 * LEG, 3 * LEG))
    expected = copies(oracle.params) + _state_tensors({"state": state})
    for actual in run_ranks(2, _in_16_bits, direct):
        assert_bitwise(actual, expected, "after AdamW, ShardedAdamW, AdamW, ShardedAdamW")


def _loaded_in_use(rank: int, world_size: int, direct: bool) -> list[list[Tensor]]:
    """Full states after a step, of a fresh optimizer and of one in use that have loaded the same."""
    adamw = torch.optim.AdamW(_groups(_parameters(torch.bfloat16)))
    _train_alone([p for group in adamw.param_groups for p in group["params"]], adamw, range(1, 2))
    state = adamw.state_dict()
    del state["state"][5]
    results = []
    for used in (False, True):
        params = _parameters(torch.bfloat16)
        opt = _sharded(params, stage=2)
        if used:
            _train(params, opt, range(20, 23), rank, world_size)
            with torch.no_grad():
                for p, value in zip(params, _parameters(torch.bfloat16), strict=True):
                    p.copy_(value)
        if direct:
            opt.load_state_dict(state)
        else:
            zero_optim.load_full_state_dict(opt, state)
        _train(params, opt, range(2, 3), rank, world_size)
        full = zero_optim.full_state_dict(opt, rank=None)
        assert [float(full["state"][i]["step"]) for i in (0, 1, 5)] == [2.0, 1.0, 1.0]
        results.append(_state_tensors(full) + copies(params))
        opt.close()
    return results


@pytest.mark.parametrize("direct", [False, True], ids=["load_full_state_dict", "load_state_dict"])
def test_nothing_is_left_of_an_older_state(direct):
    for fresh, used in run_ranks(2, _loaded_in_use, direct):
        assert_bitwise(used, fresh, "loaded into an optimizer in use")


# -- over worlds and stages ----------------------------------------------------------------------------------------


def _leg(
    rank: int, world_size: int, leg: int, stage: int, dtype: torch.dtype, saved: tuple[Any, list[Tensor]] | None
) -> tuple[Any, list[Tensor]]:
    """LEG steps from a full state and parameters; the state is loaded before the model where ``leg`` is odd."""
    params = _parameters(dtype)
    opt = _sharded(params, stage, named_too=leg % 2 == 0)
    if saved is not None:
        if leg % 2:
            zero_optim.load_full_state_dict(opt, saved[0] if rank == 0 else None)
        with torch.no_grad():
            for p, value in zip(params, saved[1], strict=True):
                p.copy_(value)
        if leg % 2 == 0:
            zero_optim.load_full_state_dict(opt, saved[0] if rank == 0 else None)
    _train(params, opt, range(leg * LEG, (leg + 1) * LEG), rank, world_size)
    full = zero_optim.full_state_dict(opt, rank=world_size - 1)
    opt.close()
    return through_a_file(full) if full else full, copies(params)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_moving_over_worlds_and_stages_changes_no_bit(dtype):
    oracle = MasterAdamW(_parameters(dtype), HYPERS)
    saved = None
    for leg, (world_size, stage) in enumerate([(1, 2), (2, 0), (3, 2), (2, 1), (1, 0)]):
        saved = run_ranks(world_size, _leg, leg, stage, dtype, saved)[-1]
        for step in range(leg * LEG, (leg + 1) * LEG):
            oracle.step(_gradients(oracle.params, step))
        assert_bitwise(saved[1], oracle.params, f"parameters after leg {leg}")
        state = saved[0]["state"]
        assert list(state) == [i for i in range(len(SHAPES)) if oracle.steps[i]]
        for index, entry in state.items():
            assert float(entry["step"]) == oracle.steps[index]
            assert_bitwise([entry["exp_avg"], entry["exp_avg_sq"]], [oracle.exp_avg[index], oracle.exp_avg_sq[index]])
            if dtype != torch.float32:
                assert_bitwise([entry["master"]], [oracle.master(index)], f"master {index} after leg {leg}")


# -- what it is ----------------------------------------------------------------------------------------------------


def _described(rank: int, world_size: int) -> dict[str, Any]:
    params = _parameters(torch.bfloat16)
    opt = _sharded(params, stage=1, named_too=True)
    torch.optim.lr_scheduler.ConstantLR(opt)
    _train(params, opt, range(1), rank, world_size)
    before = opt.stats()["collectives"]
    with CollectiveLog() as log:
        state = zero_optim.full_state_dict(opt, rank=1)
    gathers = [call for call in log.calls if call.dtype == torch.float32]
    assert {call.name for call in gathers} == {"broadcast_"}  # over gloo a gather is a broadcast a rank
    largest = max(bucket.layout.numel for bucket in opt.engine.reducer.buckets)
    assert len(gathers) == world_size * 3 * opt.stats()["buckets"], "a gather for each of three tensors of a bucket"
    assert max(call.bytes for call in gathers) * world_size == 4 * largest
    assert opt.stats()["collectives"]["state"]["calls"] * world_size == len(gathers)
    assert "state" not in before
    with pytest.raises(ValueError, match="rank must be"):
        zero_optim.full_state_dict(opt, rank=world_size)
    everywhere = zero_optim.full_state_dict(opt, rank=None)
    if rank == 1:
        assert_bitwise(_state_tensors(everywhere), _state_tensors(state))
        kept = copies(_state_tensors(state))
        _train(params, opt, range(2, 3), rank, world_size)
        assert_bitwise(_state_tensors(state), kept, "a copy, not a view of live state")
    else:
        _train(params, opt, range(2, 3), rank, world_size)
    opt.close()
    with pytest.raises(zero_optim.ClosedError):
        zero_optim.full_state_dict(opt)
    return state


def test_a_full_state_is_what_adamw_saves_and_masters():
    nothing, state = run_ranks(2, _described)
    assert nothing == {}
    params = _parameters(torch.bfloat16)
    opt = torch.optim.AdamW(_groups(named(params)))
    torch.optim.lr_scheduler.ConstantLR(opt)
    _train_alone(params, opt, range(1))
    expected = opt.state_dict()
    assert [dict(sorted(group.items())) for group in state["param_groups"]] == [
        dict(sorted(group.items())) for group in expected["param_groups"]
    ]
    assert list(state["state"]) == sorted(expected["state"])
    for index, entry in state["state"].items():
        assert set(entry) == {*expected["state"][index], "master"}
        assert entry["step"].shape == () and entry["step"].dtype == torch.float32
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert (entry[name].shape, entry[name].dtype) == (SHAPES[index], torch.float32)


def _failing_on_one_rank(rank: int, world_size: int) -> str:
    params = _parameters(torch.float32)
    opt = _sharded(params, stage=2)
    _train(params, opt, range(1), rank, world_size)
    if rank == 1:
        states = opt.engine.states
        gathered = states.whole_tensors
        # They arrive, and cannot be copied to the host.
        states.whole_tensors = lambda: ((index, name, whole.to("meta")) for index, name, whole in gathered())
    found = error_of(lambda: zero_optim.full_state_dict(opt, rank=None))
    opt.close()
    return ": ".join(found)


def test_a_rank_that_fails_is_named_on_the_others():
    messages = run_ranks(2, _failing_on_one_rank)
    assert "RankMismatchError: rank 1 failed with NotImplementedError: Cannot copy out of meta" in messages[0]
    assert messages[1].startswith("NotImplementedError: Cannot copy out of meta")


def test_an_edited_weight_is_in_the_masters():
    params = _parameters(torch.bfloat16)
    opt = _sharded(params, stage=2)
    _train(params, opt, range(2), 0, 1)
    with torch.no_grad():
        params[0].fill_(3.0)
    for state in (zero_optim.full_state_dict(opt), opt.state_dict()):
        assert bool((state["state"][0]["master"].bfloat16() == 3.0).all())


def test_adam_and_options_move_too():
    """L2 instead of decoupled decay, maximize, an option of the user's own, a step that is a number."""
    reference, params = _parameters(torch.float32), _parameters(torch.float32)
    adam = torch.optim.Adam(_groups(reference), weight_decay=0.1, maximize=True)
    _train_alone(reference, adam, range(2))
    state = copy.deepcopy(adam.state_dict())
    state["param_groups"][1]["nickname"] = "tail"
    for entry in state["state"].values():
        entry["step"] = int(entry["step"])
    with torch.no_grad():
        for p, value in zip(params, reference, strict=True):
            p.copy_(value)
    opt = zero_optim.ShardedAdamW(_groups(params), decoupled_weight_decay=False)
    zero_optim.load_full_state_dict(opt, state)
    assert opt.param_groups[1]["nickname"] == "tail"
    _train_alone(reference, adam, range(2, 4))
    _train_alone(params, opt, range(2, 4))
    assert_within(params, copies(reference), [adamw_bound(p, 1e-2, 4) for p in reference], "Adam, maximizing")
    full = zero_optim.full_state_dict(opt)
    assert [group["decoupled_weight_decay"] for group in full["param_groups"]] == [False, False]
    assert [group["maximize"] for group in full["param_groups"]] == [True, True]


# -- what does not fit ---------------------------------------------------------------------------------------------


def _broken_states() -> dict[str, tuple[Any, str]]:
    """By name, a state that must be refused and words that the message must hold. ``layerN`` is parameter N."""

    params = _parameters(torch.float32)
    adamw = torch.optim.AdamW(_groups(named(params)))
    _train_alone(params, adamw, range(1))

    def changed(edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        state = copy.deepcopy(adamw.state_dict())
        edit(state)
        return state

    def entry(index: int, **values: Any) -> dict[str, Any]:
        return changed(lambda state: state["state"][index].update(values))

    def group(number: int, **values: Any) -> dict[str, Any]:
        return changed(lambda state: state["param_groups"][number].update(values))

    amsgrad = torch.optim.AdamW(_groups(params), amsgrad=True)
    _train_alone(params, amsgrad, range(1))
    names = [name for name, _ in named(params)]
    return {
        "None": (None, "rank 0"),
        "a list": ([1], "dict"),
        "no groups": ({"state": {}}, "param_groups"),
        "groups that are none": ({"state": {}, "param_groups": [3]}, "param_groups"),
        "a state that is none": ({"state": 3, "param_groups": []}, "state"),
        "another model": (changed(lambda state: state["param_groups"].pop()), "sizes [3]"),
        "a key too many": (changed(lambda state: state["state"].update({99: {}})), "99"),
        "an entry that is none": (changed(lambda state: state["state"].update({2: 5})), "layer2"),
        "no step": (changed(lambda state: state["state"][2].pop("step")), "layer2"),
        "a step that is none": (entry(2, step="two"), "layer2"),
        "half a step": (entry(2, step=1.5), "layer2"),
        "a step of NaN": (entry(2, step=torch.tensor(float("nan"))), "layer2"),
        "no moment": (changed(lambda state: state["state"][5].pop("exp_avg_sq")), "'layer5.weight' has no tensor"),
        "a moment that is none": (entry(5, exp_avg=[1.0, 2.0]), "layer5"),
        "another shape": (entry(0, exp_avg=torch.zeros(9, 17)), "(9, 17), expected (17, 9)"),
        "integers": (entry(0, exp_avg=torch.zeros(17, 9, dtype=torch.int64)), "int64"),
        "a sparse moment": (entry(0, exp_avg=torch.zeros(17, 9).to_sparse()), "sparse"),
        "no values": (entry(0, exp_avg=torch.zeros(17, 9, device="meta")), "meta"),
        "amsgrad": (amsgrad.state_dict(), "amsgrad of parameter group 0"),
        "amsgrad's tensor alone": (entry(1, max_exp_avg_sq=torch.zeros(300)), "max_exp_avg_sq"),
        "L2": (group(1, decoupled_weight_decay=False), "decoupled_weight_decay=False"),
        "a bad lr": (group(1, lr=-1.0), "lr of parameter group 1"),
        "bad betas": (group(1, betas=(0.9, 1.5)), "betas of parameter group 1"),
        "betas that are none": (group(1, betas=None), "parameter groups"),
        "names in another order": (group(0, param_names=[names[1], names[0], names[2]]), "order"),
    }


def _refusals(rank: int, world_size: int, stage: int, direct: bool) -> dict[str, tuple[str, str]]:
    """What loading each broken state raises; nothing may have changed."""
    params = _parameters(torch.float32)
    opt = _sharded(params, stage, named_too=True)
    _train(params, opt, range(2), rank, world_size)
    before = _state_tensors(zero_optim.full_state_dict(opt, rank=None)) + copies(params)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
    found = {}
    for case, (state, _) in _broken_states().items():
        load = opt.load_state_dict if direct else partial(zero_optim.load_full_state_dict, opt)
        found[case] = error_of(partial(load, state if direct or rank == 0 else None))
    assert_bitwise(_state_tensors(zero_optim.full_state_dict(opt, rank=None)) + copies(params), before)
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups]
    if world_size > 1 and not direct:
        with pytest.raises(zero_optim.StateMismatchError, match="one rank's shard"):
            zero_optim.load_full_state_dict(opt, opt.state_dict())
    opt.close()
    return found


@pytest.mark.parametrize("world_size, direct", [(1, False), (1, True), (2, False)])
def test_a_state_that_does_not_fit_changes_nothing_on_any_rank(world_size, direct):
    for found in run_ranks(world_size, _refusals, 2, direct):
        for case, (_, words) in _broken_states().items():
            if direct and case == "None":
                words = "NoneType"
            kind, text = found.get(case, ("nothing raised", ""))
            assert kind == "StateMismatchError", f"{case}: {kind} {text}"
            assert words in text, f"{case}: {text}"


def test_state_of_a_parameter_frozen_here_is_left_out_with_a_warning():
    params = make_parameters(SHAPES)
    adamw = torch.optim.AdamW(_groups(params))
    grads = make_gradients(params, 0, 0)
    linear_backward(params, grads)
    adamw.step()
    opt = _sharded(_parameters(torch.float32), stage=2, named_too=True)
    with pytest.warns(UserWarning, match=f"layer{FROZEN}.weight"):
        zero_optim.load_full_state_dict(opt, adamw.state_dict())
    assert list(zero_optim.full_state_dict(opt)["state"]) == [i for i in range(len(SHAPES)) if i != FROZEN]


def test_hooks_are_called_as_torch_calls_them():
    def note(log: list[str]) -> dict[str, Callable[..., Any]]:
        def rename(opt: Any, state: dict[str, Any]) -> dict[str, Any]:
            log.append("load before")
            state["state"] = {key: entry for key, entry in state["state"].items() if key != "extra"}
            return dict(state)

        return {
            "state_dict_pre_hook": lambda opt: log.append("save before"),
            "state_dict_post_hook": lambda opt, state: {**state, "note": log.append("save after")},
            "load_state_dict_pre_hook": rename,
            "load_state_dict_post_hook": lambda opt: log.append("load after"),
        }

    logs: list[list[str]] = []
    for make in (torch.optim.AdamW, zero_optim.ShardedAdamW):
        params = _parameters(torch.float32)
        opt, log = make(_groups(params)), []
        logs.append(log)
        handles = [getattr(opt, f"register_{name}")(hook) for name, hook in note(log).items()]
        _train_alone(params, opt, range(1))
        state = opt.state_dict()
        assert "note" in state
        given = {**state, "state": {**state["state"], "extra": {}}}
        opt.load_state_dict(given)
        assert "extra" in given["state"], "the hook has a copy"
        if isinstance(opt, zero_optim.ShardedAdamW):
            zero_optim.load_full_state_dict(opt, zero_optim.full_state_dict(opt))
            assert log.pop() == "load after"
        for handle in handles:
            handle.remove()
        opt.state_dict()
    assert logs[0] == logs[1] == ["save before", "save after", "load before", "load after"]
