"""Habits that torch.optim.AdamW allows: each trains the same here, or is refused by an error that says what to do."""

from __future__ import annotations

import collections
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import zero_optim
from cells import halves
from harness import run_ranks
from oracle import adamw_bound, averages
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    assert_within,
    copies,
    error_of,
    linear_backward,
    make_gradients,
    named,
)
from training_cases import make_parameters as parameters_of

SHAPES = ((8, 4), (5,), (8, 4), (3, 3), (0,), (40, 25))
LR = 1e-2
STEPS = 4
MOST_STEPS = 2 * STEPS  # of any habit: for the bound

Make = Callable[[Any], torch.optim.Optimizer]
Gradients = Callable[[int], list[Tensor]]
# Trains ``params`` in an optimizer that it makes; ``gradients(step)`` are this rank's, or for AdamW the averaged ones.
Habit = Callable[[Make, list[nn.Parameter], Gradients], torch.optim.Optimizer]


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return parameters_of(SHAPES, dtype)


def _gradients(rank: int, world_size: int, step: int) -> list[Tensor]:
    """On a grid: averages and sums are exact, whatever their order."""
    return make_gradients(make_parameters(), rank, step, grid=world_size)


def _averages(world_size: int, step: int) -> list[Tensor]:
    return averages([_gradients(rank, world_size, step) for rank in range(world_size)])


def _sharded(stage: int = 2, cap: float = TINY_CAP_MB) -> Make:
    return partial(zero_optim.ShardedAdamW, lr=LR, stage=stage, bucket_cap_mb=cap)


def _ours(rank: int, world_size: int, habits: Sequence[Habit], stage: int) -> list[list[Tensor]]:
    """The parameters after each habit."""
    results = []
    for habit in habits:
        params = make_parameters()
        opt = habit(_sharded(stage), params, partial(_gradients, rank, world_size))
        opt.close()
        results.append(copies(params))
    return results


def _assert_near(params: Sequence[Tensor], theirs: Sequence[Tensor], what: str) -> None:
    assert_within(params, theirs, [4 * adamw_bound(p.detach(), LR, MOST_STEPS) for p in theirs], what)


def _assert_trains_as_adamw(*habits: Habit, world_size: int = 1, stage: int = 2) -> None:
    """Plays each habit with AdamW on the averaged gradients, and here on every rank with its own."""
    alone = world_size == 1
    ranks = [_ours(0, 1, habits, stage)] if alone else run_ranks(world_size, _ours, habits, stage)
    for habit, *of_ranks in zip(habits, *ranks, strict=True):
        theirs = make_parameters()
        habit(partial(torch.optim.AdamW, lr=LR), theirs, partial(_averages, world_size))
        for params in of_ranks:
            _assert_near(params, theirs, f"stage {stage}, {world_size} ranks, {habit}")
            assert_bitwise(params, of_ranks[0], f"ranks differ, {habit}")


def _step(opt: torch.optim.Optimizer, params: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    linear_backward(params, gradients)
    opt.step()
    opt.zero_grad()


# -- names that clash -------------------------------------------------------------------------------------------------


def _two_networks(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """A generator's and a discriminator's parameters under the same names, and two under their own."""
    names = ("weight", "bias", "weight", "bias", "empty", "scale")
    pairs = list(zip(names, params, strict=True))
    return [{"params": pairs[:2]}, {"params": pairs[2:]}]


def _saved_and_loaded(
    rank: int, world_size: int, stage: int, full: bool
) -> tuple[list[Tensor], list[Tensor], list[str | int]]:
    """Parameters after steps without and with a save half-way, and the keys of the state."""
    gradients = partial(_gradients, rank, world_size)
    params = make_parameters()
    opt = _sharded(stage)(_two_networks(params))
    for step in range(STEPS):
        _step(opt, params, gradients(step))
    keys = list(opt.state_dict()["state"])
    state = copy.deepcopy(zero_optim.full_state_dict(opt, rank=None) if full else opt.state_dict())
    later = [nn.Parameter(values) for values in copies(params)]
    for step in range(STEPS, MOST_STEPS):
        _step(opt, params, gradients(step))
    opt.close()
    opt = _sharded(stage)(_two_networks(later))
    opt.load_state_dict(state)
    for step in range(STEPS, MOST_STEPS):
        _step(opt, later, gradients(step))
    opt.close()
    return copies(later), copies(params), keys


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 1), (2, 2)])
def test_a_state_with_clashing_names_holds_every_parameter_and_continues_exactly(world_size, stage, full):
    for loaded, straight, keys in run_ranks(world_size, _saved_and_loaded, stage, full):
        assert set(keys) == {0, 1, 2, 3, "empty", "scale"}, "clashing names give way to the index"
        assert_bitwise(loaded, straight, "after loading")


