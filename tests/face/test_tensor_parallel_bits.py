"""Parameters that are cut over tensor-parallel ranks, with gradients that are given: bit for bit the oracle's."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cells import halves
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, pack_rounded
from tensor_cases import make_mesh
from torch import Tensor, nn
from training_cases import TINY_CAP_MB, difference, maybe_no_sync

SHAPES = ((5, 7), (6, 4), (7, 5), (1, 3), (300, 9), (9, 300), (6,), (4, 4), (3,), (33, 8))
CUTS: tuple[int | None | str, ...] = (0, 1, 1, 0, 0, 1, 0, None, "plain", "terms")
"""Of each parameter the dimension along which it is cut; None: all ranks have it, and its gradient; "plain": it is no
DTensor; "terms": all have it, and each a term of its gradient, as under sequence parallelism."""

STEPS = 3
HYPER = Hyper(lr=1e-2, weight_decay=0.1)
TENSOR = 2


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training. ``absent``: each data-parallel rank leaves out some gradients, others than the other ranks."""

    stage: int
    micro: int = 1
    no_sync: bool = False
    cap_mb: float = TINY_CAP_MB
    reduce_dtype: torch.dtype | None = None
    overlap: bool = True
    gather_overlap: bool = False
    absent: bool = False
    offload: str | None = None


CELLS = [
    *(Cell(stage, *way) for stage, way in itertools.product((0, 1, 2), ((1, False), (3, True), (2, False)))),
    *(Cell(stage, 3, no_sync=True, absent=True, cap_mb=25.0) for stage in (0, 1, 2)),
    *(Cell(stage, 2, no_sync=True, reduce_dtype=torch.float32, overlap=False) for stage in (0, 1, 2)),
    Cell(2, 2, gather_overlap=True),
    *(Cell(2, 2, offload=tier) for tier in ("cpu", "paged", "nvme:{folder}")),
]


def _whole(index: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1000 + index)
    return torch.randn(SHAPES[index], generator=generator)


def _grads(cell: Cell, data: int, tensor: int, step: int, micro: int, dtype: torch.dtype) -> list[Tensor | None]:
    """The whole gradients of a data-parallel rank. What is a term is another on each tensor-parallel rank."""
    grads: list[Tensor | None] = []
    for index, cut in enumerate(CUTS):
        seed = 1 + (data * 10 + step) * 10 + micro + (tensor * 1000 if cut == "terms" else 0)
        absent = cell.absent and ((index + data + micro) % 3 == 0 or (step == 0 and index == len(SHAPES) - 1))
        grads.append(None if absent else _whole(index, seed).to(dtype))
    return grads


