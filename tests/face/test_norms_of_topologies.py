"""The norm on every topology, in closed form: each gradient of the whole model counts once, wherever it lies.

The averaged gradient of a parameter is a constant c in all of its n elements. So the norm is (sum of n * c^p)^(1/p).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from zero_optim import ShardedAdamW, shard_module

NORMS = (1.0, 2.0, 3.0, math.inf)
SHAPES = {"embedding": (12, 6), "up": (8, 6), "down": (6, 8), "norm": (6,), "gain": (1,)}
CONSTANTS = {
    "embedding": 0.5,
    "up": -2.0,
    "down": 1.5,
    "norm": 3.0,
    "gain": -4.0,
    "experts": 2.5,
    "output": 0.5,
    "later": -1.0,
}
EXPERTS = (4, 5)

Built = tuple[nn.ParameterDict, ShardedAdamW]


def mesh_of(**sizes: int) -> dist.DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def plain(*names: str) -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(torch.zeros(SHAPES[name])) for name in names or SHAPES})


def cut(mesh: dist.DeviceMesh, *names: str) -> nn.ParameterDict:
    """Over the tensor-parallel ranks: two along rows, one along columns, and norms that all of them have."""
    placed = {"embedding": Shard(0), "up": Shard(0), "down": Shard(1)}
    return nn.ParameterDict(
        {
            name: nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [placed.get(name, Replicate())]))
            for name, shape in SHAPES.items()
            if not names or name in names
        }
    )


def marked(*names: str) -> nn.ParameterDict:
    """Plain slices for two tensor-parallel ranks, with Megatron's marks. Of ``norm`` each has a term; ``gain`` has no
    mark."""
    shapes = {"embedding": (6, 6), "up": (4, 6), "down": (6, 4)}
    made = nn.ParameterDict()
    for name in names or SHAPES:
        made[name] = nn.Parameter(torch.zeros(shapes.get(name, SHAPES[name])))
        if name != "gain":
            made[name].tensor_model_parallel = name in shapes
        made[name].sequence_parallel = name == "norm"
    return made


def with_second_copy(model: nn.ParameterDict) -> nn.ParameterDict:
    """The output layer of the last stage has the embedding of the first."""
    embedding = marked("embedding") if "tensor_model_parallel" in vars(model["down"]) else plain("embedding")
    model["output"] = embedding["embedding"]
    model["output"].shared = True
    return model


class Unit(nn.Module):
    """A module whose call only brings in its parameters."""

    def __init__(self, parameters: nn.ParameterDict) -> None:
        super().__init__()
        self.own = parameters

    def forward(self) -> dict[str, Tensor]:
        return {name: parameter * 1.0 for name, parameter in self.own.items()}


# -- topologies: what each rank makes --------------------------------------------------------------------------------


def flat(stage: int) -> Callable[[], Built]:
    def build() -> Built:
        model = plain()
        return model, ShardedAdamW(model.items(), stage=stage)

    return build


def grid(stage: int, **given: Any) -> Callable[[], Built]:
    def build() -> Built:
        model = plain()
        return model, ShardedAdamW(model.items(), stage=stage, mesh=mesh_of(replicate=2, shard=2), **given)

    return build


def tensor_parallel(stage: int) -> Callable[[], Built]:
    def build() -> Built:
        mesh = mesh_of(dp=2, tp=2)
        model = cut(mesh["tp"])
        return model, ShardedAdamW(model.items(), stage=stage, mesh=mesh["dp"])

    return build


def tensor_parallel_grid() -> Built:
    mesh = mesh_of(replicate=2, shard=2, tp=2)
    model = cut(mesh["tp"])
    return model, ShardedAdamW(model.items(), mesh=mesh["replicate", "shard"])


def with_experts(stage: int, *, as_slices: bool) -> Callable[[], Built]:
    def build() -> Built:
        mesh = mesh_of(edp=2, ep=2)
        own = torch.zeros(EXPERTS[0] // 2, EXPERTS[1])
        experts = DTensor.from_local(own, mesh["ep"], [Shard(0)]) if as_slices else own
        model = plain()
        dense = list(model.items())
        model["experts"] = nn.Parameter(experts)
        of_experts = {"params": [("experts", model["experts"])], "mesh": mesh["edp"], "grad_divisor": 2}
        return model, ShardedAdamW([{"params": dense}, of_experts], stage=stage)

    return build


def pipeline(stage: int) -> Callable[[], Built]:
    def build() -> Built:
        mesh = mesh_of(pp=2, dp=2)
        model = plain("embedding", "up") if mesh.get_local_rank("pp") == 0 else plain("down", "norm", "gain")
        return model, ShardedAdamW(model.items(), stage=stage, mesh=mesh["dp"], pipeline=mesh["pp"])

    return build


def tensor_parallel_pipeline() -> Built:
    mesh = mesh_of(pp=2, dp=2, tp=2)
    names = ("embedding", "norm") if mesh.get_local_rank("pp") == 0 else ("up", "down", "gain")
    model = cut(mesh["tp"], *names)
    return model, ShardedAdamW(model.items(), mesh=mesh["dp"], pipeline=mesh["pp"])


def plain_slices(stage: int) -> Callable[[], Built]:
    def build() -> Built:
        mesh, model = mesh_of(dp=2, tp=2), marked()
        return model, ShardedAdamW(model.items(), stage=stage, mesh=mesh["dp"], tensor_parallel=mesh["tp"])

    return build


def plain_slices_grid(**given: Any) -> Built:
    mesh, model = mesh_of(replicate=2, shard=2, tp=2), marked()
    return model, ShardedAdamW(model.items(), mesh=mesh["replicate", "shard"], tensor_parallel=mesh["tp"], **given)


def over_all_pipeline() -> Built:
    mesh = mesh_of(pp=2, replicate=2, shard=2)
    model = plain(*(("embedding", "norm") if mesh.get_local_rank("pp") == 0 else ("up", "down", "gain")))
    grid = {"mesh": mesh["replicate", "shard"], "state_over": "all"}
    return model, ShardedAdamW(model.items(), **grid, pipeline=mesh["pp"])


def tied_pipeline(stage: int) -> Callable[[], Built]:
    def build() -> Built:
        mesh = mesh_of(pp=2, dp=2)
        first = mesh.get_local_rank("pp") == 0
        model = plain("embedding", "up") if first else with_second_copy(plain("down", "norm", "gain"))
        return model, ShardedAdamW(model.items(), stage=stage, mesh=mesh["dp"], pipeline=mesh["pp"])

    return build


def tied_pipeline_of_plain_slices() -> Built:
    mesh = mesh_of(pp=2, dp=2, tp=2)
    first = mesh.get_local_rank("pp") == 0
    model = marked("embedding", "gain") if first else with_second_copy(marked("up", "down", "norm"))
    return model, ShardedAdamW(model.items(), mesh=mesh["dp"], tensor_parallel=mesh["tp"], pipeline=mesh["pp"])


TOPOLOGIES: dict[str, tuple[int, Callable[[], Built]]] = {
    "nothing is shared": (4, flat(0)),
    "optimizer state is shared": (4, flat(1)),
    "gradients are, too": (4, flat(2)),
    "replicas of shards, stage 1": (4, grid(1)),
    "replicas of shards": (4, grid(2)),
    "state over all": (4, grid(2, state_over="all")),
    "tensor parallel, nothing shared": (4, tensor_parallel(0)),
    "tensor parallel": (4, tensor_parallel(2)),
    "tensor parallel, replicas of shards": (8, tensor_parallel_grid),
    "experts": (4, with_experts(2, as_slices=False)),
    "experts as slices": (4, with_experts(1, as_slices=True)),
    "a pipeline, nothing shared": (4, pipeline(0)),
    "a pipeline": (4, pipeline(2)),
    "a pipeline of tensor-parallel stages": (8, tensor_parallel_pipeline),
    "plain slices, nothing shared": (4, plain_slices(0)),
    "plain slices": (4, plain_slices(2)),
    "plain slices, replicas of shards": (8, plain_slices_grid),
    "plain slices, state over all": (8, partial(plain_slices_grid, state_over="all")),
    "a pipeline, state over all": (8, over_all_pipeline),
    "a pipeline with a tied embedding, nothing shared": (4, tied_pipeline(0)),
    "a pipeline with a tied embedding": (4, tied_pipeline(2)),
    "a pipeline of plain slices with a tied embedding": (8, tied_pipeline_of_plain_slices),
}


# -- the norm ----------------------------------------------------------------------------------------------------------


def backward(model: nn.ParameterDict) -> None:
    """A gradient of which each of two tensor-parallel ranks has a term is a half on each."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in model.values()]
    local = [p / 2 if getattr(p, "sequence_parallel", False) else p for p in local]
    sum(CONSTANTS[name] * p.sum() for name, p in zip(model, local, strict=True)).backward()


