"""The parity matrix: stage x world size x dtype x accumulation x bucket size, bit for bit against the oracle.

Random gradients wherever the sum has one order (rank order at stages 1 and 2; two ranks or fewer at stage 0). The
all-reduce of stage 0 on more ranks sums in an order that depends on the position; there, gradients have exact sums.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
from cells import halves, slow_after
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, adamw_bound, averages
from torch import Tensor
from training_cases import (
    SHAPES,
    TINY_CAP_MB,
    assert_bitwise,
    assert_within,
    difference,
    make_gradients,
    make_parameters,
    train_given,
)

STEPS = 4
HYPER = Hyper(lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Cell:
    """One training run: ``micro`` backwards a step; with ``no_sync``, all but the last are under ``opt.no_sync()``."""

    stage: int
    micro: int
    no_sync: bool
    cap_mb: float
    reduce_dtype: torch.dtype | None = None
    overlap: bool = True

    def __str__(self) -> str:
        how = "no_sync" if self.no_sync else "reduced each time"
        return f"stage {self.stage}, {self.micro} micro-batches {how}, cap {self.cap_mb}, reduce {self.reduce_dtype}"


ACCUMULATIONS = ((1, False), (3, True), (2, False))
CAPS = (TINY_CAP_MB, 25.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cells_of(world_size: int, dtype: torch.dtype) -> list[Cell]:
    """Every stage with every way to accumulate. Caps take turns: each meets each of these, and each dtype."""
    turn = world_size + DTYPES.index(dtype)
    return [
        Cell(stage, micro, no_sync, CAPS[(stage + way + turn) % 2])
        for stage, (way, (micro, no_sync)) in itertools.product((0, 1, 2), enumerate(ACCUMULATIONS))
    ]


def _grid(cell: Cell, world_size: int) -> int | None:
    return world_size if cell.stage == 0 and world_size > 2 else None


def train(rank: int, cell: Cell, dtype: torch.dtype, grid: int | None) -> list[Tensor]:
    """Parameters after STEPS steps. Every rank starts from parameters of its own: rank 0's must win."""
    import zero_optim

    params = make_parameters(SHAPES, dtype, seed=rank)
    opt = zero_optim.ShardedAdamW(
        params,
        lr=HYPER.lr,
        weight_decay=HYPER.weight_decay,
        stage=cell.stage,
        bucket_cap_mb=cell.cap_mb,
        grad_reduce_dtype=cell.reduce_dtype,
        overlap_grad_reduce=cell.overlap,
    )
    given = lambda step, micro: make_gradients(params, rank, step, micro, grid)  # noqa: E731
    return train_given(params, opt, STEPS, cell.micro, cell.no_sync, given)


def averaged(cell: Cell, world_size: int, dtype: torch.dtype, grid: int | None, step: int) -> list[Tensor | None]:
    """The step's averaged gradients: local sums under ``no_sync``, sums of averages without."""
    like = make_parameters(SHAPES, dtype)
    local: list[list[Tensor | None] | None] = [None] * world_size
    total = None
    for micro in range(cell.micro):
        for rank in range(world_size):
            local[rank] = accumulate(local[rank], make_gradients(like, rank, step, micro, grid))
        if not cell.no_sync or micro == cell.micro - 1:
            total = accumulate(total, averages([grads or [] for grads in local], cell.reduce_dtype))
            local = [None] * world_size
    return total or []


