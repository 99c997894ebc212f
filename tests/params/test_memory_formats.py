"""A channels_last model keeps its strides, and all else is what it is with a contiguous one, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import zero_optim
from cells import halves
from harness import run_ranks
from memory_formats import given_net, same_layout, strides, strides_of, to_channels_last
from oracle import adamw_bound
from sharded_cases import Given, GivenNet, Run, full_state, gathered, make
from torch import Tensor, nn
from training_cases import assert_bitwise, assert_within, copies, linear_backward, make_gradients, maybe_no_sync

STEPS = 5
SKIPPED, KEPT = 3, 1  # steps: one with an inf on the last rank; one without zero_grad after it


@dataclass(frozen=True)
class _Trained:
    values: dict[str, Tensor]
    state: dict[int, dict[str, Tensor]]
    norms: list[float]
    skipped: int


def _train(rank: int, world_size: int, run: Run, channels_last: bool) -> _Trained:
    """Gradients are given, and on a grid: sums are exact in any order."""
    net = given_net(channels_last, run.dtype, seed=rank)
    before, like = strides(net), copies(net.parameters())
    model, opt = make(run, net, units=(Given,))
    assert strides(model) == before
    norms = []
    for step in range(STEPS):
        for micro in range(run.micro):
            grads = make_gradients(like, rank, step, micro, grid=world_size)
            if step == SKIPPED and rank == world_size - 1:
                grads[0][3, 1, 2, 0] = torch.inf
            with maybe_no_sync(opt, run.no_sync and micro < run.micro - 1):
                model(grads).backward()
        assert all(same_layout(p.grad, p) for p in model.parameters())
        if run.clip is not None:
            norms.append(float(opt.clip_grad_norm_(run.clip)))
        opt.step()
        if step != KEPT:
            opt.zero_grad()
        assert strides(model) == before
    values, state = gathered(model), full_state(opt)
    assert strides_of(values) == before
    for entry, stride in zip(state.values(), before.values(), strict=True):
        assert all(entry[name].stride() == stride for name in entry.keys() - {"step"})
    skipped = opt.stats()["skipped_steps"]
    opt.close()
    return _Trained(values, state, norms, skipped)


def _both(rank: int, world_size: int, run: Run) -> None:
    contiguous, ours = (_train(rank, world_size, run, channels_last) for channels_last in (False, True))
    assert_bitwise([*ours.values.values()], [*contiguous.values.values()])
    assert ours.state.keys() == contiguous.state.keys() and len(ours.state) == 9
    for index, entry in ours.state.items():
        assert entry.keys() == contiguous.state[index].keys()
        assert_bitwise([*entry.values()], [contiguous.state[index][name] for name in entry], f"state of {index}")
    assert ours.norms[:SKIPPED] == contiguous.norms[:SKIPPED]
    assert ours.skipped == contiguous.skipped == 1


WAYS = (
    Run(),
    Run(micro=2, no_sync=True, clip=0.5),
    Run(dtype=torch.bfloat16, micro=2, clip=0.5),
    Run(dtype=torch.bfloat16, options={"overlap_grad_reduce": False}),
    Run(dtype=torch.bfloat16, options={"grad_reduce_dtype": torch.float32}),
)


def _half_of_the_ways(rank: int, world_size: int, stage: int, half: int) -> None:
    for run in WAYS[half::2]:
        _both(rank, world_size, run.at(stage))


@pytest.mark.parametrize(
    ("world_size", "stage", "half"), halves([(1, 0), (2, 0), (2, 1), (1, 1), (1, 2), (2, 2), (2, 3), (1, 3)])
)
def test_bits_are_those_of_a_contiguous_model(world_size: int, stage: int, half: int) -> None:
    run_ranks(world_size, _half_of_the_ways, stage, half)


# -- one rank --------------------------------------------------------------------------------------------------------


def _convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.Flatten(), nn.Linear(96, 4))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def _backward(model: nn.Module, step: int) -> None:
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.channels_last)
    model(x).square().mean().backward()


def test_parameters_are_those_of_adamw_on_a_channels_last_model() -> None:
    model, twin = _convolutions(), _convolutions()
    ours, theirs = zero_optim.ShardedAdamW(model.parameters(), lr=1e-2), torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(4):
        _backward(model, step)
        for parameter, own in zip(model.parameters(), twin.parameters(), strict=True):
            assert parameter.grad.stride() == parameter.stride() == own.stride()
            own.grad = parameter.grad.clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
    bounds = [adamw_bound(p.detach(), 1e-2, 4) for p in twin.parameters()]
    assert_within([*model.parameters()], [*twin.parameters()], bounds, "parameters")
    ours.close()


def test_autograd_accumulates_in_place() -> None:
    """``.grad`` is a view of the bucket with the parameter's strides: another would be replaced by a new tensor."""
    model = _convolutions()
    opt = zero_optim.ShardedAdamW(model.parameters())
    _backward(model, 0)
    held = [p.grad for p in model.parameters()]
    _backward(model, 1)
    assert all(p.grad is before for p, before in zip(model.parameters(), held, strict=True))
    opt.close()