def norms(rank: int, world_size: int, name: str) -> list[float]:
    """Each by itself; that of a subset, with a second copy or experts; the norm that a step has clipped to."""
    model, opt = TOPOLOGIES[name][1]()
    found = []
    for norm_type in NORMS:
        opt.zero_grad()
        backward(model)
        found.append(opt.clip_grad_norm_(1e9, norm_type).item())
    subset = [parameter for name, parameter in model.items() if name in ("up", "norm", "output", "experts")]
    found.append(opt.clip_grad_norm_(1e9, 2.0, subset).item())
    opt.clip_grad_norm_(1.0)
    found.append(opt.clip_grad_norm_(1.0).item())
    return found


def norm(names: Any, norm_type: float) -> float:
    shapes = {**SHAPES, "experts": EXPERTS}
    if norm_type == math.inf:
        return max(abs(CONSTANTS[name]) for name in names)
    return sum(math.prod(shapes[name]) * abs(CONSTANTS[name]) ** norm_type for name in names) ** (1 / norm_type)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_each_gradient_counts_once(name: str) -> None:
    names = [*SHAPES, "experts"] if "experts" in name else [*SHAPES]
    expected = [*(norm(names, norm_type) for norm_type in NORMS), norm(["up", "norm", *names[len(SHAPES) :]], 2.0), 1.0]
    for found in run_ranks(TOPOLOGIES[name][0], norms, name, timeout=120):
        assert found == pytest.approx(expected, rel=1e-5)