def _parameters(dtype: torch.dtype, mesh: object) -> list[nn.Parameter]:
    """Other values on each data-parallel rank, and on each rank of what is not cut: the first rank's count."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard

    made = []
    for index, cut in enumerate(CUTS):
        rank = dist.get_rank()
        seed = 0 if rank < TENSOR and (isinstance(cut, int) or rank == 0) else 500 + rank
        whole = _whole(index, seed).to(dtype)
        if cut == "plain":
            made.append(nn.Parameter(whole))
            continue
        local, placement = whole, Replicate()
        if isinstance(cut, int):
            rows = -(-whole.shape[cut] // TENSOR)
            local = whole.split(rows, cut)[rank % TENSOR] if rank % TENSOR * rows < whole.shape[cut] else None
            local = whole.narrow(cut, 0, 0) if local is None else local
            placement = Shard(cut)
        shown = DTensor.from_local(
            local.contiguous(), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        made.append(nn.Parameter(shown))
    return made


def _backward(params: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    from torch.distributed.tensor import Partial

    loss = torch.zeros(())
    for parameter, grad, cut in zip(params, grads, CUTS, strict=True):
        if grad is None:
            continue
        local = parameter
        if cut != "plain":
            local = parameter.to_local(grad_placements=[Partial()] if cut == "terms" else None)
        if isinstance(cut, int):
            mesh = parameter.device_mesh
            rows = -(-grad.shape[cut] // TENSOR)
            start = min(rows * mesh.get_local_rank(), grad.shape[cut])
            grad = grad.narrow(cut, start, local.shape[cut])
        loss = loss + (local.float() * grad.float()).sum()
    loss.backward()


def _train(rank: int, cell: Cell, dtype: torch.dtype, mesh: object, folder: str) -> list[Tensor]:
    import zero_optim
    from torch.distributed.tensor import DTensor

    params = _parameters(dtype, mesh["tp"])
    opt = zero_optim.ShardedAdamW(
        params,
        lr=HYPER.lr,
        weight_decay=HYPER.weight_decay,
        stage=cell.stage,
        mesh=mesh["dp"],
        bucket_cap_mb=cell.cap_mb,
        grad_reduce_dtype=cell.reduce_dtype,
        overlap_grad_reduce=cell.overlap,
        overlap_param_gather=cell.gather_overlap,
        state_offload=None if cell.offload is None else cell.offload.format(folder=folder),
    )
    for step in range(STEPS):
        for micro in range(cell.micro):
            with maybe_no_sync(opt, cell.no_sync and micro < cell.micro - 1):
                _backward(params, _grads(cell, rank // TENSOR, rank % TENSOR, step, micro, dtype))
        opt.step()
        opt.zero_grad()
    opt.close()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in params]


def _average(terms: list[list[Tensor | None]], reduce_dtype: torch.dtype | None, cut: object) -> Tensor | None:
    """``terms[data][tensor]``: packed and rounded each; those of a row are added up first."""
    like = next((term for row in terms for term in row if term is not None), None)
    if like is None:
        return None
    dtype, total = reduce_dtype or like.dtype, torch.zeros(like.shape)
    for row in terms:
        packed = [pack_rounded(term, len(terms), dtype).float() for term in row if term is not None]
        packed = packed if cut == "terms" else packed[:1]
        if packed:
            total = total + sum(packed[1:], packed[0]).to(dtype).float()
    return total.to(dtype)


def _averages(local: list[list[list[Tensor | None]]], reduce_dtype: torch.dtype | None) -> list[Tensor | None]:
    """``local[data][tensor]``: the gradients of a rank."""
    return [
        _average([[of_rank[index] for of_rank in row] for row in local], reduce_dtype, cut)
        for index, cut in enumerate(CUTS)
    ]


def _expected(cell: Cell, data: int, dtype: torch.dtype) -> list[Tensor]:
    oracle = MasterAdamW([_whole(index, 0).to(dtype) for index in range(len(SHAPES))], HYPER)
    for step in range(STEPS):
        local: list = [[None] * TENSOR for _ in range(data)]
        total = None
        for micro in range(cell.micro):
            for d, t in itertools.product(range(data), range(TENSOR)):
                local[d][t] = accumulate(local[d][t], _grads(cell, d, t, step, micro, dtype))
            # One data-parallel rank has whole gradients after every backward, as there ``.grad`` shows them.
            if not cell.no_sync or micro == cell.micro - 1 or data == 1:
                averages = _averages(local, cell.reduce_dtype)
                if cell.stage == 0:  # there ``.grad`` shows the average, in the parameter's dtype
                    averages = [None if average is None else average.to(dtype) for average in averages]
                total = accumulate(total, averages)
                local = [[None] * TENSOR for _ in range(data)]
        oracle.step(total or [])
    return oracle.params


def _cells(data: int) -> list[Cell]:
    """Of two data-parallel ranks all, of others every other one. An all-reduce over more than two ranks, as at stage 0,
    has no one order. One rank reduces nothing."""
    if data == 2:
        return CELLS
    return [cell for cell in CELLS if (cell.reduce_dtype is None if data == 1 else cell.stage > 0)][::2]


def _train_cells(rank: int, world_size: int, dtype: torch.dtype, half: int, folder: str) -> list[list[Tensor]]:
    mesh = make_mesh(world_size // TENSOR, TENSOR)
    return [_train(rank, cell, dtype, mesh, folder) for cell in _cells(world_size // TENSOR)[half::2]]


@pytest.mark.parametrize(
    ("data", "dtype", "half"),
    halves([(2, torch.float32), (2, torch.bfloat16), (3, torch.float16), (1, torch.bfloat16)]),
)
def test_every_cell_equals_the_oracle_bit_for_bit(data, dtype, half, tmp_path):
    results = run_ranks(data * TENSOR, _train_cells, dtype, half, str(tmp_path), timeout=120)
    failures = []
    for number, cell in enumerate(_cells(data)[half::2]):
        expected = _expected(cell, data, dtype)
        for rank in range(data * TENSOR):
            if found := difference(results[rank][number], expected):
                failures.append(f"{cell}, rank {rank}: {found}")
    assert not failures, "\n".join(failures)