def test_the_format_may_be_asked_for_again() -> None:
    model = _convolutions()
    opt = zero_optim.ShardedAdamW(model.parameters())
    _backward(model, 0)
    opt.step()
    places = [p.data_ptr() for p in model.parameters()]
    model.to(memory_format=torch.channels_last)
    assert [p.data_ptr() for p in model.parameters()] == places
    _backward(model, 1)
    opt.step()
    opt.close()


@pytest.mark.parametrize("then", [torch.channels_last, torch.contiguous_format])
def test_another_format_comes_before_the_optimizer(then: torch.memory_format) -> None:
    first = torch.contiguous_format if then is torch.channels_last else torch.channels_last
    model = _convolutions().to(memory_format=first)
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    model.to(memory_format=then)
    now = "channels_last on" if then is torch.channels_last else "float32 on"
    with pytest.raises(zero_optim.ParameterError, match=rf"weight' was .* memory format .*{now} cpu.*before"):
        _backward(model, 0)
    opt.close()


def test_strides_that_change_in_place_are_noticed() -> None:
    weight = nn.Parameter(torch.randn(4, 4, 4, 4).to(memory_format=torch.channels_last))
    opt = zero_optim.ShardedAdamW([("weight", weight)])
    weight.data = weight.data.transpose(0, 1)  # of the same memory
    with pytest.raises(zero_optim.ParameterError, match="weight"):
        linear_backward([weight], [torch.ones(4, 4, 4, 4)])
    opt.close()


@pytest.mark.parametrize(
    "odd",
    [
        torch.randn(3, 8, 16, 3).permute(2, 1, 0, 3),
        torch.randn(16, 9, 3, 3).to(memory_format=torch.channels_last)[:, :8],
    ],
    ids=["dense", "with gaps"],
)
def test_other_strides_become_contiguous(odd: Tensor) -> None:
    params, twins = ([nn.Parameter(p)] for p in (odd, odd.contiguous()))
    opts = [zero_optim.ShardedAdamW(of) for of in (params, twins)]
    assert params[0].is_contiguous()
    for of, opt in zip((params, twins), opts, strict=True):
        linear_backward(of, make_gradients(of, 0, 0))
        opt.step()
        opt.close()
    assert_bitwise(params, twins)


# -- gradients in another format ---------------------------------------------------------------------------------------


def _assigned(rank: int, world_size: int, stage: int) -> list[list[Tensor]]:
    """Gradients by hand: contiguous ones for channels_last parameters, and the other way round."""
    results = []
    for channels_last in (False, True):
        model, opt = make(Run(stage=stage), given_net(channels_last))
        grads = make_gradients(copies(model.parameters()), rank, 0, grid=world_size)
        for number, (parameter, grad) in enumerate(zip(model.parameters(), grads, strict=True)):
            other = torch.contiguous_format if channels_last else torch.channels_last
            parameter.grad = grad.to(memory_format=other) if grad.dim() == 4 and number != 3 else grad
        opt.step()
        results.append([*gathered(model).values()])
        opt.close()
    return results


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2)])
def test_assigned_gradients_of_another_format(world_size: int, stage: int) -> None:
    for contiguous, ours in run_ranks(world_size, _assigned, stage):
        assert_bitwise(ours, contiguous)


# -- several ranks ---------------------------------------------------------------------------------------------------


