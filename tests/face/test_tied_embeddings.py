"""A pipeline whose last stage has a second copy of the first stage's embedding, against one process that has one."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import run_ranks
from pipeline_cases import WIDTH, Block, make_blocks
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from zero_optim import ParameterError, ShardedAdamW, gather_parameters, shard_module

VOCABULARY, ROWS, LENGTH, MICRO = 11, 4, 5, 2
STEPS, MAX_NORM, LR = 3, 0.3, 1e-2


def weights() -> Tensor:
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1)) * 0.3


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block = nn.Parameter(weights()), make_blocks(2)[0]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.block(F.embedding(tokens, self.embedding))


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.embedding = make_blocks(2)[1], nn.Parameter(weights())
        self.embedding.shared = True

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.block(x), self.embedding)


def values(module: nn.Module, stage: int) -> dict[str, Tensor]:
    with gather_parameters(module) if stage == 3 else contextlib.nullcontext():
        return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def train(rank: int, world_size: int, stage: int, by_option: bool) -> tuple[dict[str, Tensor], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, number = mesh.get_group("pp"), mesh.get_local_rank("pp")
    module = (First, Last)[number]()
    if stage == 3:
        shard_module(module, (Block,), mesh=mesh["dp"])
    options = {"max_grad_norm": MAX_NORM} if by_option else {}
    given = {"mesh": mesh["dp"], "pipeline": mesh["pp"], **options}
    opt = ShardedAdamW(module.named_parameters(), lr=LR, stage=stage, **given)
    schedule = pipelining.Schedule1F1B(
        pipelining.PipelineStage(module, number, 2, torch.device("cpu"), group=group), MICRO, loss_fn=loss_of
    )
    norms = []
    for step in range(STEPS):
        x, y = batch(step, mesh.get_local_rank("dp"))
        with opt.no_sync():
            schedule.step(x) if number == 0 else schedule.step(target=y)
        dist.all_reduce(module.embedding.grad, group=group)
        if not by_option:
            norms.append(opt.clip_grad_norm_(MAX_NORM).item())
        opt.step()
        opt.zero_grad()
    return values(module, stage), norms


def one_process() -> tuple[dict[str, Tensor], list[float]]:
    first, last = First(), Last()
    last.embedding = first.embedding
    opt = torch.optim.AdamW([*first.parameters(), *last.block.parameters()], lr=LR)
    norms = []
    for step in range(STEPS):
        for replica in range(2):
            (loss_of(last(first(batch(step, replica)[0])), batch(step, replica)[1]) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_([*first.parameters(), *last.block.parameters()], MAX_NORM).item())
        opt.step()
        opt.zero_grad()
    return {**dict(first.named_parameters()), **{f"last.{n}": p for n, p in last.named_parameters()}}, norms


@pytest.mark.parametrize(("stage", "by_option"), [(0, False), (1, True), (2, False), (3, False), (3, True)])
def test_both_copies_stay_what_one_process_has(stage: int, by_option: bool) -> None:
    expected, norms = one_process()
    results = run_ranks(4, train, stage, by_option)
    assert min(norms) > MAX_NORM  # each step is clipped
    for rank, (found, own_norms) in enumerate(results):
        assert own_norms == pytest.approx([] if by_option else norms, rel=1e-5)
        for name, value in found.items():
            wanted = expected[name if rank < 2 else f"last.{name}"]
            torch.testing.assert_close(value, wanted.detach(), rtol=2e-5, atol=2e-6)
        assert torch.equal(found["embedding"], results[0][0]["embedding"])


def on_one_stage(rank: int, world_size: int) -> tuple[list[bool], list[str]]:
    """What is not finite in a second copy alone skips the step of all; second copies without a first one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number, given = mesh.get_local_rank("pp"), {"mesh": mesh["dp"], "pipeline": mesh["pp"]}
    module = (First, Last)[number]()
    opt = ShardedAdamW(module.named_parameters(), lr=LR, **given)
    same = []
    for step in range(2):
        before = values(module, 2)
        with opt.no_sync():
            sum(parameter.sum() for parameter in module.parameters()).backward()
        if step == 0 and rank == 3:
            module.embedding.grad[0, 0] = math.inf
        opt.step()
        opt.zero_grad()
        same.append(all(torch.equal(before[name], now) for name, now in values(module, 2).items()))
    opt.close()
    told = []
    module.embedding.shared = True  # on both stages
    for options in (given, {"mesh": mesh["dp"]}, {"mesh": mesh["dp"], "pipeline": mesh["dp"]}):
        with pytest.raises(ParameterError) as error:
            ShardedAdamW(module.named_parameters(), **options)
        told.append(str(error.value))
    return same, told


def test_a_second_copy_skips_steps_and_needs_a_first_one() -> None:
    for same, (both, no_pipeline, one_stage) in run_ranks(4, on_one_stage):
        assert same == [True, False]
        assert "'embedding' of stage 0, (11, 16) torch.float32, has shared = True" in both
        assert "Mark the copy of the later stage alone" in both
        assert "Give the optimizer pipeline=world_mesh['pp'], or unmark it" in no_pipeline
        assert "'embedding' of stage 0" in one_stage  # of ranks that have the same stage
