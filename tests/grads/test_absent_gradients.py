"""Whatever each rank uses of the model: averaged with zeros, or skipped as torch skips ``grad is None``; no hang."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cells import covering, slow
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, averages
from torch import Tensor
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
EVERYTHING = frozenset(range(len(SHAPES)))
NOTHING: frozenset[int] = frozenset()
HYPER = Hyper(lr=1e-2, weight_decay=0.1)
STEPS = 4

# Which parameters rank ``r`` uses in step ``s``.
USES = {
    "ranks share nothing": lambda r, s: frozenset(i for i in EVERYTHING if i % 2 == r % 2),
    "one rank uses nothing": lambda r, s: EVERYTHING if r else NOTHING,
    "the last rank alone uses anything": lambda r, s: EVERYTHING if r == 1 else NOTHING,
    "nobody uses anything, now and then": lambda r, s: NOTHING if s % 2 else EVERYTHING,
    "nobody ever uses anything": lambda r, s: NOTHING,
    "each rank another one, each step": lambda r, s: frozenset({(r + s) % len(SHAPES)}),
    "more and more": lambda r, s: frozenset(range(s + r)),
    "less and less": lambda r, s: frozenset(range(len(SHAPES) - s - r)),
}

# Whether each backward of a step is synchronised.
ACCUMULATIONS = {"one backward": (True,), "no_sync before": (False, True), "no_sync alone": (False, False)}


@dataclass(frozen=True)
class Cell:
    stage: int
    use: str
    accumulation: str
    cap_mb: float
    overlap: bool


# Each use meets every way to accumulate at every stage, half of them with small buckets and overlap.
CELLS = [
    Cell(stage, use, accumulation, *((TINY_CAP_MB, True) if number % 2 else (25.0, False)))
    for number, (use, stage, accumulation) in enumerate(itertools.product(USES, (0, 1, 2), ACCUMULATIONS))
]


def _local(like: list[Tensor], cell: Cell, rank: int, step: int, micro: int) -> list[Tensor | None]:
    used = USES[cell.use](rank, step)
    return [g if i in used else None for i, g in enumerate(make_gradients(like, rank, step, micro, grid=2))]


def _train(rank: int, cell: Cell) -> tuple[list[list[Tensor]], list[int]]:
    """Parameters after each step, and how many updates each parameter has had."""
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(
        params,
        lr=HYPER.lr,
        weight_decay=HYPER.weight_decay,
        stage=cell.stage,
        bucket_cap_mb=cell.cap_mb,
        overlap_grad_reduce=cell.overlap,
    )
    history = []
    for step in range(STEPS):
        for micro, synced in enumerate(ACCUMULATIONS[cell.accumulation]):
            grads = _local(params, cell, rank, step, micro)
            with maybe_no_sync(opt, not synced):
                if any(g is not None for g in grads):
                    linear_backward(params, grads)
        opt.step()
        opt.zero_grad()
        history.append(copies(params))
    state = opt.state_dict()["state"]
    opt.close()
    return history, [int(state[index]["step"]) for index in range(len(SHAPES))]


def _train_all(rank: int, world_size: int, cells: list[Cell]) -> list[tuple[list[list[Tensor]], list[int]]]:
    return [_train(rank, cell) for cell in cells]


def _expected(cell: Cell, world_size: int) -> tuple[list[list[Tensor]], list[int]]:
    oracle = MasterAdamW(make_parameters(SHAPES, torch.bfloat16), HYPER)
    history = []
    for step in range(STEPS):
        local: list[list[Tensor | None] | None] = [None] * world_size
        for micro in range(len(ACCUMULATIONS[cell.accumulation])):
            local = [accumulate(own, _local(oracle.params, cell, r, step, micro)) for r, own in enumerate(local)]
        oracle.step(averages([own or [] for own in local]))
        history.append(copies(oracle.params))
    return history, oracle.steps


# Of three ranks stage 0 sums in any order.
OF_WORLDS = [(n, c.use, c.stage, c.accumulation) for n in (2, 3) for c in CELLS if n == 2 or c.stage > 0]
IN_PAIRS = covering(OF_WORLDS)


@pytest.mark.parametrize("in_pairs", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_use_of_the_model_on_any_rank(world_size, in_pairs):
    chosen = [cell[1:] for cell in OF_WORLDS if cell[0] == world_size and (cell in IN_PAIRS) is in_pairs]
    cells = [cell for cell in CELLS if (cell.use, cell.stage, cell.accumulation) in chosen]
    results = run_ranks(world_size, _train_all, cells, timeout=120)
    expected: dict[tuple[str, str], Any] = {}
    for number, cell in enumerate(cells):
        key = (cell.use, cell.accumulation)
        if key not in expected:
            expected[key] = _expected(cell, world_size)
        history, counts = expected[key]
        for rank, result in enumerate(results):
            own, own_counts = result[number]
            for step in range(STEPS):
                assert_bitwise(own[step], history[step], f"{cell}, rank {rank}, after step {step}")
            assert own_counts == counts, f"{cell}, rank {rank}: updates"


def _skipped_state(rank: int, world_size: int, stage: int) -> list[str]:
    """The parts of a parameter's state and value that a step without its gradient has changed."""
    import zero_optim

    params = make_parameters(SHAPES, torch.bfloat16)
    opt = zero_optim.ShardedAdamW(named(params), lr=1e-2, weight_decay=0.1, stage=stage, bucket_cap_mb=25.0)
    linear_backward(params, make_gradients(params, rank, 0))
    opt.step()
    opt.zero_grad()

    def parts() -> dict[str, Tensor]:
        entry = opt.state_dict()["state"]["layer1.weight"]
        local = {key: getattr(value, "local", value).clone() for key, value in entry.items()}
        return {**local, "parameter": params[1].detach().clone()}

    before = parts()
    linear_backward(params, [g if i != 1 else None for i, g in enumerate(make_gradients(params, rank, 1))])
    opt.step()
    after = parts()
    opt.close()
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_skipped_parameter_keeps_state_value_and_step_count(stage):
    """No decay, no moving average of zeros, though others in its bucket were updated."""
    assert run_ranks(2, _skipped_state, stage) == [[], []]