def test_clashing_names_in_one_list_hold_every_parameter():
    params = make_parameters()[:5]
    opt = _sharded()([*named(params[:2]), *named(params[2:])])
    _step(opt, params, _gradients(0, 1, 0)[:5])
    assert set(opt.state_dict()["state"]) == {0, 1, 2, 3, "layer2.weight"}
    opt.close()


def test_a_message_on_a_clashing_name_tells_which_parameter_of_which_group():
    params = make_parameters()
    opt = _sharded()(_two_networks(params))
    params[3].data = params[3].data.double()
    with pytest.raises(zero_optim.ParameterError) as caught:
        linear_backward(params, _gradients(0, 1, 0))
    assert all(word in str(caught.value) for word in ("parameter 1", "'bias'", "group 1")), caught.value
    with pytest.raises(zero_optim.ParameterError) as caught:
        zero_optim.ShardedAdamW(_two_networks([*params[:2], *make_parameters(torch.float64)[2:]]))
    assert all(word in str(caught.value) for word in ("parameter 0", "'weight'", "group 1")), caught.value
    opt.close()


# -- gradients that are kept ------------------------------------------------------------------------------------------

KEEP: dict[str, Callable[[Sequence[Tensor]], list[Tensor]]] = {
    "gradients": lambda params: [p.grad for p in params],
    "views": lambda params: [p.grad.view(-1) for p in params],
    "detached": lambda params: [p.grad.detach() for p in params],
    "one": lambda params: [params[2].grad],
    "view of one": lambda params: [params[5].grad[3:7]],
}
DROP: dict[str, Callable[[Any, Sequence[nn.Parameter]], None]] = {
    "optimizer": lambda opt, params: opt.zero_grad(),
    "model": lambda opt, params: nn.ParameterList(params).zero_grad(),
    "hand": lambda opt, params: _set_grads(params, [None] * len(params)),
}
# Where a gradient is readable after backward: world size, stage, and whether backward is under no_sync().
READABLE = [(1, 0, False), (1, 2, False), (2, 0, False), (2, 1, True)]


def _set_grads(params: Sequence[Tensor], grads: Iterable[Tensor | None]) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad


def _maybe_local(opt: Any, local: bool) -> contextlib.AbstractContextManager[Any]:
    return opt.no_sync() if local and hasattr(opt, "no_sync") else contextlib.nullcontext()


def _keeps(
    keep: str, drop: str, local: bool, make: Make, params: list[nn.Parameter], gradients: Gradients
) -> torch.optim.Optimizer:
    """Keeps a backward's gradients over the next one and its step; every other time they are applied first."""
    opt = make(params)
    for step in range(0, MOST_STEPS, 2):
        with _maybe_local(opt, local):
            linear_backward(params, gradients(step))
        kept = KEEP[keep](params)
        values = copies(kept)
        if step % 4:
            opt.step()
        DROP[drop](opt, params)
        assert_bitwise(kept, values, f"{keep} dropped by {drop}, step {step}")
        with _maybe_local(opt, local):
            linear_backward(params, gradients(step + 1))
        assert_bitwise(kept, values, f"{keep} dropped by {drop}, after the backward of step {step + 1}")
        opt.step()
        assert_bitwise(kept, values, f"{keep} dropped by {drop}, after step {step + 1}")
        DROP[drop](opt, params)
    return opt


@pytest.mark.parametrize(("world_size", "stage", "local", "half"), halves(READABLE))
def test_a_kept_gradient_is_left_alone_by_the_next_backward_and_step(world_size, stage, local, half):
    habits = [partial(_keeps, keep, drop, local) for keep, drop in [*itertools.product(KEEP, DROP)][half::2]]
    _assert_trains_as_adamw(*habits, world_size=world_size, stage=stage)


