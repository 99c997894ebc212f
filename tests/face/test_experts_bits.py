"""Experts beside dense parameters, of given gradients, against the oracle bit for bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from cells import slow_after
from grid_cases import grid_averages
from grid_cases import make_mesh as make_grid
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, average, averages
from torch import Tensor
from training_cases import SHAPES, TINY_CAP_MB, difference, make_gradients, make_parameters, of_dtype, train_given

RANKS, STEPS = 4, 3
HYPER = Hyper(lr=1e-2, weight_decay=0.1)
COLUMNS = {False: ((0, 2), (1, 3)), True: ((0,), (1,), (2,), (3,))}


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        alone: each rank has experts that no other has; else two have the same.
        absent: each rank leaves out some gradients, others than the other ranks.
        grid: of the dense parameters, two replicas of two that share.
        later: the experts are added after the first parameters.
        frozen: one of either kind needs no gradient before the last step.
    """

    stage: int
    micro: int = 1
    no_sync: bool = False
    cap_mb: float = TINY_CAP_MB
    reduce_dtype: torch.dtype | None = None
    overlap: bool = True
    gather_overlap: bool = False
    alone: bool = False
    absent: bool = False
    grid: bool = False
    later: bool = False
    frozen: bool = False
    offload: str | None = None

    def columns(self) -> tuple[tuple[int, ...], ...]:
        return COLUMNS[self.alone]


CELLS = [
    *(
        Cell(stage, micro, micro > 1, cap_mb, alone=(stage + micro) % 2 == 0)
        for stage, (micro, cap_mb) in itertools.product((1, 2), ((1, TINY_CAP_MB), (3, TINY_CAP_MB), (2, 25.0)))
    ),
    *(Cell(stage, 3, absent=True, alone=stage == 1) for stage in (1, 2)),
    *(Cell(stage, 3, no_sync=True, absent=True) for stage in (1, 2)),
    Cell(2, 2, no_sync=True, reduce_dtype=torch.float32, overlap=False),
    *(Cell(stage, 2, grid=True, absent=True) for stage in (1, 2)),
    *(Cell(stage, 2, later=True) for stage in (1, 2)),
    *(Cell(stage, frozen=True) for stage in (1, 2)),
    Cell(2, 2, gather_overlap=True),
    *(Cell(2, 2, offload=tier, alone=tier == "paged") for tier in ("cpu", "paged", "nvme:{folder}")),
]


def _local(cell: Cell, like: list[Tensor], rank: int, step: int, micro: int) -> list[Tensor | None]:
    """Gradients of a rank's dense parameters, and then of its experts."""
    count = len(SHAPES)
    grads: list[Tensor | None] = [*make_gradients(like[:count], rank, step, micro)]
    grads += make_gradients(like[count:], rank + 10, step, micro)
    for index in range(len(grads)):
        if cell.absent and (index * 3 + rank + micro) % 5 == step:
            grads[index] = None
        if cell.absent and index == 2 * count - 1 and rank in cell.columns()[0] and step < 2:
            grads[index] = None  # on no rank that has this expert; others have one of its name
        if cell.frozen and index in (0, count) and step < STEPS - 1:
            grads[index] = None
    return grads


def _train(rank: int, cell: Cell, dtype: torch.dtype, groups: dict[tuple[int, ...], object], folder: str):
    import zero_optim

    dense, experts = (make_parameters(SHAPES, dtype, seed=seed) for seed in (rank, rank + 50))
    column = next(column for column in cell.columns() if rank in column)
    of_experts = {"params": experts, "process_group": groups[column], "grad_divisor": RANKS}
    for parameters in (dense, experts):
        parameters[0].requires_grad_(not cell.frozen)
    opt = zero_optim.ShardedAdamW(
        [{"params": dense}] if cell.later else [{"params": dense}, of_experts],
        lr=HYPER.lr,
        weight_decay=HYPER.weight_decay,
        stage=cell.stage,
        mesh=groups["grid"] if cell.grid else None,
        bucket_cap_mb=cell.cap_mb,
        grad_reduce_dtype=cell.reduce_dtype,
        overlap_grad_reduce=cell.overlap,
        overlap_param_gather=cell.gather_overlap,
        state_offload=None if cell.offload is None else cell.offload.format(folder=folder),
    )
    if cell.later:
        opt.add_param_group(of_experts)
    params = [*dense, *experts]

    def given(step: int, micro: int) -> list[Tensor | None]:
        if cell.frozen and step == STEPS - 1:
            dense[0].requires_grad_()
            experts[0].requires_grad_()
        return _local(cell, params, rank, step, micro)

    return train_given(params, opt, STEPS, cell.micro, cell.no_sync, given)


def _expected(cell: Cell, dtype: torch.dtype, column: tuple[int, ...]) -> list[Tensor]:
    """What ranks of ``column`` have in the end."""
    like = [*make_parameters(SHAPES, dtype, seed=0), *make_parameters(SHAPES, dtype, seed=column[0] + 50)]
    oracle, count = MasterAdamW(like, HYPER), len(SHAPES)
    for step in range(STEPS):
        local: list = [None] * RANKS
        total = None
        for micro in range(cell.micro):
            for rank in range(RANKS):
                local[rank] = accumulate(local[rank], _local(cell, like, rank, step, micro))
            if not cell.no_sync or micro == cell.micro - 1:
                dense = [grads[:count] for grads in local]
                new = grid_averages(dense, 2, cell.reduce_dtype) if cell.grid else averages(dense, cell.reduce_dtype)
                # The others have other experts: what they lack is nothing in the sum, and counts in the divisor.
                absent = [None] * (RANKS - len(column))
                for index in range(count, 2 * count):
                    new.append(average([*(local[rank][index] for rank in column), *absent], cell.reduce_dtype))
                total = accumulate(total, new)
                local = [None] * RANKS
        oracle.step(total or [])
    return oracle.params


def _train_cells(rank: int, world_size: int, dtype: torch.dtype, turn: int, folder: str) -> list[list[Tensor]]:
    import torch.distributed as dist

    groups: dict = {column: dist.new_group(list(column)) for columns in COLUMNS.values() for column in columns}
    groups["grid"] = make_grid(2, 2)
    return [_train(rank, cell, dtype, groups, folder) for cell in of_dtype(CELLS, dtype, turn)]


@pytest.mark.parametrize("turn", slow_after(1, (0, 1)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_every_cell_equals_the_oracle_bit_for_bit(dtype, turn, tmp_path):
    results = run_ranks(RANKS, _train_cells, dtype, turn, str(tmp_path), timeout=180)
    failures = []
    for number, cell in enumerate(of_dtype(CELLS, dtype, turn)):
        for column in cell.columns():
            expected = _expected(cell, dtype, column)
            for rank in column:
                if found := difference(results[rank][number], expected):
                    failures.append(f"{cell}, rank {rank}: {found}")
    assert not failures, "\n".join(failures)