@functools.cache
def expected(cell: Cell, world_size: int, dtype: torch.dtype, grid: int | None) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after STEPS steps by the oracle, and (fp32) by ``torch.optim.AdamW``, on the same averages."""
    oracle = MasterAdamW(make_parameters(SHAPES, dtype), HYPER)
    plain = [p.requires_grad_() for p in make_parameters(SHAPES, torch.float32)]
    adamw = torch.optim.AdamW(plain, lr=HYPER.lr, weight_decay=HYPER.weight_decay)
    for step in range(STEPS):
        grads = averaged(cell, world_size, dtype, grid, step)
        oracle.step(grads)
        for p, g in zip(plain, grads, strict=True):
            p.grad = None if g is None else g.float()
        adamw.step()
    return oracle.params, [p.detach() for p in plain]


def _train_cells(rank: int, world_size: int, cells: list[Cell], dtype: torch.dtype) -> list[list[Tensor]]:
    return [train(rank, cell, dtype, _grid(cell, world_size)) for cell in cells]


@pytest.mark.parametrize(
    ("world_size", "dtype", "half"),
    halves(
        [
            (1, torch.bfloat16),
            *((2, dtype) for dtype in DTYPES),
            (3, torch.float16),
            (4, torch.float32),
            (4, torch.bfloat16),
        ]
    ),
)
def test_every_cell_equals_the_oracle_bit_for_bit(world_size, dtype, half):
    cells = cells_of(world_size, dtype)[half::2]
    results = run_ranks(world_size, _train_cells, cells, dtype, timeout=120)
    failures = []
    for number, cell in enumerate(cells):
        # Stages share one oracle run where the gradients are the same.
        key = Cell(0, cell.micro, cell.no_sync, 0.0)
        oracle, adamw = expected(key, world_size, dtype, _grid(cell, world_size))
        for rank in range(world_size):
            if found := difference(results[rank][number], oracle):
                failures.append(f"{cell}, rank {rank}: {found}")
        if dtype == torch.float32:
            bounds = [adamw_bound(p, HYPER.lr, STEPS) for p in adamw]
            assert_within(results[0][number], adamw, bounds, f"{cell}, against torch.optim.AdamW")
    assert not failures, f"{len(failures)} of {len(cells) * world_size}:\n" + "\n".join(failures)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_wide_reduction_rounds_nothing_on_the_way(dtype):
    """``grad_reduce_dtype=torch.float32``: the pack widens, sums and shards are fp32."""
    cells = [
        Cell(stage, micro, no_sync, TINY_CAP_MB, torch.float32)
        for stage, (micro, no_sync) in itertools.product((1, 2), ACCUMULATIONS)
    ]
    for rank, result in enumerate(run_ranks(3, _train_cells, cells, dtype)):
        for cell, params in zip(cells, result, strict=True):
            key = Cell(0, cell.micro, cell.no_sync, 0.0, torch.float32)
            assert_bitwise(params, expected(key, 3, dtype, None)[0], f"{cell}, rank {rank}")


def test_wide_reduction_at_stage_0():
    """The all-reduced average is handed to autograd in the parameter's dtype or kept wide: two ranks, exact sums."""
    cells = [Cell(0, micro, no_sync, TINY_CAP_MB, torch.float32) for micro, no_sync in ACCUMULATIONS]
    for rank, result in enumerate(run_ranks(2, _train_cells_on_grid, cells)):
        for cell, params in zip(cells, result, strict=True):
            key = Cell(0, cell.micro, cell.no_sync, 0.0, torch.float32)
            assert_bitwise(params, expected(key, 2, torch.bfloat16, 2)[0], f"{cell}, rank {rank}")


def _train_cells_on_grid(rank: int, world_size: int, cells: list[Cell]) -> list[list[Tensor]]:
    return [train(rank, cell, torch.bfloat16, world_size) for cell in cells]


@pytest.mark.parametrize("world_size", slow_after(1, (3, 2)))
def test_overlap_on_and_off_are_bitwise_equal(world_size):
    """One reduction a step, with and without accumulation under ``no_sync``; stages 1 and 2 equal each other too."""
    cells = [
        Cell(stage, micro, no_sync, CAPS[(way + world_size) % 2], None, overlap)
        for stage, (way, (micro, no_sync)), overlap in itertools.product(
            (0, 1, 2), enumerate(ACCUMULATIONS[:2]), (True, False)
        )
    ]
    for result in run_ranks(world_size, _train_cells, cells, torch.bfloat16):
        by_cell = dict(zip(cells, result, strict=True))
        for cell in cells:
            without = Cell(cell.stage, cell.micro, cell.no_sync, cell.cap_mb, None, False)
            assert_bitwise(by_cell[cell], by_cell[without], f"{cell}, overlap {cell.overlap} against off")
            if cell.stage == 2:
                stage_1 = Cell(1, cell.micro, cell.no_sync, cell.cap_mb, None, cell.overlap)
                assert_bitwise(by_cell[cell], by_cell[stage_1], f"{cell} against stage 1")
