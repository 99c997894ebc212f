"""Experts at stage 3: two layers of them, whose tokens travel between ranks within a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import expert_cases
import grid_cases
import pytest
import torch
import torch.distributed as dist
import zero_optim
from expert_cases import HYPER, TOKENS, WIDTH, Moe
from harness import run_ranks
from sharded_cases import ON_DISK
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from training_cases import error_of
from zero_optim.units.sharded_model import sharded_model_of

ALLOWED: tuple[tuple[Sequence[int], Sequence[int]], ...] = (
    ((0, 1), (2, 3)),  # ranks 1 and 2 have no tokens for their experts, and each waits for one that has some
    ((0, 1, 2, 3), (0, 1, 2, 3)),
    ((0, 1, 2, 3), (3,)),
    ((), ()),
    ((1,), (1,)),
)
"""By step, the experts of the tokens of ranks 0 and 1, and of 2 and 3; none: tokens go to no expert."""


class Layers(nn.Sequential):
    def __init__(self, stacked: bool) -> None:
        torch.manual_seed(0)
        super().__init__(Moe(stacked=stacked), Moe(stacked=stacked))

    def forward(self, x: Tensor, route: Sequence[int]) -> Tensor:
        for layer in self:
            x = x + layer(x, route)
        return x


def spread(mesh: dist.DeviceMesh, *, stacked: bool) -> Layers:
    model = Layers(stacked)
    for layer in model:
        expert_cases.spread(layer, mesh)
    return model


def route(rank: int, step: int) -> list[int]:
    allowed = ALLOWED[step % len(ALLOWED)][rank // 2]
    return [allowed[(token + rank) % len(allowed)] if allowed else -1 for token in range(TOKENS)]


def loss_of(model: Layers, rank: int, step: int, routes: Sequence[int]) -> Tensor:
    x, y = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.mse_loss(model(x, routes), y)


def first_counts(mesh: dist.DeviceMesh, *, stacked: bool) -> Layers:
    """Values of the first rank that has an expert count: others begin with zeros."""
    model = spread(mesh, stacked=stacked)
    for parameter in model.parameters() if mesh.get_local_rank("edp") else ():
        nn.init.zeros_(parameter)
    return model


def sharded(mesh: dist.DeviceMesh, *, stacked: bool, **options: Any) -> Layers:
    model = first_counts(mesh, stacked=stacked)
    kind = "Stacked" if stacked else nn.ModuleList
    return zero_optim.shard_module(model, (Moe,), experts={kind: mesh["edp"]}, **options)


def groups_of(model: nn.Module, **of_experts: Any) -> list[dict[str, Any]]:
    named = [*model.named_parameters()]
    dense, experts = ([entry for entry in named if ("experts" in entry[0]) is of] for of in (False, True))
    return [{"params": dense}, {"params": experts, "grad_divisor": 4, **of_experts}]


def train(rank: int, model: Layers, opt: Any, mesh: dist.DeviceMesh) -> None:
    for step in range(2 * len(ALLOWED)):
        replica = mesh.get_local_rank("edp")
        routes = [expert for part in (0, 1) for expert in route(2 * replica + part, step)]
        loss_of(model, rank, step, routes).backward()
        opt.step()
        opt.zero_grad()


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    with zero_optim.gather_parameters(model):
        named = model.named_parameters()
        return {name: (p.to_local() if hasattr(p, "to_local") else p).detach().cpu().clone() for name, p in named}


# -- trainings ---------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "by default": {},
    "none ahead": {"prefetch": 0},
    "kept until backward": {"reshard_after_forward": False},
    "kept by nodes": {"reshard_after_forward": 2},
    "off the device": {"param_offload": "cpu"},
    "on a disk": {"param_offload": ON_DISK},
}


def train_each(rank: int, world_size: int, stacked: bool) -> None:
    """With the bits of stage 2, whatever is gathered when, and where a unit has gradients of two divisors."""
    mesh = expert_cases.make_mesh()
    wanted: dict[str, Tensor] = {}
    for name, options in {"stage 2": None, **OPTIONS, "divided apart, stage 2": None, "divided apart": {}}.items():
        model = first_counts(mesh, stacked=stacked) if options is None else sharded(mesh, stacked=stacked, **options)
        groups = groups_of(model, mesh=mesh["edp"])
        if "apart" in name:
            first, *others = groups[1]["params"]
            groups[1:] = [{**groups[1], "params": [first], "grad_divisor": 2}, {**groups[1], "params": others}]
        wanted = wanted if options is not None else {}
        opt = zero_optim.ShardedAdamW(groups, **HYPER)
        train(rank, model, opt, mesh)
        found = whole_parameters(model)
        wanted = wanted or found
        assert [key for key in wanted if not torch.equal(wanted[key], found[key])] == [], name
        opt.close()


@pytest.mark.parametrize("stacked", [True, False], ids=["packed", "modules"])
def test_a_rank_whose_experts_get_no_tokens_takes_part(stacked: bool) -> None:
    run_ranks(4, train_each, stacked, timeout=120)


# -- experts that one rank has -----------------------------------------------------------------------------------------


def one_rank_each(rank: int, world_size: int) -> None:
    """They are whole all the time, and neither gathered nor freed."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
    model = sharded(mesh, stacked=True)
    (of,) = sharded_model_of(model.parameters())
    assert of.sharded and [len(unit.split) for unit in of.units] == [0, 1, 0, 1, 0]
    opt = zero_optim.ShardedAdamW(groups_of(model), lr=1e-2)
    up = model[0].experts.up
    for step in (1, 1, 2):
        before = dict(opt.stats()["collectives"].get("all_gather", {}))
        loss_of(model, rank, step, [*route(0, step), *route(1, step)]).backward()
        opt.step()
        opt.zero_grad()
    assert opt.stats()["collectives"]["all_gather"]["calls"] - before["calls"] == 3, "the first layer twice"
    with zero_optim.gather_parameters(model, writeback=True), torch.no_grad():
        up.to_local().fill_(rank)
    whole = zero_optim.full_model_state_dict(model, rank=None)["0.experts.up"]
    assert (up.to_local() == rank).all() and (whole[:2] == 0).all() and (whole[2:] == 1).all()
    planned, held = zero_optim.memory.plan_of(opt).memory, opt.stats()["memory"]
    assert [held[kind] for kind in ("parameters", "exp_avg")] == [planned[kind] for kind in ("parameters", "exp_avg")]
    opt.close()


