"""``ShardedMuon`` of matrices that are cut over tensor-parallel ranks, against whole matrices in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from zero_optim import rules

STEPS, TENSOR = 3, 2


@dataclass(frozen=True)
class Kind:
    """A parameter. ``cut``: along which dimension; None: not. ``shares``: the lengths of the blocks of the whole of
    which each rank has its share; None: the slices follow each other."""

    shape: tuple[int, ...]
    cut: int | None
    view: Mapping[str, Any] | None = None
    shares: tuple[int, ...] | None = None
    channels_last: bool = False


UNEVEN = {
    "rows": Kind((21, 12), 0),
    "columns": Kind((12, 33), 1),
    "one row": Kind((1, 20), 0),
    "stack": Kind((3, 8, 12), 0),
    "convolution": Kind((5, 4, 3, 3), 0, channels_last=True),
}
EVEN = {
    "alike": Kind((20, 34), 1),
    "fused": Kind((48, 16), 0, {"rows": (24, 12, 12)}),  # a slice has all of one block, or of two
    "heads": Kind((16, 40), 1, {"columns": 4}),
    "cut stack": Kind((2, 8, 12), 1),
    "replicated": Kind((10, 18), None),
}
ALIGNED = {
    "rows": Kind((32, 16), 0),
    "stack": Kind((4, 8, 16), 0),
    "replicated": Kind((16, 16), None),
}
"""Slices are whole rows of 128 elements, as they lie. So a codec sees the same rows as without tensor parallelism."""
SHARED = {
    "queries, keys, values": Kind((48, 16), 0, {"rows": (24, 12, 12)}, (24, 12, 12)),
    "gate and up": Kind((36, 10), 0, {"rows": 2}, (18, 18)),
}
DTENSORS, PLAIN = EVEN | UNEVEN, EVEN | SHARED


@dataclass(frozen=True)
class Cell:
    """One training."""

    stage: int
    kinds: Mapping[str, Kind] = field(default_factory=lambda: DTENSORS)
    plain: bool = False
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1


def values(name: str, kind: Kind, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    made = torch.randn(kind.shape, generator=generator) / 4
    return made.to(memory_format=torch.channels_last) if kind.channels_last else made


def own_slice(kind: Kind, whole: Tensor, rank: int) -> Tensor:
    """Of a plain parameter."""
    if kind.cut is None:
        return whole
    blocks = whole.split(list(kind.shares or whole.shape[kind.cut : kind.cut + 1]), kind.cut)
    return torch.cat([block.chunk(TENSOR, kind.cut)[rank] for block in blocks], kind.cut)


class Block(nn.Module):
    """``mesh``: the tensor-parallel ranks; None: the parameters are whole."""

    def __init__(self, name: str, cell: Cell, mesh: dist.DeviceMesh | None) -> None:
        super().__init__()
        self.kinds, self.mesh, self.plain = cell.kinds, mesh, cell.plain
        for key, kind in cell.kinds.items():
            self.register_parameter(key, self._make(values(name + key, kind, 0).to(cell.dtype), kind))
        self.register_parameter("vector", nn.Parameter(torch.ones(7, dtype=cell.dtype)))

    def _make(self, whole: Tensor, kind: Kind) -> nn.Parameter:
        if self.mesh is None:
            return nn.Parameter(whole)
        if not self.plain:
            placement = Replicate() if kind.cut is None else Shard(kind.cut)
            made = nn.Parameter(distribute_tensor(whole, self.mesh, [placement]))
            if kind.channels_last:  # distribute_tensor makes slices contiguous
                made._local_tensor.data = made._local_tensor.data.to(memory_format=torch.channels_last)
            return made
        made = nn.Parameter(own_slice(kind, whole, self.mesh.get_local_rank()).contiguous())
        made.tensor_model_parallel = kind.cut is not None
        if kind.cut is not None:
            made.partition_dim, made.partition_stride = kind.cut, len(kind.shares or [1])
        if kind.shares is not None and len({*kind.shares}) > 1:
            made.partition_sizes = [length // TENSOR for length in kind.shares]
        return made

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        """A loss with these gradients, which are whole."""
        loss = torch.zeros(())
        for name, parameter in self.named_parameters():
            grad, local = grads[name], parameter
            if isinstance(parameter, DTensor):
                grad = distribute_tensor(grad, self.mesh, parameter.placements)._local_tensor
                local = parameter.to_local()
            elif self.mesh is not None and self.plain and name in self.kinds:
                grad = own_slice(self.kinds[name], grad, self.mesh.get_local_rank())
            loss = loss + (local.float() * grad.float()).sum()
        return loss


class Model(nn.Module):
    def __init__(self, cell: Cell, mesh: dist.DeviceMesh | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block(name, cell, mesh) for name in ("first", "second")})

    def forward(self, grads: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
        return sum(block(grads[name]) for name, block in self.blocks.items())


def gradients(cell: Cell, data: int, step: int) -> dict[str, dict[str, Tensor]]:
    """Those of a data-parallel rank, in the dtype of the parameters."""
    seed = 1 + 10 * step + data
    return {
        block: {
            **{key: values(block + key, kind, seed).to(cell.dtype) for key, kind in cell.kinds.items()},
            "vector": values(block, Kind((7,), None), seed).to(cell.dtype),
        }
        for block in ("first", "second")
    }


def groups_of(model: nn.Module, cell: Cell) -> list[dict[str, Any]]:
    named = [*model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if name.endswith("vector")], "rule": rules.AdamW(lr=1e-2)}
    ]
    for key, kind in cell.kinds.items():
        of_kind = [(name, p) for name, p in named if name.endswith(f".{key}")]
        groups.append({"params": of_kind, "view": kind.view, "lr": 0.01 * len(groups)})
    return groups


Found = dict[str, Tensor]


def mesh_of(replicas: int = 1) -> dist.DeviceMesh:
    data = dist.get_world_size() // TENSOR
    if replicas == 1:
        return init_device_mesh("cpu", (data, TENSOR), mesh_dim_names=("shard", "tp"))
    return init_device_mesh("cpu", (replicas, data // replicas, TENSOR), mesh_dim_names=("replicate", "shard", "tp"))


def make(cell: Cell) -> tuple[Model, zero_optim.ShardedMuon]:
    """On these ranks."""
    mesh = mesh_of(cell.replicas)
    model, told = Model(cell, mesh["tp"]), {"tensor_parallel": mesh["tp"]} if cell.plain else {}
    data = mesh["shard"] if cell.replicas == 1 else mesh["replicate", "shard"]
    options = {"mesh": data, **told}
    if cell.stage == 3:  # the optimizer takes both from the model
        zero_optim.shard_module(model, (Block,), **options)
        options = {}
    return model, zero_optim.ShardedMuon(groups_of(model, cell), stage=cell.stage, **options, **cell.options)


def train(model: Model, opt: zero_optim.ShardedMuon, cell: Cell, steps: Sequence[int], overflow: int = -1) -> None:
    """``overflow``: the step in which a gradient of the last rank alone is not finite."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in steps:
        grads = gradients(cell, rank // TENSOR, step)
        loss = model(grads)
        (loss * torch.inf if step == overflow and rank == ranks - 1 else loss).backward()
        opt.step()
        opt.zero_grad()


def found_in(model: nn.Module, opt: zero_optim.ShardedMuon, cell: Cell) -> Found:
    """State by name, whole, or of a plain slice that of this rank; and the parameters."""
    state = zero_optim.full_state_dict(opt, rank=None)["state"]
    names = [name for group in groups_of(model, cell) for name, _ in group["params"]]
    found = {f"{names[i]}/{key}": torch.as_tensor(value) for i, of in state.items() for key, value in of.items()}
    with zero_optim.gather_parameters(model):
        for name, p in model.named_parameters():
            found[name] = (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
    return found


def expected(cell: Cell, data: int, steps: Sequence[int] = range(STEPS)) -> Found:
    """One process with whole matrices, which is given the averages."""
    model = Model(cell)
    options = {key: value for key, value in cell.options.items() if key != "telemetry"}
    opt = zero_optim.ShardedMuon(groups_of(model, cell), **options)
    for step in steps:
        of_rank = [gradients(cell, rank, step) for rank in range(data)]
        for name, parameter in model.named_parameters():
            _, block, key = name.split(".")
            terms = [(grads[block][key].float() / data).to(cell.dtype).float() for grads in of_rank]
            parameter.grad = sum(terms[1:], terms[0]).to(cell.dtype).to(memory_format=torch.preserve_format)
        opt.step()
        opt.zero_grad()
    found = found_in(model, opt, cell)
    opt.close()
    return found


def assert_same(cell: Cell, found: Found, wanted: Found, rank: int) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        kind = cell.kinds.get(name.partition("/")[0].split(".")[-1])
        whole = wanted[name]
        if cell.plain and kind is not None and value.dim():
            whole = own_slice(kind, whole, rank % TENSOR)
        assert torch.equal(value, whole), (cell, name, (value - whole).abs().max())


def _train_cells(rank: int, world_size: int, cells: Sequence[Cell]) -> list[Found]:
    results = []
    for cell in cells:
        model, opt = make(cell)
        train(model, opt, cell, range(STEPS))
        results.append(found_in(model, opt, cell))
        opt.close()
    return results


SMALL = {"master": "split", "state_dtype": "int8"}
ON_TWO = [Cell(0), Cell(2), Cell(3), Cell(1, PLAIN, plain=True), Cell(3, PLAIN, plain=True, dtype=torch.bfloat16)]
ON_FOUR = [
    *(Cell(stage, dtype=torch.bfloat16) for stage in (0, 1, 2, 3)),
    *(Cell(stage, PLAIN, plain=True) for stage in (0, 2, 3)),
    *(Cell(stage, ALIGNED, dtype=torch.bfloat16, options=SMALL) for stage in (2, 3)),
]


@pytest.mark.parametrize(("world_size", "cells"), [(2, ON_TWO), (4, ON_FOUR)], ids=["1 x 2", "2 x 2"])
def test_it_has_the_bits_of_whole_matrices(world_size: int, cells: Sequence[Cell]) -> None:
    results = run_ranks(world_size, _train_cells, cells, timeout=180)
    for number, cell in enumerate(cells):
        wanted = expected(cell, world_size // TENSOR)
        for rank in range(world_size):
            assert_same(cell, results[rank][number], wanted, rank)