def norm_with_a_later_group(rank: int, world_size: int) -> float:
    """Dense parameters join an optimizer that has experts as slices."""
    model, opt = with_experts(2, as_slices=True)()
    model["later"] = nn.Parameter(torch.zeros(EXPERTS))
    opt.add_param_group({"params": [("later", model["later"])]})
    backward(model)
    return opt.clip_grad_norm_(1e9).item()


def test_dense_parameters_join_experts() -> None:
    expected = math.hypot(norm([*SHAPES, "experts"], 2.0), math.sqrt(20) * CONSTANTS["later"])
    assert run_ranks(4, norm_with_a_later_group) == pytest.approx([expected] * 4, rel=1e-5)


def norms_of_units(rank: int, world_size: int, *, kind: str, replicas: int) -> list[float]:
    """Stage 3: two units, and a root that has parameters of its own. Slices are on two tensor-parallel ranks."""
    mesh = mesh_of(replicate=replicas, shard=2, tp=1 if kind == "plain" else 2)
    data = mesh["shard"] if replicas == 1 else mesh["replicate", "shard"]
    parts = (("embedding", "norm"), ("up",), ("down", "gain"))
    make = {"plain": plain, "marked": marked, "cut": partial(cut, mesh["tp"])}[kind]
    made, as_marked = [make(*names) for names in parts], kind == "marked"
    model = nn.ModuleDict({"first": Unit(made[0]), "second": Unit(made[1])})
    model["third"] = Unit(made[2])
    given = {"tensor_parallel": mesh["tp"]} if as_marked else {}
    shard_module(model, (Unit,), mesh=data, **given)
    opt = ShardedAdamW(model.named_parameters())
    found = []
    for norm_type in NORMS:
        opt.zero_grad()
        shown = [pair for unit in model.values() for pair in unit().items()]
        local = [
            p.to_local() if isinstance(p, DTensor) else p / (2 if as_marked and name == "norm" else 1)
            for name, p in shown
        ]
        sum(CONSTANTS[name] * p.sum() for (name, _), p in zip(shown, local, strict=True)).backward()
        found.append(opt.clip_grad_norm_(1e9, norm_type).item())
    return found


@pytest.mark.parametrize(("kind", "replicas"), [("plain", 1), ("plain", 2), ("cut", 1), ("marked", 1), ("cut", 2)])
def test_each_gradient_counts_once_at_stage_3(kind: str, replicas: int) -> None:
    of_rank, ranks = partial(norms_of_units, kind=kind, replicas=replicas), replicas * (2 if kind == "plain" else 4)
    for found in run_ranks(ranks, of_rank, timeout=120):
        assert found == pytest.approx([norm([*SHAPES], norm_type) for norm_type in NORMS], rel=1e-5)