def test_experts_of_one_rank_are_not_sharded() -> None:
    run_ranks(2, one_rank_each)


# -- reading and writing -----------------------------------------------------------------------------------------------


def read_and_write(rank: int, world_size: int, folder: str) -> None:
    mesh = expert_cases.make_mesh()
    model = sharded(mesh, stacked=False)
    up = "0.experts.0.up.weight"
    of_one_process = Layers(stacked=False).get_parameter(f"0.experts.{rank % 2 * 2}.up.weight")
    assert torch.equal(whole_parameters(model)[up], of_one_process)
    with zero_optim.gather_parameters(model[0].experts, writeback=True), torch.no_grad():
        model.get_parameter(up).fill_(rank)
    assert (whole_parameters(model)[up] == rank % 2).all()  # of the first rank that has it
    for call in (
        lambda: zero_optim.full_model_state_dict(model),
        lambda: [*zero_optim.iter_full_parameters(model)],
        lambda: zero_optim.checkpoint.save(folder, model),
        lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
    ):
        kind, text = error_of(call)
        assert kind == "ParameterError" and "is an expert, of which other ranks have others" in text, text
    model = sharded(mesh, stacked=True)
    wholes = zero_optim.full_model_state_dict(model, rank=None)
    for name, parameter in Layers(stacked=True).named_parameters():
        assert torch.equal(wholes[name], parameter), name
    zero_optim.checkpoint.save(folder, model, step=1)
    other = sharded(mesh, stacked=True)
    with zero_optim.gather_parameters(other, writeback=True):
        nn.init.zeros_(other[0].experts.up)
    zero_optim.checkpoint.load(folder, other)
    assert all(torch.equal(whole, wholes[name]) for name, whole in zero_optim.iter_full_parameters(other))