def _follows_two_losses(make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    """Combines the gradients of two losses, as gradient surgery does."""
    opt = make(params)
    for step in range(STEPS):
        linear_backward(params, gradients(2 * step))
        first = [p.grad for p in params]
        opt.zero_grad()
        linear_backward(params, gradients(2 * step + 1))
        second = [p.grad for p in params]
        opt.zero_grad()
        _set_grads(params, [a + 0.5 * b for a, b in zip(first, second, strict=True)])
        opt.step()
        opt.zero_grad()
    return opt


def _swaps(make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    opt = make(params)
    for step in range(STEPS):
        linear_backward(params, gradients(step))
        params[0].grad, params[2].grad = params[2].grad, params[0].grad
        opt.step()
        opt.zero_grad()
    return opt


def _gives_one_to_two(make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    opt = make(params)
    for step in range(STEPS):
        linear_backward(params, gradients(step))
        first, second = (params[0], params[2]) if step % 2 else (params[2], params[0])
        second.grad = first.grad
        opt.step()
        opt.zero_grad()
    return opt


@pytest.mark.parametrize("habit", [_follows_two_losses, _swaps, _gives_one_to_two])
@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_combined_swapped_or_shared_train_as_with_adamw(stage, habit):
    _assert_trains_as_adamw(habit, stage=stage)


def _accumulates(local: bool, make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    opt = make(params)
    for step in range(0, MOST_STEPS, 2):
        with _maybe_local(opt, local):
            linear_backward(params, gradients(step))
            kept = [p.grad for p in params]
            sums = [grad + other for grad, other in zip(kept, gradients(step + 1), strict=True)]
            linear_backward(params, gradients(step + 1))
        assert all(p.grad is grad for p, grad in zip(params, kept, strict=True)), "in place"
        assert_bitwise(kept, sums, "added")
        opt.step()
        opt.zero_grad()
    return opt


@pytest.mark.parametrize(("world_size", "stage", "local"), [(1, 0, False), (1, 2, False), (2, 1, True), (2, 0, True)])
def test_without_zero_grad_a_kept_gradient_is_added_to_in_place(world_size, stage, local):
    _assert_trains_as_adamw(partial(_accumulates, local), world_size=world_size, stage=stage)


def _buffers(opt: Any) -> list[StorageWeakRef]:
    """A weak reference keeps no memory, but its address: another storage never equals it."""
    return [StorageWeakRef(bucket.grad_buffer.untyped_storage()) for bucket in opt.engine.reducer.buckets]


def _storages(rank: int, world_size: int, stage: int, local: bool) -> list[str]:
    """For each way to drop gradients, where the buffers moved to another storage."""
    moved = []
    for drop, cap in itertools.product(DROP, (TINY_CAP_MB, 25.0)):
        params = make_parameters()
        opt = _sharded(stage, cap)(params)
        before: list[StorageWeakRef] = []
        for step in range(2 + STEPS):  # the buckets take the observed order in the first two
            with _maybe_local(opt, local):
                linear_backward(params, _gradients(rank, world_size, step))
            assert all(float(p.grad.abs().sum()) > 0 for p in params if p.numel()), "looked at, not kept"
            if step == 2:
                before = _buffers(opt)
            elif step > 2:
                moved += [f"{drop}, cap {cap}, step {step}"] if _buffers(opt) != before else []
            opt.step()
            DROP[drop](opt, params)
        opt.close()
    return moved


@pytest.mark.parametrize(("world_size", "stage", "local"), READABLE)
def test_the_buffers_stay_where_nobody_keeps_a_gradient(world_size, stage, local):
    for moved in run_ranks(world_size, _storages, stage, local):
        assert not moved


# -- hooks of the user's ----------------------------------------------------------------------------------------------

LIMIT = 0.2
HOOKED_SHAPES = ((32, 40), (32, 40), (700,), (32, 40), (32, 40), (5,))  # several buckets of 10 KiB


def _clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-LIMIT, LIMIT)


def _clamped_by_hook(rank: int, world_size: int, stage: int, when: int) -> tuple[list[Tensor], int]:
    """``when`` the hooks are registered: -1 before the optimizer, else before that step."""
    params = parameters_of(HOOKED_SHAPES)
    hooked = [] if when >= 0 else [p.register_post_accumulate_grad_hook(_clamp) for p in params]
    opt = _sharded(stage, 0.01)(params)
    for step in range(STEPS):
        if step == when:
            hooked = [p.register_post_accumulate_grad_hook(_clamp) for p in params]
        _step(opt, params, make_gradients(params, rank, step))
    buckets = opt.stats()["buckets"]
    opt.close()
    assert len(hooked) == len(params)
    return copies(params), buckets


@pytest.mark.parametrize("when", [-1, 0, 2], ids=["before the optimizer", "after it", "after two steps"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 1), (2, 2)])
def test_a_hook_that_clamps_acts_on_each_ranks_own_gradient_before_averaging(world_size, stage, when):
    theirs = parameters_of(HOOKED_SHAPES)
    adamw = torch.optim.AdamW(theirs, lr=LR)
    for step in range(STEPS):
        local = [make_gradients(theirs, rank, step) for rank in range(world_size)]
        if step >= when:
            local = [[grad.clamp(-LIMIT, LIMIT) for grad in grads] for grads in local]
        _set_grads(theirs, averages(local))
        adamw.step()
    ranks = run_ranks(world_size, _clamped_by_hook, stage, when)
    for params, buckets in ranks:
        assert buckets >= 3
        _assert_near(params, theirs, f"stage {stage}")
        assert_bitwise(params, ranks[0][0], "ranks differ")


# -- frozen parameters ------------------------------------------------------------------------------------------------

FROZEN = (1, 2, 5)


def _freeze(params: Sequence[Tensor], frozen: bool) -> None:
    for index in FROZEN:
        params[index].requires_grad_(not frozen)


def _thaws_for_backward(make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    _freeze(params, True)
    opt = make(params)
    for step in range(STEPS):
        _freeze(params, False)
        linear_backward(params, gradients(step))
        _freeze(params, True)
        opt.step()
        opt.zero_grad()
        assert not any(params[index].requires_grad for index in FROZEN), "it stays frozen"
    return opt


def _assigns_to_frozen(make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    _freeze(params, True)
    opt = make(params)
    for step in range(STEPS):
        linear_backward(params, gradients(step))
        for index in FROZEN:
            params[index].grad = gradients(step)[index]
        opt.step()
        opt.zero_grad()
    return opt


def _casts_while_frozen(make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    """There and back again, and then thawed for good."""
    _freeze(params, True)
    opt = make(params)
    _step(opt, params, gradients(0))
    for index in FROZEN:
        params[index].data = params[index].data.double()
        params[index].data = params[index].data.float()
    _freeze(params, False)
    for step in range(1, STEPS):
        _step(opt, params, gradients(step))
    return opt


@pytest.mark.parametrize("habit", [_thaws_for_backward, _assigns_to_frozen, _casts_while_frozen])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 2), (2, 0), (2, 1), (2, 2)])
def test_a_frozen_parameter_that_gets_a_gradient_trains_as_with_adamw(world_size, stage, habit):
    _assert_trains_as_adamw(habit, world_size=world_size, stage=stage)


def _cast_and_thawed(rank: int, world_size: int) -> tuple[str, str]:
    params = make_parameters()
    params[1].requires_grad_(False)
    opt = _sharded()(named(params))
    _step(opt, params, _gradients(rank, world_size, 0))
    params[1].data = params[1].data.double()
    params[1].requires_grad_(True)
    linear_backward(params, _gradients(rank, world_size, 1))
    before = copies(params)
    found = error_of(opt.step)
    assert_bitwise(params, before, "nothing was updated")
    opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_parameter_cast_and_then_thawed_is_named_at_step(world_size):
    for kind, text in run_ranks(world_size, _cast_and_thawed):
        assert kind == "ParameterError", f"{kind} {text}"
        assert "layer1.weight" in text and "float64" in text, text


def test_a_lazy_module_is_to_run_a_forward_first():
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4))
    with pytest.raises(zero_optim.ParameterError, match="1.weight.*forward"):
        zero_optim.ShardedAdamW(model.named_parameters())
    model(torch.ones(1, 3))
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    before = copies(model.parameters())
    opt.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    opt.close()


