"""Parameters frozen, thawed, frozen again or added while training goes on, against an oracle that has them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cells import covering, slow
from harness import run_ranks
from oracle import Hyper, MasterAdamW, averages
from torch import Tensor, nn
from training_cases import (
    TINY_CAP_MB,
    assert_bitwise,
    copies,
    linear_backward,
    make_gradients,
    make_parameters,
    maybe_no_sync,
    named,
)

SHAPES = ((17, 9), (300,), (1,), (0,), (40, 25), (2, 1))
COUNT = len(SHAPES)
LR = 1e-2
STEPS = 6


def _gradients(like: list[Tensor], world_size: int, step: int, absent: set[int]) -> list[Tensor | None]:
    average = averages([make_gradients(like, rank, step) for rank in range(world_size)])
    return [None if i in absent else g for i, g in enumerate(average)]


def _backward(params: list[nn.Parameter], rank: int, step: int, absent: set[int]) -> None:
    grads = make_gradients(params, rank, step)
    linear_backward(params, [None if i in absent else g for i, g in enumerate(grads)])


# -- thawing and freezing --------------------------------------------------------------------------------------------


def _thaw(params: list[nn.Parameter], indices: set[int], flag: bool = True) -> None:
    for index in indices:
        params[index].requires_grad_(flag)


SCHEDULES: dict[str, dict[int, set[int]]] = {  # what is frozen, from the step on that stands before it
    "thawed one by one": {0: {0, 1, 4}, 2: {0, 4}, 4: {0}, 5: set()},
    "all thawed at once": {0: {0, 1, 2, 3, 4}, 3: set()},
    "all frozen at first": {0: {0, 1, 2, 3, 4, 5}, 1: {0, 1, 2}, 3: {0}},
    "frozen and thawed again": {0: set(), 2: {1, 4}, 4: {4}},
    "in turns": {0: {0, 2}, 2: {1, 2}, 3: {0, 1}, 5: {4}},
    "all frozen in the middle": {0: {4}, 2: {0, 1, 2, 3, 4, 5}, 4: set()},
}


def _frozen_at(schedule: dict[int, set[int]], step: int) -> set[int]:
    return schedule[max(start for start in schedule if start <= step)]


def _train(rank: int, name: str, stage: int, cap: float, dtype: torch.dtype) -> tuple[list[list[Tensor]], list[int]]:
    """Parameters after each step, and updates of those that were ever trained (-1: no state)."""
    import zero_optim

    params = make_parameters(SHAPES, dtype, seed=rank)  # rank 0's win, also where they are frozen
    schedule = SCHEDULES[name]
    _thaw(params, schedule[0], flag=False)
    opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=cap)
    history = []
    for step in range(STEPS):
        frozen = _frozen_at(schedule, step)
        for index, p in enumerate(params):
            p.requires_grad_(index not in frozen)
        if len(frozen) < COUNT:
            _backward(params, rank, step, frozen)
        opt.step()
        opt.zero_grad()
        history.append(copies(params))
    state = opt.state_dict()["state"]
    opt.close()
    return history, [
        int(state[f"layer{i}.weight"]["step"]) if f"layer{i}.weight" in state else -1 for i in range(COUNT)
    ]


CELLS = [
    (name, *cell, dtype)
    for name in SCHEDULES
    for cell, dtype in (
        ((0, TINY_CAP_MB), torch.float32),
        ((1, TINY_CAP_MB), torch.bfloat16),
        ((2, TINY_CAP_MB), torch.float32),
        ((2, 25.0), torch.bfloat16),
    )
]


def _train_all(rank: int, world_size: int, cells: list[Any]) -> list[Any]:
    return [_train(rank, *cell) for cell in cells]


OF_WORLDS = [(ranks, cell[0], cell[1:]) for ranks in (1, 2, 3) for cell in CELLS if ranks < 3 or cell[1] > 0]
IN_PAIRS = covering(OF_WORLDS)


@pytest.mark.parametrize("in_pairs", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_thawed_and_frozen_parameters_train_as_if_they_had_no_gradient_meanwhile(world_size, in_pairs):
    chosen = [cell for cell in OF_WORLDS if cell[0] == world_size and (cell in IN_PAIRS) is in_pairs]
    cells = [(name, *rest) for _, name, rest in chosen]
    results = run_ranks(world_size, _train_all, cells, timeout=90)
    for number, (name, stage, cap, dtype) in enumerate(cells):
        oracle = MasterAdamW(make_parameters(SHAPES, dtype), Hyper(lr=LR))
        expected = []
        for step in range(STEPS):
            oracle.step(_gradients(oracle.params, world_size, step, _frozen_at(SCHEDULES[name], step)))
            expected.append(copies(oracle.params))
        for rank, result in enumerate(results):
            history, counts = result[number]
            for step in range(STEPS):
                what = f"{name}, stage {stage}, cap {cap}, rank {rank}, after step {step}"
                assert_bitwise(history[step], expected[step], what)
            assert counts == [c or -1 for c in oracle.steps], f"{name}, stage {stage}: updates"


MOMENTS = ("before backward", "between backwards", "before clip", "before step", "after step", "unused at first")


def _thawed_at(rank: int, world_size: int, stage: int, moment: str, synced: bool) -> list[Tensor]:
    """Parameters 1 and 4 are thawed in the third step, which has two backwards and a clip that bites nothing."""
    import zero_optim

    params = make_parameters(SHAPES)
    _thaw(params, {1, 4}, flag=False)
    opt = zero_optim.ShardedAdamW(named(params), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
    for step in range(5):

        def now(place: str, step: int = step) -> None:
            if step == 2 and place == moment:
                _thaw(params, {1, 4})

        now("before backward")
        now("unused at first")
        for micro in range(2):
            with maybe_no_sync(opt, micro == 0 and not synced):
                grads = make_gradients(params, rank, step, micro, grid=world_size)
                absent = _absent(moment, step, micro)
                linear_backward(params, [None if i in absent else g for i, g in enumerate(grads)])
            if micro == 0:
                now("between backwards")
        now("before clip")
        opt.clip_grad_norm_(1e9)
        now("before step")
        opt.step()
        now("after step")
        opt.zero_grad()
    opt.close()
    return copies(params)


def _absent(moment: str, step: int, micro: int) -> set[int]:
    """What has no gradient in this backward."""
    if moment == "unused at first" and step < 4:
        return {1, 4}
    reached = step > 2 or (
        step == 2 and (moment == "before backward" or (moment == "between backwards" and micro == 1))
    )
    return set() if reached else {1, 4}


def _thawed_at_all(rank: int, world_size: int) -> dict[tuple[int, str, bool], list[Tensor]]:
    cells = itertools.product((0, 1, 2), MOMENTS, (True, False))
    return {cell: _thawed_at(rank, world_size, *cell) for cell in cells}


@pytest.mark.parametrize("world_size", [1, 2])
def test_thawing_at_any_moment_of_a_step(world_size):
    """The gradients of the others, reduced already or still local, are not lost; what was thawed has its own alone."""
    results = run_ranks(world_size, _thawed_at_all, timeout=60)
    for moment in MOMENTS:
        oracle = MasterAdamW(make_parameters(SHAPES), Hyper(lr=LR))
        for step in range(5):
            total: list[Tensor | None] = [None] * COUNT
            for micro in range(2):
                local = [
                    make_gradients(oracle.params, rank, step, micro, grid=world_size) for rank in range(world_size)
                ]
                for index, grad in enumerate(averages(local)):
                    if index not in _absent(moment, step, micro):
                        before = total[index]
                        total[index] = grad if before is None else before + grad
            oracle.step(total)
        for stage, synced in itertools.product((0, 1, 2), (True, False)):
            for rank, result in enumerate(results):
                what = f"thawed {moment}, stage {stage}, synced {synced}, rank {rank}"
                assert_bitwise(result[stage, moment, synced], oracle.params, what)


def _stale_gradient(rank: int, world_size: int, set_to_none: bool) -> tuple[bool, list[Tensor]]:
    """A parameter has a gradient from before, is frozen, zeroed with all others, and thawed two steps later."""
    import zero_optim

    params = make_parameters(SHAPES)
    linear_backward(params, make_gradients(params, rank, 9))
    _thaw(params, {1}, flag=False)
    opt = zero_optim.ShardedAdamW(params, lr=LR)
    opt.zero_grad(set_to_none)
    gone = params[1].grad is None or not params[1].grad.any()
    for step in range(3):
        opt.zero_grad()
        if step == 2:
            _thaw(params, {1})
        _backward(params, rank, step, {1} if step < 2 else set())
        opt.step()
    opt.close()
    return gone, copies(params)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_reaches_frozen_parameters_too(world_size, set_to_none):
    oracle = MasterAdamW(make_parameters(SHAPES), Hyper(lr=LR))
    for step in range(3):
        oracle.step(_gradients(oracle.params, world_size, step, {1} if step < 2 else set()))
    for gone, params in run_ranks(world_size, _stale_gradient, set_to_none):
        assert gone
        assert_bitwise(params, oracle.params)


# -- groups that come later ------------------------------------------------------------------------------------------


def _grown(rank: int, world_size: int, stage: int, moment: str, gradients: bool) -> tuple[list[Tensor], list[int]]:
    """The last two parameters come in a group of their own in step 2, one of them frozen until step 4.

    ``gradients``: before they are in, a backward has left gradients on them.
    """
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16, seed=rank)
    opt = zero_optim.ShardedAdamW(named(params[:4]), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)

    def grow() -> None:
        if not gradients:
            params[4].grad = params[5].grad = None
        params[5].requires_grad_(False)
        opt.add_param_group(
            {"params": [("head.weight", params[4]), ("head.bias", params[5])], "lr": 2 * LR, "weight_decay": 0.0}
        )

    for step in range(STEPS):
        if step == 2 and moment == "before backward":
            grow()
        if step == 4:
            params[5].requires_grad_(True)
        absent = _not_reached(moment, gradients, step)
        _backward(params, rank, step, absent)
        if step == 2 and moment == "before step":
            grow()
        opt.step()
        opt.zero_grad()
        if step == 1 and moment == "after step":
            grow()
    state = opt.state_dict()["state"]
    keys = [*(f"layer{i}.weight" for i in range(4)), "head.weight", "head.bias"]
    opt.close()
    return copies(params), [int(state[key]["step"]) for key in keys]


def _not_reached(moment: str, gradients: bool, step: int) -> set[int]:
    if step < 2 or (step == 2 and moment == "before step" and not gradients):
        return {4, 5}
    return {5} if step < 4 else set()


@pytest.mark.parametrize("moment", ["before backward", "before step", "after step"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_group_added_in_mid_training(world_size, moment):
    hypers = [Hyper(lr=LR)] * 4 + [Hyper(lr=2 * LR, weight_decay=0.0)] * 2
    for gradients in (False, True) if moment == "before step" else (False,):
        oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), hypers)
        for step in range(STEPS):
            absent = _not_reached(moment, gradients, step)
            oracle.step(_gradients(oracle.params, world_size, step, absent))
        for stage in (0, 1, 2):
            for params, counts in run_ranks(world_size, _grown, stage, moment, gradients, timeout=40):
                assert_bitwise(params, oracle.params, f"stage {stage}, gradients before {gradients}")
                assert counts == oracle.steps


# -- groups that are refused -----------------------------------------------------------------------------------------


def _bad_group(case: str, rank: int, held: list[nn.Parameter]) -> dict[str, Any]:
    fresh = make_parameters(((7, 3), (11,)))
    alone = rank == 1  # the culprit where one rank is
    groups: dict[str, Callable[[], dict[str, Any]]] = {
        "lr": lambda: {"params": named(fresh, "new"), "lr": -1.0},
        "betas": lambda: {"params": named(fresh, "new"), "betas": (0.9, 1.5)},
        "amsgrad": lambda: {"params": named(fresh, "new"), "amsgrad": True},
        "float64": lambda: {"params": [("new0.weight", nn.Parameter(fresh[0].detach().double()))]},
        "held already": lambda: {"params": [("new0.weight", held[0])]},
        "no tensor": lambda: {"params": [("new0.weight", 3.0)]},
        "lr here": lambda: {"params": named(fresh, "new"), "lr": 1e-2 if alone else 1e-3},
        "shape here": lambda: {"params": named(fresh[1:] if alone else fresh[:1], "new")},
        "names here": lambda: {"params": named(fresh, "other" if alone else "new")},
        "frozen here": lambda: {"params": named([fresh[0].requires_grad_(not alone), fresh[1]], "new")},
        "more here": lambda: {"params": named(fresh if alone else fresh[:1], "new")},
        "bad lr here": lambda: {"params": named(fresh, "new"), "lr": -1.0 if alone else 1e-3},
        "float64 here": lambda: {
            "params": [("new0.weight", nn.Parameter(fresh[0].detach().double() if alone else fresh[0]))]
        },
    }
    return groups[case]()


ON_ALL = {
    "lr": ("ValueError", "lr"),
    "betas": ("ValueError", "betas"),
    "amsgrad": ("ValueError", "amsgrad"),
    "float64": ("ParameterError", "new0.weight"),
    "held already": ("ValueError", "parameter group"),
    "no tensor": ("TypeError", "float"),
}
DIFFERENT = ("lr here", "shape here", "names here", "frozen here", "more here")
ON_ONE = {"bad lr here": ("ValueError", "lr"), "float64 here": ("ParameterError", "new0.weight")}


def _refused(
    rank: int, world_size: int, stage: int
) -> tuple[dict[str, tuple[str, str, int]], list[Tensor], list[Tensor]]:
    """For each bad group, error, text and number of groups after it; then an ordinary group, and training beside a run
    in which nothing bad happened."""
    import zero_optim

    results = []
    errors: dict[str, tuple[str, str, int]] = {}
    for bad in (True, False):
        params = make_parameters(SHAPES, torch.bfloat16)
        opt = zero_optim.ShardedAdamW(named(params[:4]), lr=LR, stage=stage, bucket_cap_mb=TINY_CAP_MB)
        for step in range(4):
            _backward(params, rank, step, set() if step > 1 else {4, 5})
            if step == 1 and bad:
                for case in (*ON_ALL, *DIFFERENT, *ON_ONE):
                    kind, text = "", ""
                    try:
                        opt.add_param_group(_bad_group(case, rank, params))
                    except Exception as error:
                        kind, text = type(error).__name__, str(error)
                    errors[case] = (kind, text, len(opt.param_groups))
            opt.step()
            opt.zero_grad()
            if step == 1:
                opt.add_param_group({"params": named(params[4:], "late")})
        opt.close()
        results.append(copies(params))
    return errors, results[0], results[1]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_group_that_is_refused_leaves_everything_as_it_was(stage):
    for rank, (errors, after, undisturbed) in enumerate(run_ranks(2, _refused, stage, timeout=40)):
        for case, (kind, text, groups) in errors.items():
            what = f"{case}, rank {rank}: {kind or 'nothing raised'} {text}"
            assert groups == 1, what
            if case in ON_ALL:
                expected, word = ON_ALL[case]
                assert kind == expected and word in text, what
            elif case in DIFFERENT:
                assert kind == "RankMismatchError" and "rank 1" in text, what
            elif rank == 1:
                expected, word = ON_ONE[case]
                assert kind == expected and word in text, what
            else:
                assert kind == "RankMismatchError" and "rank 1" in text and ON_ONE[case][1] in text, what
        assert_bitwise(after, undisturbed)