def test_parameters_are_read_and_written(tmp_path: Any) -> None:
    run_ranks(4, read_and_write, str(tmp_path))


# -- errors ------------------------------------------------------------------------------------------------------------


def tied(mesh: dist.DeviceMesh) -> Layers:
    model = spread(mesh, stacked=True)
    model[1].experts.up = model[0].experts.up
    return model


def marked(mesh: dist.DeviceMesh) -> Layers:
    model = spread(mesh, stacked=False)
    model[0].experts[0].up.weight.allreduce = False
    return model


def shard(mesh: dist.DeviceMesh, experts: Any = None, model: Any = None, **options: Any) -> Any:
    experts = {"Stacked": mesh["edp"]} if experts is None else experts
    return zero_optim.shard_module(model or spread(mesh, stacked=True), (Moe,), experts=experts, **options)


def on_grid() -> Any:
    of_all = {nn.ModuleList: dist.group.WORLD}
    return zero_optim.shard_module(Layers(False), (Moe,), mesh=grid_cases.make_mesh(2, 2), experts=of_all)


def train_with(model: nn.Module, groups: Any = None, **of_experts: Any) -> Any:
    return zero_optim.ShardedAdamW(groups or groups_of(model, **of_experts), lr=1e-2)


BAD: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "a mesh alone": (lambda m: shard(m, m["edp"], spread(m, stacked=False)), "TypeError", "experts is a DeviceMesh: "),
    "two dimensions": (lambda m: shard(m, {"Stacked": m}), "ValueError", "experts['Stacked'] is a mesh of 2 dimension"),
    "the other one": (lambda m: shard(m, {"Stacked": m["ep"]}), "ParameterError", "'0.experts.up' is a DTensor over "),
    "no module": (lambda m: shard(m, {"Stacked": m["edp"], "E": m["edp"]}), "ParameterError", "is a unit of ['E']"),
    "odd": (lambda m: shard(m, {"Moe": [dist.group.WORLD, m["edp"]][m.get_rank() % 2]}), "RankMismatchError", "'Moe'"),
    "tied": (lambda m: shard(m, model=tied(m)), "ParameterError", "'0.experts.up' is used by several"),
    "marked": (lambda m: shard(m, {}, marked(m)), "ParameterError", "'0.experts.0.up.weight' has allreduce = False"),
    "nodes": (
        lambda m: shard(m, reshard_after_forward=4),
        "ValueError",
        "of 2 ranks that have the same experts, got 4",
    ),
    "no group": (
        lambda m: train_with(of := shard(m), of.named_parameters()),
        "ValueError",
        "'0.experts.up' is sharded ",
    ),
    "another's": (lambda m: train_with(shard(m), mesh=m["ep"]), "ValueError", "'0.experts.up' is sharded over ranks"),
    "not the model's": (
        lambda m: train_with(shard(m, {"0.experts": m["edp"]}, spread(m, stacked=False)), mesh=m["edp"]),
        "ValueError",
        "'1.experts.0.up.weight' is sharded over ranks [0, 1, 2, 3] by shard_module, and parameter group 1, which has",
    ),
    "everybody's": (
        lambda m: train_with(on_grid(), process_group=dist.group.WORLD),
        "ValueError",
        "all ranks have the same, so they are no experts: leave their modules out of experts=",
    ),
}


def errors(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    mesh = expert_cases.make_mesh()
    found = {name: error_of(lambda call=call: call(mesh)) for name, (call, _, _) in BAD.items()}
    model = sharded(mesh, stacked=True)  # the ranks are in step still
    opt = zero_optim.ShardedAdamW(groups_of(model, mesh=mesh["edp"]), **HYPER)
    train(rank, model, opt, mesh)
    opt.close()
    return found


def test_errors_are_raised_on_every_rank() -> None:
    for found in run_ranks(4, errors):
        for name, (_, kind, words) in BAD.items():
            assert found[name][0] == kind and words in found[name][1], (name, found[name])