# -- param_groups and state edited by hand ----------------------------------------------------------------------------

EDITS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {  # a list that is returned is assigned
    "a parameter appended": lambda groups: groups[0]["params"].append(nn.Parameter(torch.ones(3))),
    "a parameter taken out": lambda groups: groups[0]["params"].pop(),
    "a group popped": lambda groups: groups.pop(),
    "a group appended": lambda groups: groups.append({**groups[0], "params": [nn.Parameter(torch.ones(3))]}),
    "moved to another group": lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
    "a list with another group": lambda groups: [*groups, {**groups[0], "params": [nn.Parameter(torch.ones(3))]}],
    "a list in another order": lambda groups: [{**group, "params": group["params"][::-1]} for group in groups],
}


def _edited(rank: int, world_size: int, edit: str) -> tuple[str, str]:
    params = make_parameters()
    opt = _sharded()([{"params": params[:2]}, {"params": params[2:]}])
    _step(opt, params, _gradients(rank, world_size, 0))
    edited = EDITS[edit](opt.param_groups)
    if isinstance(edited, list):
        opt.param_groups = edited
    linear_backward(params, _gradients(rank, world_size, 1))
    before = copies(params)
    found = error_of(opt.step)
    assert_bitwise(params, before, "nothing was updated")
    opt.close()
    return found


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_edited_by_hand_are_refused_and_add_param_group_is_named(world_size, edit):
    for kind, text in run_ranks(world_size, _edited, edit):
        assert kind == "ParameterError" and "add_param_group" in text, f"{kind} {text}"


