"""``ShardedMuon`` of matrices that are cut over tensor-parallel ranks, against whole matrices in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import oracle_float64
import pytest
import torch
import torch.distributed as dist
import zero_optim
from cells import slow
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from training_cases import error_of
from zero_optim import rules
from zero_optim.params.tensor_slice import Joint

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
    "stack of one": Kind((1, 8, 12), 0),
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
NOT_SENT = {name: DTENSORS[name] for name in ("stack", "stack of one", "replicated")}


@dataclass(frozen=True)
class Cell:
    """One training."""

    stage: int
    kinds: Mapping[str, Kind] = field(default_factory=lambda: DTENSORS)
    plain: bool = False
    dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)


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
    """Those of a data-parallel rank, in the dtype of the parameters. Every second one has the same, so averages of four
    are those of two."""
    seed = 1 + 10 * step + data % 2
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


def mesh_of() -> dist.DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("shard", "tp"))


def make(cell: Cell) -> tuple[Model, zero_optim.ShardedMuon]:
    """On these ranks."""
    mesh = mesh_of()
    model, told = Model(cell, mesh["tp"]), {"tensor_parallel": mesh["tp"]} if cell.plain else {}
    options = {"mesh": mesh["shard"], **told}
    if cell.stage == 3:  # the optimizer takes both from the model
        zero_optim.shard_module(model, (Block,), **options)
        options = {}
    return model, zero_optim.ShardedMuon(groups_of(model, cell), stage=cell.stage, **options, **cell.options)


def train(model: Model, opt: zero_optim.ShardedMuon, cell: Cell, steps: Sequence[int]) -> None:
    for step in steps:
        model(gradients(cell, dist.get_rank() // TENSOR, step)).backward()
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


def averages(cell: Cell, data: int, step: int) -> dict[str, Tensor]:
    """By name. ``data``: ranks, one or two."""
    of_rank = [gradients(cell, rank, step) for rank in range(data)]
    found = {}
    for block, of_block in of_rank[0].items():
        for key in of_block:
            terms = [(grads[block][key].float() / data).to(cell.dtype).float() for grads in of_rank]
            found[f"blocks.{block}.{key}"] = sum(terms[1:], terms[0]).to(cell.dtype)
    return found


class Alone:
    """One process with whole matrices, which is given the averages of ``data`` ranks."""

    def __init__(self, cell: Cell, data: int) -> None:
        self.cell, self.data, self.model = cell, data, Model(cell)
        self.opt = zero_optim.ShardedMuon(groups_of(self.model, cell), **cell.options)

    def train(self, steps: Sequence[int]) -> Alone:
        for step in steps:
            grads = averages(self.cell, self.data, step)
            for name, parameter in self.model.named_parameters():
                parameter.grad = grads[name]
            self.opt.step()
            self.opt.zero_grad()
        return self

    def found(self) -> Found:
        return found_in(self.model, self.opt, self.cell)


def kind_of(cell: Cell, name: str) -> Kind | None:
    """Of a parameter, or its state; None: the vector."""
    return cell.kinds.get(name.partition("/")[0].rpartition(".")[2])


def assert_same(cell: Cell, found: Found, wanted: Found, rank: int) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        kind, whole = kind_of(cell, name), wanted[name]
        if cell.plain and kind is not None and value.dim():
            whole = own_slice(kind, whole, rank % TENSOR)
        assert torch.equal(value, whole), (cell, name)


def _train_cells(rank: int, world_size: int, cells: Sequence[Cell]) -> list[Found]:
    results = []
    for cell in cells:
        model, opt = make(cell)
        with oracle_float64.watch(opt) as watching:
            train(model, opt, cell, range(STEPS))
            oracle_float64.assert_rounding_alone(watching.report())
        results.append(found_in(model, opt, cell))
        opt.close()
    return results


SMALL = {"master": "split", "state_dtype": "int8"}
ON_TWO = [Cell(0), Cell(2), Cell(3), Cell(1, PLAIN, plain=True), Cell(3, PLAIN, plain=True, dtype=torch.bfloat16)]
ON_FOUR = [
    *(Cell(stage, dtype=torch.bfloat16) for stage in (1, 3)),
    Cell(2, PLAIN, plain=True),
    Cell(3, ALIGNED, dtype=torch.bfloat16, options=SMALL),
    Cell(2, NOT_SENT, options={"state_offload": "paged"}),
]
MORE_ON_FOUR = [
    *(Cell(stage, dtype=torch.bfloat16) for stage in (0, 2)),
    *(Cell(stage, PLAIN, plain=True) for stage in (0, 3)),
    Cell(2, ALIGNED, dtype=torch.bfloat16, options=SMALL),
]
"""What these are of two settings, stage and kind or stage and dtype, is on two ranks, too, or at another stage."""


@pytest.mark.parametrize(
    ("world_size", "cells"),
    [(2, ON_TWO), (4, ON_FOUR), pytest.param(4, MORE_ON_FOUR, marks=slow)],
    ids=["1 x 2", "2 x 2", "2 x 2, more"],
)
def test_it_has_the_bits_of_whole_matrices(world_size: int, cells: Sequence[Cell]) -> None:
    results = run_ranks(world_size, _train_cells, cells, timeout=180)
    for number, cell in enumerate(cells):
        wanted = Alone(cell, world_size // TENSOR).train(range(STEPS)).found()
        for rank in range(world_size):
            assert_same(cell, results[rank][number], wanted, rank)


def _sent(rank: int, world_size: int, cell: Cell) -> int:
    model, opt = make(cell)
    train(model, opt, cell, range(STEPS))
    sent = opt.stats()["collectives"]["tensor_all_to_all"]["bytes"]
    opt.close()
    return sent


@pytest.mark.parametrize("cell", [Cell(3), Cell(2, PLAIN, plain=True)], ids=lambda of: of.stage)
def test_what_is_made_whole_is_sent_there_and_back(cell: Cell) -> None:
    """In bf16. Stacks of which each rank has some matrices stay."""
    cut = [kind for kind in cell.kinds.values() if kind.cut is not None and (len(kind.shape), kind.cut) != (3, 0)]
    elements = 2 * sum(torch.Size(kind.shape).numel() for kind in cut)
    assert sum(run_ranks(4, _sent, cell)) == STEPS * 4 * elements


def _saves_and_loads(rank: int, world_size: int, cell: Cell, folder: Path) -> list[Found]:
    model, opt = make(cell)
    train(model, opt, cell, [0, 1])
    zero_optim.checkpoint.save(folder / "sliced", model, opt)
    train(model, opt, cell, [2])
    found = found_in(model, opt, cell)
    opt.close()
    cell = replace(cell, stage=3)
    model, opt = make(cell)
    zero_optim.checkpoint.load(folder / ("sliced" if cell.plain else "whole"), model, opt)
    train(model, opt, cell, [2])
    return [found, found_in(model, opt, cell)]


def test_checkpoints_go_from_slices_to_whole_matrices_and_back(tmp_path: Path) -> None:
    cell = Cell(2, EVEN | UNEVEN, dtype=torch.bfloat16)
    alone = Alone(cell, 2).train([0, 1])
    zero_optim.checkpoint.save(tmp_path / "whole", alone.model, alone.opt)
    wanted = alone.train([2]).found()
    for rank, of_rank in enumerate(run_ranks(4, _saves_and_loads, cell, tmp_path)):
        for found in of_rank:
            assert_same(cell, found, wanted, rank)
    again = Alone(cell, 2)
    zero_optim.checkpoint.load(tmp_path / "sliced", again.model, again.opt)
    assert_same(cell, again.train([2]).found(), wanted, 0)


def slice_with(shape: tuple[int, ...] = (8, 6), **attributes: Any) -> nn.Parameter:
    made = nn.Parameter(torch.ones(shape))
    made.tensor_model_parallel = True
    vars(made).update(attributes)
    return made


class ByWholes(rules.Muon):
    """A rule that needs whole parameters, and does not make them whole."""

    joins_parts = False


def _refuses(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2, TENSOR), mesh_dim_names=("dp", "tp"))

    def told(make_optimizer: Callable[..., Any], *groups: dict[str, Any], **options: Any) -> tuple[str, str]:
        return error_of(lambda: make_optimizer([*groups], mesh=mesh["dp"], tensor_parallel=mesh["tp"], **options))

    muon = zero_optim.ShardedMuon
    rows = {"partition_dim": 0, "partition_stride": 1}
    found = {
        "no dimension": told(muon, {"params": [slice_with()]}),
        "Megatron's default": told(muon, {"params": [slice_with(partition_dim=-1)]}),
        "stride": told(muon, {"params": [slice_with(partition_dim=0, partition_stride=3)]}),
        "sizes": told(muon, {"params": [slice_with(partition_dim=1, partition_sizes=[4, 4])]}),
        "one size": told(muon, {"params": [slice_with(partition_dim=0, partition_sizes=8)]}),
        "blocks": told(muon, {"params": [slice_with(partition_dim=0)], "view": {"rows": 2}}),
        "view": told(muon, {"params": [slice_with(**rows)], "view": {"rows": (4, 4)}}),
        "ranks": told(muon, {"params": [slice_with(partition_dim=rank % TENSOR)]}),
        "rule": told(
            lambda groups, **options: zero_optim.ShardedOptimizer(groups, ByWholes(), **options),
            {"params": [slice_with(**rows)]},
        ),
        "experts": told(
            muon,
            {"params": [slice_with(**rows)]},
            {"params": [slice_with(**rows)], "process_group": mesh.get_group("tp"), "grad_divisor": 2},
        ),
    }
    opt = muon([{"params": [slice_with(**rows)]}], mesh=mesh["dp"], tensor_parallel=mesh["tp"])
    opt.param_groups[0]["view"] = {"rows": 5}
    found["view in step"] = error_of(opt.step)
    opt.close()
    return found


SAYS = {
    "no dimension": ("ParameterError", "is a slice of shape (8, 6) with partition_dim = None: set partition_dim to"),
    "Megatron's default": ("ParameterError", "is a slice of shape (8, 6) with partition_dim = -1"),
    "stride": ("ParameterError", "with partition_stride = 3: give a partition_stride that divides 8"),
    "sizes": ("ParameterError", "with partition_sizes = [4, 4]: give a partition_stride that divides 6"),
    "one size": ("ParameterError", "with partition_sizes = 8: give a partition_stride that divides 8"),
    "blocks": ("ParameterError", "set partition_stride = 1 on the parameter where slices follow each other"),
    "view": ("ParameterError", "lengths that add up to 16. It is a slice of shape (8, 6), and a view is of the whole"),
    "ranks": ("RankMismatchError", "partition_dim = 1"),
    "rule": ("ParameterError", "is cut over the tensor-parallel ranks, and ByWholes needs whole parameters"),
    "experts": ("ParameterError", "is in a group of experts, of which tensor-parallel ranks are not known, and Muon"),
    "view in step": ("ValueError", "has 16 rows by its shape (16, 6), and its group has view={'rows': 5}"),
}


def test_what_cannot_be_is_told_on_every_rank() -> None:
    for found in run_ranks(4, _refuses):
        for case, (kind, says) in SAYS.items():
            assert found[case][0] == kind and says in found[case][1], (case, found[case])


def test_a_joint_knows_the_shares_of_each_rank() -> None:
    joint = Joint((16, 3), 0, ((3, 2, 0), (4, 4, 3)))
    assert [*joint.slices_of(0)] == [(0, 0, 3), (5, 3, 4)]
    assert [*joint.slices_of(1)] == [(3, 0, 2), (9, 2, 4)]
    assert [*joint.slices_of(2)] == [(5, 0, 0), (13, 0, 3)]
