"""Plans of experts over some of the ranks: in closed form, and to the byte what ranks then hold and send."""

from __future__ import annotations

import json
from typing import Any

import expert_cases
import pytest
import torch
from cells import pairs
from expert_cases import TOKENS, WIDTH, Moe
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero_optim import ShardedAdamW, memory, shard_module
from zero_optim.cli import main
from zero_optim.memory import Job, of_module, plan


class Layers(nn.Sequential):
    def __init__(self, stacked: bool) -> None:
        super().__init__(*(Moe(stacked=stacked) for _ in range(3)))

    def forward(self, x: torch.Tensor, route: list[int]) -> torch.Tensor:
        for layer in self:
            x = layer(x, route)
        return x


def accounts(rank: int, world_size: int, stage: int, stacked: bool, parts: int, options: dict[str, Any]) -> None:
    """What is planned of the whole model, and of this optimizer, is what this rank holds and sends."""
    mesh = init_device_mesh("cpu", (world_size // parts, parts), mesh_dim_names=("edp", "ep"))
    model, kinds = Layers(stacked).bfloat16(), {"Stacked" if stacked else nn.ModuleList: mesh["edp"]}
    for layer in model:
        expert_cases.spread(layer, mesh)
    if stage == 3:
        shard_module(model, (Moe,), experts=kinds, **options)
    named = [*model.named_parameters()]
    dense, experts = ([entry for entry in named if ("experts" in entry[0]) is of] for of in (False, True))
    of_experts = {"params": experts, "mesh": mesh["edp"], "grad_divisor": world_size}
    opt = ShardedAdamW([{"params": dense}, of_experts], stage=stage)

    def step() -> dict[str, dict[str, int]]:
        x = torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)
        model(x, [token % expert_cases.EXPERTS for token in range(parts * TOKENS)]).sum().backward()
        opt.step()
        opt.zero_grad()
        return opt.stats()["collectives"]

    with memory.track() as tracker:
        step()
        before, after, none = step(), step(), {"bytes": 0, "calls": 0}
        of_opt = memory.plan_of(opt)
    with torch.device("meta"):
        whole = of_module(Layers(stacked).bfloat16(), (Moe,), experts=kinds if stacked else ())  # found by their name
    job = Job(world=world_size, expert_parallel=parts, stage=stage, rank=rank, device="cpu", host_waits=True, **options)
    for made in (of_opt, plan(whole, job)):
        measured = dict(tracker.peak)
        if type(options.get("reshard_after_forward")) is int:  # most is there in backward, where nothing is measured
            assert measured.pop("unsharded") <= made.memory["unsharded"]
        found = {kind: nbytes for kind, nbytes in measured.items() if nbytes != made.memory.get(kind)}
        assert not found, (found, made.memory)
        moved = {kind: {key: of[key] - before.get(kind, none)[key] for key in none} for kind, of in after.items()}
        assert {kind: moved[kind]["bytes"] for kind in made.traffic} == made.traffic
        assert {kind: moved[kind]["calls"] for kind in made.calls} == made.calls
    opt.close()


@pytest.mark.parametrize(("stage", "stacked", "parts"), pairs((0, 1, 2, 3), (True, False), (2, 4)))
def test_a_plan_of_experts_is_what_a_rank_holds_and_sends(stage: int, stacked: bool, parts: int) -> None:
    run_ranks(4, accounts, stage, stacked, parts, {})


@pytest.mark.parametrize(
    "options",
    [{"prefetch": 0}, {"prefetch": 2}, {"reshard_after_forward": False}, {"reshard_after_forward": 2}],
)
def test_options_of_stage_3_are_planned(options: dict[str, Any]) -> None:
    run_ranks(4, accounts, 3, True, 2, options)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_known_mixture_of_experts(capsys: Any, stage: int) -> None:
    """Each part of the experts is on 8 of 64 ranks, and everything else on all: but for padding, in closed form."""
    flags = ["--model", "mixtral-8x7b", "--world", "64", "--ep", "8", "--stage", str(stage)]
    assert main(["plan", *flags, "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    experts = 32 * 8 * 3 * 4096 * 14336
    dense, held, sent = made["parameters"] - experts, made["bytes_per_rank"], made["collectives"]
    own, sharded = dense + experts / 8, dense / 64 + experts / 64
    assert made["expert_parallel"] == 8
    assert held["parameters"] == pytest.approx(2 * (own if stage < 3 else sharded), rel=1e-4)
    assert held["gradients"] == pytest.approx(2 * (own if stage < 2 else sharded), rel=1e-4)
    assert held["exp_avg"] == pytest.approx(4 * (own if stage < 1 else sharded), rel=1e-4)
    assert sum(sent.values()) == pytest.approx((3 if stage == 3 else 2 if stage else 1) * 2 * own, rel=0.03)
    assert main(["plan", *flags]) == 0
    assert "64 ranks, experts over 8" in capsys.readouterr().out
