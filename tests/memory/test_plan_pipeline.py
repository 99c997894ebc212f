"""Plans of a pipeline: how layers are divided, what 1F1B keeps, and what ranks then hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from harness import run_ranks
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from zero_optim import ShardedAdamW, memory, shard_module
from zero_optim.cli import main
from zero_optim.memory import KNOWN, Batch, Job, activation_bytes, of_decoder, of_module, plan
from zero_optim.memory.models import of_stage

GPT2, LLAMA = KNOWN["gpt2"], KNOWN["llama-2-7b"]
BATCH = Batch(2, 512)
ONCE = 2 * 2 * 512  # bytes of a number for each token of the batch, in bf16


def bf16(decoder: memory.Decoder) -> memory.ModelShapes:
    return of_decoder(decoder, torch.bfloat16)


# -- what a stage has --------------------------------------------------------------------------------------------------


def test_layers_are_divided_and_what_is_outside_goes_to_the_ends():
    block, whole = sum(GPT2.block), bf16(GPT2)
    parts = [of_stage(whole, 5, stage) for stage in range(5)]
    assert [part.width.layers for part in parts] == [3, 3, 2, 2, 2]
    embedding, positions = GPT2.before
    outside = [part.numel - part.width.layers * block for part in parts]
    assert outside == [embedding + positions, 0, 0, 0, embedding + sum(GPT2.after)]  # the head is the embedding
    assert [len(part.units) for part in parts] == [4, 4, 3, 3, 3]
    untied = of_stage(bf16(LLAMA), 4, 3)
    assert untied.numel == 8 * sum(LLAMA.block) + sum(LLAMA.after)


def test_parts_of_a_module_are_those_of_its_list():
    whole = of_module(Whole(), (Block,))
    first, last = (of_stage(whole, 2, stage) for stage in range(2))
    square, table = WIDTH * WIDTH, WORDS * WIDTH
    assert whole.numel == 5 * square + table + WIDTH
    assert (first.numel, last.numel) == (3 * square + table, 2 * square + WIDTH + table)
    assert [[last.parameters[index].numel for index in unit] for unit in last.units] == [
        [table, WIDTH],
        [square],
        [square],
    ]


# -- closed forms ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_that_of_the_fullest_stage(stage):
    """Of llama-2-7b the last of 4 has 8 layers, norm and head: the norm more than the first."""
    made = plan(bf16(LLAMA), Job(world=64, pipeline=4, stage=stage))
    psi, shared = 8 * sum(LLAMA.block) + sum(LLAMA.after), {0: 0, 1: 10, 2: 12, 3: 14}[stage]
    assert made.pipeline_stage == 3 and made.model.numel == LLAMA.numel
    assert made.model_state == pytest.approx(psi * (14 - shared + shared / 16), rel=1e-5)
    if stage:
        assert made.memory["exp_avg"] == pytest.approx(4 * psi / 16, rel=1e-5)
    # All micro-batches add up: where no gradient is kept in full, each is local until the step.
    assert made.memory["local_gradients"] == (2 * psi if stage >= 2 else 2 * LLAMA.after[1])


@pytest.mark.parametrize(("accumulate", "in_flight"), [(1, 0), (3, 3), (4, 4), (16, 4)])
def test_the_first_stage_keeps_a_micro_batch_for_each_stage(accumulate, in_flight):
    job = Job(world=16, pipeline=4, accumulate=accumulate, batch=BATCH)
    layer = ONCE * LLAMA.width.hidden * 17  # 34 s b h
    made = plan(bf16(LLAMA), job)
    if in_flight:
        assert (made.pipeline_stage, made.memory["activations"]) == (0, in_flight * 8 * layer)
    else:  # of one micro-batch the last keeps the head's beside its layers'
        head = ONCE * (2 * LLAMA.width.hidden + 2 * LLAMA.width.vocabulary)
        assert (made.pipeline_stage, made.memory["activations"]) == (3, 8 * layer + head)


def test_a_pipeline_keeps_as_many_activations_as_one_stage_of_all_layers():
    """The first of p stages has 1/p of the layers, and p micro-batches: Korthikanti et al., section 4.2.3."""
    whole = activation_bytes(LLAMA.width, BATCH, 2, head=False)
    made = plan(bf16(LLAMA), Job(world=8, pipeline=8, accumulate=8, batch=BATCH))
    assert (made.pipeline_stage, made.memory["activations"]) == (0, whole)
    again = Batch(2, 512, checkpointing=True)
    kept = 8 * 4 * ONCE * LLAMA.width.hidden + ONCE * LLAMA.width.hidden * 17  # inputs of layers; one that is computed
    assert plan(bf16(LLAMA), Job(world=8, pipeline=8, accumulate=8, batch=again)).memory["activations"] == kept


# -- what ranks hold ---------------------------------------------------------------------------------------------------

WIDTH, WORDS, MICRO = 64, 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ self.weight


class Whole(nn.Module):
    """An embedding, five blocks, a scale of each channel, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.scale = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight


class Stage(nn.Module):
    """The first three blocks, or the last two, and what is outside of them on that side."""

    def __init__(self, number: int) -> None:
        super().__init__()
        whole = Whole()
        if number == 0:
            self.before, self.blocks, self.after = whole.embedding, whole.blocks[:3], nn.Identity()
        else:
            self.before, self.blocks = nn.Identity(), whole.blocks[3:]
            self.after = nn.Sequential(whole.scale, whole.head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.after(x)
        return out


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.view(-1, WORDS), target.view(-1))


def accounts(rank: int, world_size: int, stage: int) -> tuple[int, dict[str, int], dict[str, int], int]:
    """This rank's stage of the pipeline; bytes by kind, of a step by collective, and of all parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    number = mesh.get_local_rank("pp")
    module = Stage(number)
    if stage == 3:
        shard_module(module, (Block,), mesh=mesh["dp"])
    numel = sum(p.numel() for p in module.parameters())
    opt = ShardedAdamW(module.named_parameters(), stage=stage, mesh=mesh["dp"], pipeline=mesh["pp"])
    running = pipelining.PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = pipelining.Schedule1F1B(running, MICRO, loss_fn=loss_of)
    words = torch.arange(8 * 4).view(8, 4) % WORDS

    def step() -> dict[str, int]:
        with opt.no_sync():
            schedule.step(words) if number == 0 else schedule.step(target=words)
        opt.step()
        held.update(opt.stats()["memory"])
        opt.zero_grad()
        return {kind: of["bytes"] for kind, of in opt.stats()["collectives"].items()}

    held: dict[str, int] = {}
    step()
    before, after = step(), step()
    opt.close()
    return number, held, {kind: nbytes - before.get(kind, 0) for kind, nbytes in after.items()}, numel


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_plan_of_a_pipeline_is_what_its_fullest_stage_holds(stage):
    """To the byte, by kind and by collective. The other stage has fewer parameters."""
    whole = of_module(Whole(), (Block,))
    found = run_ranks(4, accounts, stage)
    fullest = max(numel for _, _, _, numel in found)
    for rank, (number, held, sent, numel) in enumerate(found):
        made = plan(whole, Job(world=4, pipeline=2, stage=stage, rank=rank % 2, accumulate=MICRO))
        assert made.pipeline_stage == 0 and (numel == fullest) == (number == 0)
        if number == 0:
            kinds = {"parameters", "exp_avg", "exp_avg_sq", "gradients"}
            assert {kind: held[kind] for kind in kinds} == {kind: made.memory[kind] for kind in kinds}
            assert {kind: sent[kind] for kind in made.traffic} == made.traffic


# -- the command -------------------------------------------------------------------------------------------------------


def said(capsys: Any, *flags: str) -> str:
    assert main(["plan", *flags]) == 0
    return str(capsys.readouterr().out)


def test_the_command_names_the_planned_stage(capsys):
    flags = ["--params", "1e9", "--world", "64", "--tp", "2", "--pp", "4", "--replicate", "2", "--stage", "2"]
    plain = said(capsys, *flags)
    assert "64 ranks, 2 tensor-parallel, 4 stages of a pipeline in 2 replicas" in plain
    rows = {line[2:28].strip(): line[28:].split() for line in plain.splitlines() if line.startswith("  ")}
    assert rows["stage of the pipeline"] == ["1", "of", "4"]
    (made,) = json.loads(said(capsys, *flags, "--seq", "1024", "--batch", "1", "--json"))
    assert (made["pipeline"], made["pipeline_stage"]) == (4, 0)


def test_the_command_gives_the_reason_why_stage_2_takes_more_than_stage_1(capsys):
    flags = ["--params", "8B", "--pp", "4"]
    of_two = json.loads(said(capsys, *flags, "--world", "8", "--stage", "1,2", "--json"))
    assert of_two[0]["total_bytes"] < of_two[1]["total_bytes"]
    why = "Stage 2 takes more than stage 1: gradients of micro-batches add up whole"
    assert why in said(capsys, *flags, "--world", "8")
    assert why not in said(capsys, *flags, "--world", "256")  # shards are so small that it takes less
    assert why not in said(capsys, "--params", "8B", "--world", "2")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "gpt2", "--world", "6", "--pp", "4"], "--pp must divide the 6 ranks"),
        (["--model", "gpt2", "--world", "8", "--tp", "2", "--pp", "8"], "--pp must divide the 4 ranks"),
        (["--model", "gpt2", "--world", "16", "--pp", "16"], "--pp needs a layer for each of 16 stages"),
        (["--model", "gpt2", "--world", "8", "--pp", "4", "--replicate", "2"], "--replicate must divide the 2 ranks"),
        (["--model", "gpt2", "--world", "8", "--pp", "0"], "got 0"),
    ],
)
def test_wrong_usage_is_told(capsys, flags, says):
    assert main(["plan", *flags]) == 2
    assert says in capsys.readouterr().err