def _disagree(rank: int, world_size: int, stage: int) -> str:
    net = given_net(channels_last=rank == 1)
    with pytest.raises(zero_optim.RankMismatchError) as caught:
        make(Run(stage=stage), net, units=(Given,))
    return str(caught.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_whose_formats_differ_are_told(stage: int) -> None:
    for text in run_ranks(2, _disagree, stage):
        assert "rank 1 differs" in text and text.count("channels_last") == 1


def _sharded(rank: int) -> tuple[GivenNet, Any, dict[str, Tensor]]:
    net = given_net(channels_last=True, seed=rank)
    model, opt = make(Run(stage=3), net, units=(Given,))
    return model, opt, {name: p.detach() for name, p in given_net(False).named_parameters()}


def _write(rank: int, world_size: int) -> None:
    model, opt, start = _sharded(rank)
    before = strides(model)
    assert_bitwise([*gathered(model).values()], [*start.values()])
    with zero_optim.gather_parameters(model, writeback=True):
        assert strides(model) == before
        for parameter in model.parameters():
            parameter.detach().mul_(2)
    assert strides(model) == before
    assert_bitwise([*gathered(model).values()], [2 * value for value in start.values()])
    for state in (start, strided := dict(given_net(True).named_parameters())):  # in either format
        with torch.no_grad():
            model.load_state_dict({name: value.detach() + 1 for name, value in state.items()})
        assert_bitwise([*gathered(model).values()], [value + 1 for value in start.values()])
        assert strides(model) == before
    assert strides_of(strided) == before
    with pytest.raises(zero_optim.ParameterError, match="memory format, before zero_optim.shard_module"):
        model.units[0].weights[0].to(memory_format=torch.contiguous_format)
    assert model.units[0].weights[0].to(memory_format=torch.channels_last) is model.units[0].weights[0]
    whole = zero_optim.full_model_state_dict(model, rank=None)
    assert strides_of(whole) == before
    assert_bitwise([*whole.values()], [value + 1 for value in start.values()])
    opt.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_parameters_are_read_and_written(world_size: int) -> None:
    run_ranks(world_size, _write)


# -- state dicts -------------------------------------------------------------------------------------------------------


def _given_steps(rank: int, world_size: int, model: nn.Module, opt: Any, steps: range) -> None:
    like = copies(given_net(False).parameters())
    for step in steps:
        model([g.to(torch.bfloat16) for g in make_gradients(like, rank, step, grid=world_size)]).backward()
        opt.step()
        opt.zero_grad()


def _state_dicts(rank: int, world_size: int, stage: int) -> None:
    run = Run(stage=stage, dtype=torch.bfloat16, options={"bucket_cap_mb": 0.0005})
    (model, opt), (again, fresh), (plain, other) = (
        make(run, given_net(channels_last, torch.bfloat16), units=(Given,)) for channels_last in (True, True, False)
    )
    _given_steps(rank, world_size, model, opt, range(2))
    saved, weights = opt.state_dict(), gathered(model)
    whole = zero_optim.full_state_dict(opt, rank=None)
    fresh.load_state_dict(saved)
    again.load_state_dict(model.state_dict())
    if world_size > 1 and stage:
        with pytest.raises(zero_optim.StateMismatchError, match="was saved as FlatShard"):
            other.load_state_dict(saved)
    else:
        other.load_state_dict(saved)
    for model_then, opt_then in ((again, fresh), (plain, other)):
        if opt_then is other:
            zero_optim.load_full_state_dict(opt_then, whole)
            with zero_optim.gather_parameters(model_then, writeback=True):
                for name, parameter in model_then.named_parameters():
                    parameter.detach().copy_(weights[name])
        for index, entry in zero_optim.full_state_dict(opt_then, rank=None)["state"].items():
            assert_bitwise([*entry.values()], [whole["state"][index][name] for name in entry])
    _given_steps(rank, world_size, model, opt, range(2, 4))
    for model_then, opt_then in ((again, fresh), (plain, other)):
        _given_steps(rank, world_size, model_then, opt_then, range(2, 4))
        assert_bitwise([*gathered(model_then).values()], [*gathered(model).values()])
    for one in (opt, fresh, other):
        one.close()


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_state_dicts(world_size: int, stage: int) -> None:
    run_ranks(world_size, _state_dicts, stage)


@pytest.mark.parametrize("channels_last", [False, True])
def test_states_of_adamw_in_either_format(channels_last: bool) -> None:
    """From ``AdamW`` on one format to ours on the other, and back."""
    twin, model = given_net(not channels_last), given_net(channels_last)
    theirs, ours = torch.optim.AdamW(twin.parameters()), zero_optim.ShardedAdamW(model.parameters())
    like = copies(model.parameters())
    twin(make_gradients(like, 0, 0)).backward()
    theirs.step()
    zero_optim.load_full_state_dict(ours, theirs.state_dict())
    first = theirs.state_dict()["state"]
    for state in (ours.state_dict()["state"], zero_optim.full_state_dict(ours)["state"]):
        for index, entry in state.items():
            assert_bitwise([entry[name] for name in first[index]], [*first[index].values()], f"state of {index}")
    to_channels_last(twin)
    back = torch.optim.AdamW(twin.parameters())
    back.load_state_dict(zero_optim.full_state_dict(ours))
    for index, entry in back.state_dict()["state"].items():
        assert_bitwise([*entry.values()], [first[index][name] for name in entry])
    ours.close()
