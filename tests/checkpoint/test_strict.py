"""What is missing in a checkpoint and what is left over in it is named, with counts, before anything is changed."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import zero_optim
from checkpoint_cases import assert_bits
from harness import run_ranks
from sharded_cases import full_state, gathered
from small_jobs import Stateful
from torch import nn
from zero_optim import ShardedAdamW, StateMismatchError, checkpoint


class Two(nn.Module):
    """Two layers; ``change`` makes another model of it."""

    def __init__(self, change: Callable[[Two], object] = lambda model: None) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(3))
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def optimizer(model: nn.Module, groups: Callable[[nn.Module], Any], stage: int) -> ShardedAdamW:
    if stage == 3:
        zero_optim.shard_module(model, [nn.Linear])
    return ShardedAdamW(groups(model), stage=None if stage == 3 else stage, bucket_cap_mb=0.0002)


def one_group(model: nn.Module) -> Any:
    return model.named_parameters()


def save(rank: int, world_size: int, folder: str, stage: int, changed: str | None = None, **more: Any) -> None:
    change, groups = CASES[changed][:2] if changed else (lambda model: None, one_group)
    torch.manual_seed(0)
    model = Two(change)
    opt = optimizer(model, groups, stage)
    model(torch.ones(2, 6)).square().sum().backward()
    opt.step()
    opt.zero_grad()
    checkpoint.save(folder, model, opt, **more)


def _freeze(model: Two) -> None:
    model.second.requires_grad_(False)


def _tie(model: Two) -> None:
    model.second.weight = model.first.weight


def split(*sizes: int) -> Callable[[nn.Module], Any]:
    def groups(model: nn.Module) -> Any:
        named = list(model.named_parameters())
        ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
        return [{"params": named[end - size : end]} for size, end in zip(sizes, ends, strict=True)]

    return groups


# By name: what makes the model another, the optimizer's groups, and what loading the plain one into it says.
CASES: dict[str, tuple[Callable[[Two], object], Callable[[nn.Module], Any], list[str]]] = {
    "a layer was added": (
        lambda model: setattr(model, "third", nn.Linear(6, 2)),
        one_group,
        [
            "missing in the checkpoint: 2 parameters, third.bias, third.weight",
            r"missing in the checkpoint: the state \(exp_avg, exp_avg_sq\) of 2 parameters, third.bias, third.weight",
            r"the parameter groups differ \(sizes \[6\] here, \[4\] there\): 'third.bias' is in no group there",
        ],
    ),
    "a layer is gone": (
        lambda model: setattr(model, "second", nn.Identity()),
        one_group,
        [
            "left over in the checkpoint: 2 parameters, second.bias, second.weight",
            r"left over in the checkpoint, and not trained or not kept here: the state \(exp_avg, exp_avg_sq\) of 2 "
            "parameters, second.bias, second.weight",
            "'second.bias' is in no group here",
        ],
    ),
    "a buffer was renamed": (
        lambda model: (model.register_buffer("board", model.table), delattr(model, "table")),
        one_group,
        ["missing in the checkpoint: 1 buffer, board", "left over in the checkpoint: 1 buffer, table"],
    ),
    "frozen": (
        _freeze,
        one_group,
        [r"not trained or not kept here: the state \(exp_avg, exp_avg_sq\) of 2 parameters, second.bias, "],
    ),
    "tied": (
        _tie,
        one_group,
        [r"left over in the checkpoint: 1 parameter, second.weight \(tied to first.weight here\)"],
    ),
    "groups are split otherwise": (
        lambda model: None,
        split(1, 3),
        [r"the parameter groups differ \(sizes \[1, 3\] here, \[4\] there\): 'first.bias' is in group 1 here"],
    ),
}


def load(rank: int, world_size: int, folder: str, stage: int, name: str) -> tuple[str, tuple[str, ...]]:
    """What strict loading raises, with nothing changed; and what the other says."""
    change, groups, _ = CASES[name]
    torch.manual_seed(1)
    model = Two(change)
    opt = optimizer(model, groups, stage)
    before = gathered(model), full_state(opt)
    with pytest.raises(StateMismatchError) as raised:
        checkpoint.load(folder, model, opt)
    assert_bits(before[0], gathered(model))
    assert full_state(opt).keys() == before[1].keys() == set()
    loaded = checkpoint.load(folder, model, opt, strict=False)
    after = gathered(model)
    torch.manual_seed(0)
    saved = dict(Two().named_parameters())
    assert not torch.equal(after["first.bias"], before[0]["first.bias"])
    assert torch.allclose(after["first.bias"], saved["first.bias"].detach(), atol=2e-3)  # a step of 1e-3 later
    state = full_state(opt)
    names = [name for group in opt.param_groups for name in group["param_names"]]
    assert {names[index] for index in state} == {
        n for n in names if n in saved and not (name == "frozen" and "second" in n)
    }
    model(torch.ones(2, 6)).square().sum().backward()
    opt.step()
    return str(raised.value), loaded.notes


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_named(tmp_path: Path, stage: int, name: str) -> None:
    run_ranks(2, save, str(tmp_path), 2)
    for message, notes in run_ranks(2, load, str(tmp_path), stage, name):
        assert re.search("step-1 does not fit: .*With strict=False what fits is loaded", message)
        for part in CASES[name][2]:
            assert re.search(part, message), (part, message)
            assert any(re.search(part, note) for note in notes), (part, notes)


def thawed(rank: int, world_size: int, folder: str, stage: int) -> tuple[tuple[str, ...], list[int]]:
    torch.manual_seed(1)
    model = Two()
    opt = optimizer(model, one_group, stage)
    notes = checkpoint.load(folder, model, opt).notes
    model(torch.ones(2, 6)).square().sum().backward()
    opt.step()
    return notes, [int(entry["step"]) for entry in full_state(opt).values()]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_was_frozen_and_is_trained_now_begins_anew(tmp_path: Path, stage: int) -> None:
    run_ranks(2, save, str(tmp_path), stage, "frozen")
    for notes, steps in run_ranks(2, thawed, str(tmp_path), stage):
        assert notes == ("never updated before: 2 parameters, second.bias, second.weight",)
        assert sorted(steps) == [1, 1, 2, 2]


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_never_loaded(tmp_path: Path, strict: bool) -> None:
    save(0, 1, str(tmp_path), 2)
    model = Two(lambda model: setattr(model, "second", nn.Linear(6, 5)))
    with pytest.raises(StateMismatchError, match=r"parameter 'second.bias' has shape \[5\] of .* here, and \[6\] of"):
        checkpoint.load(tmp_path, model, strict=strict)


def test_what_is_beside_the_tensors_is_asked_for_too(tmp_path: Path) -> None:
    save(0, 1, str(tmp_path / "with"), 2, scheduler=Stateful(1), scaler=Stateful(2), data=Stateful(3))
    save(0, 1, str(tmp_path / "without"), 2)
    model = Two()
    opt = ShardedAdamW(model.named_parameters())
    with pytest.raises(
        StateMismatchError,
        match=r"1 scaler\(s\), and 0 given here: give load scaler=.*1 scheduler\(s\).*load scheduler=.*has positions",
    ):
        checkpoint.load(tmp_path / "with", model, opt)
    with pytest.raises(StateMismatchError, match=r"0 scheduler\(s\), and 1 given here"):
        checkpoint.load(tmp_path / "without", model, opt, scheduler=Stateful())
    assert checkpoint.load(tmp_path / "with", model).notes == ()  # the model alone asks for nothing else
    one, two, three = Stateful(), Stateful(), Stateful()
    checkpoint.load(tmp_path / "with", model, opt, scheduler=one, scaler=two, data=three)
    assert [one.state, two.state, three.state] == [1, 2, 3]
    fewer = [opt, ShardedAdamW(nn.Linear(2, 2).named_parameters())]
    with pytest.raises(zero_optim.ParameterError, match="is in the optimizer, and not in the model"):
        checkpoint.load(tmp_path / "without", model, fewer)


def test_averages_that_are_left_over_are_told_with_the_argument_that_keeps_them(tmp_path: Path) -> None:
    model = Two()
    opt = ShardedAdamW(model.named_parameters(), ema_decay=0.9)
    model(torch.ones(2, 6)).square().sum().backward()
    opt.step()
    checkpoint.save(tmp_path, model, opt)
    opt.close()
    opt = ShardedAdamW(model.named_parameters())
    with pytest.raises(StateMismatchError, match=r"the state \(ema\) of .*make the optimizer with ema_decay="):
        checkpoint.load(tmp_path, model, opt)
    opt.close()


def test_adam_and_adamw_are_told_apart(tmp_path: Path) -> None:
    model = Two()
    opt = ShardedAdamW(model.named_parameters(), decoupled_weight_decay=False)
    checkpoint.save(tmp_path, model, opt)
    opt.close()
    opt = ShardedAdamW(model.named_parameters())
    with pytest.raises(StateMismatchError, match="was trained with decoupled_weight_decay=False"):
        checkpoint.load(tmp_path, model, opt)


def two_optimizers(rank: int, world_size: int, folder: str, swapped: bool) -> list[float]:
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
    opts = [ShardedAdamW(model[name].named_parameters(), lr=lr) for name, lr in (("g", 0.1), ("d", 0.2))]
    for name, opt in zip(("g", "d"), opts, strict=True):
        model[name](torch.ones(1, 3)).sum().backward()
        opt.step()
    checkpoint.save(folder, model, opts)
    for opt in opts:
        opt.param_groups[0]["lr"] = 0.5
    if swapped:
        with pytest.raises(StateMismatchError, match="the parameter groups differ"):
            checkpoint.load(folder, model, opts[::-1])
    else:
        checkpoint.load(folder, model, opts)
    return [opt.param_groups[0]["lr"] for opt in opts]


@pytest.mark.parametrize("swapped", [False, True])
def test_two_optimizers_of_one_model(tmp_path: Path, swapped: bool) -> None:
    assert run_ranks(2, two_optimizers, str(tmp_path), swapped) == [[0.5, 0.5] if swapped else [0.1, 0.2]] * 2


def test_another_kind_of_optimizer_is_told(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    sgd.step()
    checkpoint.save(tmp_path, model, sgd, step=1)
    with pytest.raises(StateMismatchError, match="optimizer 0 was saved by a SGD"):
        checkpoint.load(tmp_path, model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(StateMismatchError, match=r"the state \(momentum_buffer\) of 2 parameters"):
        checkpoint.load(tmp_path, model, ShardedAdamW(model.named_parameters()))
    other = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.1)
    checkpoint.load(tmp_path, model, other)
    assert other.param_groups[0]["momentum"] == 0.9
    assert all(
        torch.equal(other.state[p]["momentum_buffer"], sgd.state[p]["momentum_buffer"]) for p in model.parameters()
    )


def test_steps_follow_their_parameters_into_fewer_optimizers(tmp_path: Path) -> None:
    model = nn.ModuleDict({"g": nn.Linear(3, 3), "d": nn.Linear(3, 3)})
    opts = [ShardedAdamW(model[name].named_parameters()) for name in ("g", "d")]
    for _ in range(3):
        model["d"](torch.ones(1, 3)).sum().backward()
        opts[1].step()
        opts[1].zero_grad()
    checkpoint.save(tmp_path, model, opts)
    for opt in opts:
        opt.close()
    for one in (torch.optim.AdamW(model.parameters()), ShardedAdamW(model.named_parameters())):
        with pytest.raises(StateMismatchError, match="the checkpoint has 2 optimizers, and 1 are given here"):
            checkpoint.load(tmp_path, model, one)
        checkpoint.load(tmp_path, model, one, strict=False)
        state = one.state_dict()["state"]
        assert sorted(float(entry["step"]) for entry in state.values()) == [0, 0, 3, 3]
        model["d"](torch.ones(1, 3)).sum().backward()
        one.step()


class Counting(nn.Linear):
    """A layer with a state of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_the_extra_state_of_modules_comes_along(tmp_path: Path) -> None:
    model = nn.Sequential(Counting(), nn.Linear(2, 2))
    model[0].count = 3
    checkpoint.save(tmp_path, model, step=1)
    again = nn.Sequential(Counting(), nn.Linear(2, 2))
    checkpoint.load(tmp_path, again)
    assert again[0].count == 3
    with pytest.raises(StateMismatchError, match=r"modules with a state of their own are \[\] here, and \['0'\] there"):
        checkpoint.load(tmp_path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def refuse(rank: int, world_size: int, folder: str, stage: int, refusing: str) -> str:
    """What raises where ``refusing`` on the last rank does not take its state: nothing has changed anywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(Two(), Counting())
    opt = optimizer(model, one_group, stage)
    model[0](torch.ones(2, 6)).square().sum().backward()
    opt.step()
    given, last = {name: Stateful(1) for name in ("scaler", "scheduler", "data")}, rank == world_size - 1
    of_another = {"torch": torch.zeros(3, dtype=torch.uint8), "python": random.getstate()}
    patched = mock.patch("zero_optim.checkpoint.saving.read_random_states", lambda device: of_another)
    with patched if refusing == "random" and last else contextlib.nullcontext():
        checkpoint.save(folder, model, opt, **given)
    opt.zero_grad()
    model[0](torch.ones(2, 6)).square().sum().backward()
    opt.step()
    model[1].count, opt.param_groups[0]["lr"] = 5, 0.5
    given = {name: Stateful(2, refuses=last and name == refusing) for name in given}
    if refusing == "module" and last:
        model[1].set_extra_state = lambda state: given["none"]
    before, random_state = (gathered(model[0]), full_state(opt)), torch.get_rng_state()
    with pytest.raises(zero_optim.ZeroOptimError) as raised:
        checkpoint.load(folder, model, opt, **given)
    assert isinstance(raised.value, StateMismatchError) or refusing == "random"
    assert_bits(before[0], gathered(model[0]))
    state = full_state(opt)
    for index, entry in before[1].items():
        assert_bits(entry, state[index])
    assert torch.equal(random_state, torch.get_rng_state())
    assert model[1].count == 5 and opt.param_groups[0]["lr"] == 0.5
    assert [one.state for one in given.values()] == [2, 2, 2]
    return str(raised.value)


@pytest.mark.parametrize(
    ("refusing", "stage", "says"),
    [
        ("scheduler", 2, "the scheduler does not take its .*KeyError"),
        ("data", 3, "the data does not take its .*KeyError"),
        ("module", 3, "the module '1' does not take its .*KeyError"),
        ("random", 2, "a random number generator does not take the state that rank 1 has saved"),
    ],
)
def test_where_another_refuses_its_state_nothing_has_changed(
    tmp_path: Path, refusing: str, stage: int, says: str
) -> None:
    for message in run_ranks(2, refuse, str(tmp_path), stage, refusing):
        assert re.search(says, message)


@pytest.mark.parametrize("how", ["expanded", "inference"])
def test_a_tensor_that_torch_does_not_write_is_named_before_others_are_written(tmp_path: Path, how: str) -> None:
    model = nn.Linear(6, 6)
    model.register_buffer("mask", torch.arange(4.0).repeat(3, 1))
    model.register_buffer("nothing", torch.ones(1, 0).expand(3, 0))
    checkpoint.save(tmp_path, model, step=1)
    zero_optim.checkpoint.hugging_face.export(tmp_path, tmp_path / "out")
    with torch.inference_mode(how == "inference"):
        model.register_buffer("mask", torch.arange(4.0).expand(3, 4) if how == "expanded" else torch.ones(3, 4))
    checkpoint.save(tmp_path, model, step=2)
    model.weight.data.zero_()
    for load in (
        lambda: checkpoint.load(tmp_path, model),
        lambda: zero_optim.load_safetensors(model, tmp_path / "out"),
    ):
        with pytest.raises(zero_optim.ParameterError, match=r"the buffer 'mask' .* give .* a .clone\(\)"):
            load()
        assert not model.weight.any()