def _restarts(between: bool, make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    """Drops the state half-way; ``between`` backward and step, or after zero_grad."""
    opt = make(params)
    for step in range(MOST_STEPS):
        linear_backward(params, gradients(step))
        if between and step == STEPS:
            opt.state = collections.defaultdict(dict)
        opt.step()
        opt.zero_grad()
        if not between and step == STEPS:
            opt.state = collections.defaultdict(dict)
    return opt


@pytest.mark.parametrize("between", [False, True], ids=["after zero_grad", "before step"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (2, 2)])
def test_an_empty_state_begins_anew_as_with_adamw(world_size, stage, between):
    _assert_trains_as_adamw(partial(_restarts, between), world_size=world_size, stage=stage)


def test_a_state_that_holds_something_is_to_be_loaded():
    params = make_parameters()
    opt = _sharded()(params)
    _step(opt, params, _gradients(0, 1, 0))
    state = collections.defaultdict(dict, {params[0]: {"step": torch.tensor(3.0)}})
    with pytest.raises(zero_optim.ZeroOptimError, match="load_state_dict"):
        opt.state = state
    assert not opt.state, "nothing was taken over"
    assert {float(entry["step"]) for entry in opt.state_dict()["state"].values()} == {1}, "nothing was dropped"
    opt.close()


# -- memory that is shared, or seen otherwise -------------------------------------------------------------------------


class _Tied(nn.Module):
    """An embedding whose weight is the head's, by the same Parameter or by the same memory."""

    def __init__(self, by_memory: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.emb, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.emb.weight.data = torch.randn(6, 4, generator=generator)
        if by_memory:
            self.head.weight.data = self.emb.weight.data
        else:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.emb(tokens))


def _of_shared_memory(rank: int, world_size: int) -> list[tuple[str, str]]:
    model = _Tied(by_memory=True)
    frozen = _Tied(by_memory=True)
    frozen.emb.requires_grad_(False)
    return [
        error_of(lambda: zero_optim.ShardedAdamW(model.named_parameters())),
        error_of(lambda: zero_optim.ShardedAdamW(frozen.named_parameters())),
        error_of(
            lambda: zero_optim.ShardedAdamW(
                [{"params": [named_parameter]} for named_parameter in model.named_parameters()]
            )
        ),
    ]


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_share_memory_are_both_named(world_size):
    for errors in run_ranks(world_size, _of_shared_memory):
        for kind, text in errors:
            assert kind == "ParameterError" and "emb.weight" in text and "head.weight" in text, f"{kind} {text}"


def _takes_parts_of_one_tensor(make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    flat = torch.cat([p.detach().reshape(-1) for p in params])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.data = part.view(p.shape)
    opt = make(params)
    for step in range(STEPS):
        _step(opt, params, gradients(step))
    return opt


def test_parameters_that_are_parts_of_one_tensor_train_as_with_adamw():
    _assert_trains_as_adamw(_takes_parts_of_one_tensor)


def test_parameters_that_overlap_are_both_named():
    flat = torch.randn(9)
    params = [nn.Parameter(part) for part in (flat[4:], flat[:5])]
    with pytest.raises(zero_optim.ParameterError, match=r"'layer1\.weight' and 'layer0\.weight' share memory"):
        _sharded()(named(params))


def test_columns_of_one_tensor_share_no_memory():
    columns = torch.randn(4, 6).split(3, dim=1)
    params = [nn.Parameter(column) for column in columns]
    opt = _sharded()(params)
    assert_bitwise(params, columns, "taken over")
    opt.close()


def test_a_transposed_parameter_is_named_in_backward():
    params = parameters_of([(4, 4), (5,)])
    opt = _sharded()(named(params))
    _step(opt, params, make_gradients(params, 0, 0))
    params[0].data = params[0].data.t()
    with pytest.raises(zero_optim.ParameterError, match="layer0.weight"):
        linear_backward(params, make_gradients(params, 0, 1))
    opt.close()


# -- a state loaded between clipping and step -------------------------------------------------------------------------


def _loaded_after_clip(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """A state saved in one bucket order, loaded into an optimizer that has observed the reverse one and has clipped."""
    gradients = partial(_gradients, rank, world_size)
    saver, params = make_parameters(), make_parameters()
    opt = _sharded(stage)(saver)
    for step in range(STEPS):
        _step(opt, saver, gradients(step))
    state = copy.deepcopy(opt.state_dict())
    opt.close()
    opt = _sharded(stage)(params)
    for step in range(STEPS):
        _step(opt, params[::-1], gradients(step)[::-1])
    other_order = list(opt.state_dict()["state"]) != list(state["state"])
    linear_backward(params[::-1], gradients(STEPS)[::-1])
    opt.clip_grad_norm_(1.0)
    opt.load_state_dict(state)
    dropped = all(p.grad is None for p in params)
    before = copies(params)
    opt.step()
    after, loaded = copies(params), zero_optim.full_state_dict(opt, rank=None)["state"]
    opt.zero_grad()
    opt.close()
    steps = {float(entry["step"]) for entry in loaded.values()}
    return {"other order": other_order, "dropped": dropped, "before": before, "after": after, "steps": steps}


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_dropped_by_loading_after_clipping_are_not_applied(stage):
    for found in run_ranks(2, _loaded_after_clip, stage):
        assert found["other order"] and found["dropped"], "or nothing is tested"
        assert_bitwise(found["after"], found["before"], "left alone")
        assert found["steps"] == {STEPS}


# -- torch.compile ----------------------------------------------------------------------------------------------------


def _runs_eagerly(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A backend of torch.compile that wants none of the step's arithmetic."""
    operations = [node for node in graph.graph.nodes if node.op.startswith("call")]
    where = "\n".join(f"{node.target}, from\n{node.stack_trace}" for node in operations)
    assert not operations, f"compiled: {where}"
    return graph.forward


def _compiles_step(method: bool, make: Make, params: list[nn.Parameter], gradients: Gradients) -> torch.optim.Optimizer:
    opt = make(params)
    if not hasattr(opt, "stats"):  # AdamW's is not what is looked at here
        step_compiled: Callable[[], Any] = opt.step
    else:
        step_compiled = torch.compile(opt.step if method else lambda: opt.step(), backend=_runs_eagerly)
    for step in range(STEPS):
        linear_backward(params, gradients(step))
        step_compiled()
        opt.zero_grad()
        if hasattr(opt, "stats"):
            assert opt.stats()["steps"] == step + 1
    return opt


@pytest.mark.slow
@pytest.mark.parametrize("method", [True, False], ids=["opt.step", "a function"])
def test_a_compiled_step_runs_eagerly_counts_and_trains_as_adamw(method):
    torch._dynamo.reset()
    try:
        _assert_trains_as_adamw(partial(_compiles_step, method))
    finally:
        torch._dynamo.reset()
