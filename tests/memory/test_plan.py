"""What a plan says, from shapes alone: the table of the ZeRO paper, published models, padding, stores, what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zero_optim_cli.choices as choices
from cells import pairs, slow
from torch import nn
from zero_optim import memory
from zero_optim.cli import main
from zero_optim.memory import KNOWN, Batch, Job, activation_bytes, fit, gpt_of, of_decoder, of_module, plan
from zero_optim.memory import command as command_module
from zero_optim.memory.decoders import Width
from zero_optim.memory.fit import cheapest_change
from zero_optim.memory.plan import ON_THE_HOST
from zero_optim.memory.shapes import ModelShapes, ParameterShape, with_lora
from zero_optim.rules.adamw import AdamW
from zero_optim.rules.codec import AVERAGES, MASTERS, STATE_DTYPES, Split, StochasticBf16
from zero_optim.rules.muon import Muon
from zero_optim.rules.options import Decays
from zero_optim.stores.offload import FRAMES, HOST_BUFFERS, Offload, Tier
from zero_optim.train.config import DTYPES

GB = 10**9
RANKS = (1, 4, 16, 64, 256, 1024)
# Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), table 1, in GB.
PAPER = {
    ("7.5", 1): "120 52.5 35.6 31.4 30.4 30.1",
    ("7.5", 2): "120 41.3 21.6 16.6 15.4 15.1",
    ("7.5", 3): "120 30 7.5 1.88 0.47 0.12",
    ("128", 1): "2048 896 608 536 518 513",
    ("128", 2): "2048 704 368 284 263 257",
    ("128", 3): "2048 512 128 32 8 2",
    ("1000", 1): "16000 7000 4750 4187 4046 4011",
    ("1000", 2): "16000 5500 2875 2218 2054 2013",
    ("1000", 3): "16000 4000 1000 250 62.5 15.6",
}


EVERY_SIZE = fit.MOST_PARAMETERS


@pytest.fixture(autouse=True)
def models_of_few_sizes(monkeypatch):
    """The command looks for the largest model that fits among small ones, of which a plan takes a millisecond."""
    monkeypatch.setattr(fit, "MOST_PARAMETERS", 2 * 10**6)


def bf16(parameters: float) -> memory.ModelShapes:
    return of_decoder(gpt_of(int(parameters)), torch.bfloat16)


class Block(nn.Linear):
    """A unit."""


class Tiny(nn.Module):
    """Two blocks of 32 x 32 and a bias, a frozen head of 32 x 10, and a buffer of 12 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 10, bias=False).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))


# The largest models take the longest: of them one stage for all.
@pytest.mark.parametrize(
    ("billions", "stage"),
    [pytest.param(*key, marks=slow if key in (("1000", 1), ("1000", 2)) else ()) for key in PAPER],
)
def test_model_state_is_that_of_the_zero_paper(billions, stage):
    """To its last printed digit. The paper rounds some figures, and cuts others."""
    model = bf16(float(billions) * GB)
    for world, printed in zip(RANKS, PAPER[billions, stage].split(), strict=True):
        state = plan(model, Job(world=world, stage=stage)).model_state
        last_digit = 10.0 ** -len(printed.partition(".")[2])
        assert abs(state / GB - float(printed)) < last_digit, (world, printed)
        sharded = {1: 12, 2: 14, 3: 16}[stage]
        exact = model.numel * (16 - sharded + sharded / world)
        assert state == pytest.approx(exact, rel=1e-5)


def test_gpt_2_of_the_paper_takes_24_gb():
    assert plan(bf16(1.5 * GB), Job(stage=0)).model_state == 24 * GB


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
    ],
)
def test_known_models_have_their_published_parameters(name, parameters):
    assert KNOWN[name].numel == parameters


@pytest.mark.parametrize("parameters", [10**6, 124 * 10**6, 7_500_000_001, 175 * GB, 10**12])
def test_an_invented_gpt_has_exactly_the_parameters(parameters):
    decoder = gpt_of(parameters)
    assert decoder.numel == parameters
    assert decoder.layers == max(1, round((parameters / 196_608) ** (1 / 3)))
    if parameters > 10**9:
        assert 120 < decoder.width.hidden / decoder.layers < 136
        assert 50257 <= decoder.before[0] / decoder.width.hidden < 50257 + 200 * decoder.layers


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("parameters", [7.5 * GB, 70 * GB, pytest.param(1000 * GB, marks=slow)])
def test_padding_is_under_one_percent_of_16384_ranks(stage, parameters):
    model = bf16(parameters)
    for rank in (None, 0):
        made = plan(model, Job(world=16384, stage=stage, rank=rank))
        assert made.memory["padding"] < 0.01 * made.total
    last = plan(model, Job(world=16384, stage=stage, rank=16383))
    assert last.total == made.total and last.memory["padding"] > made.memory["padding"]


def test_a_small_model_by_hand():
    """Rows of 128, shards of 2 ranks: a block of 1024 + 32 elements takes 9 rows, so 10 of two ranks."""
    model = of_module(Tiny(), (Block,))
    made = plan(model, Job(world=2, stage=3, rank=0))
    used = 2 * 640  # of rank 0, of both blocks
    head = 320  # frozen: 3 rows, 4 of two ranks, 256 of them on rank 0
    assert made.memory["parameters"] == 4 * (used + 256) + 12
    assert made.memory["gradients"] == made.memory["exp_avg"] == made.memory["exp_avg_sq"] == 4 * used
    assert made.memory["master"] == 0  # in fp32 a parameter is its own
    assert made.memory["padding"] == 0
    other = plan(model, Job(world=2, stage=3, rank=1))
    assert other.memory["padding"] == 4 * (4 * 2 * (640 - 416)) + 4 * (256 - (head - 256))
    assert made.memory["communication"] == 4 * 2 * 1280  # the two largest
    assert made.memory["unsharded"] == 4 * 3 * 1280 - 4 * 768  # the head, and two blocks
    assert made.memory["local_gradients"] == 4 * 1280
    assert made.traffic == {"reduce_scatter": 4 * 2 * 1280, "all_gather": 4 * (512 + 2 * 2 * 1280)}
    assert made.communicated == (4 * 2 * 1280 + 4 * (512 + 4 * 1280)) // 2


def test_below_stage_3_what_is_frozen_is_whole_and_has_no_state():
    made = plan(of_module(Tiny()), Job(world=4, stage=1))
    assert made.memory["parameters"] == 4 * (2 * 1056 + 320) + 12
    assert made.memory["exp_avg"] == 4 * 2 * 1056 // 4


def test_gradients_that_are_reduced_in_fp32():
    model = bf16(10**8)
    two, four = (plan(model, Job(world=4, grad_reduce_dtype=dtype)) for dtype in (None, torch.float32))
    assert four.memory["gradients"] == 2 * two.memory["gradients"] == 10**8
    assert four.traffic["reduce_scatter"] == pytest.approx(2 * two.traffic["reduce_scatter"], rel=0.01)
    assert plan(model, Job(world=4, stage=0, grad_reduce_dtype=torch.float32)).memory["gradients"] == 2 * 10**8


def test_units_that_are_kept_and_gathered_ahead():
    model = of_module(Tiny(), (Block,))

    def unsharded(**more):
        made = plan(model, Job(world=4, stage=3, **more))
        return made.memory["unsharded"] // 4 - 512, made.traffic["all_gather"] // 4 - 512

    block = 1536  # 9 rows, of 4 ranks 12
    assert unsharded(prefetch=0) == (block, 4 * block)
    assert unsharded(reshard_after_forward=False, prefetch=0) == (2 * block, 2 * block)
    assert unsharded(reshard_after_forward=2, prefetch=0) == (block + block, 2 * block)
    assert unsharded(accumulate=3)[1] == 3 * 4 * block + 2 * 512


def test_the_first_step_holds_every_gradient_below_stage_3():
    model = bf16(10**8)
    for stage in (0, 1, 2):
        made = plan(model, Job(world=4, stage=stage))
        assert made.first_step + made.memory["local_gradients"] == pytest.approx(2 * 10**8, rel=1e-3)
    assert plan(model, Job(world=4, stage=3)).first_step == 0
    assert plan(model, Job(world=1)).first_step == 0
    accumulating = plan(model, Job(world=4, stage=2, accumulate=2))
    assert (accumulating.first_step, accumulating.most) == (0, plan(model, Job(world=4, stage=2)).most)


# -- stores --------------------------------------------------------------------------------------------------------


def test_state_in_other_memory():
    """Bytes are the same everywhere; on the device there are places for two pages instead of the state."""
    model, job = bf16(10**8), Job(world=4, stage=2)
    here = plan(model, job)
    state = sum(here.memory[kind] for kind in ("master", "exp_avg", "exp_avg_sq"))
    for tier in (Tier.PAGED, Tier.CPU, Tier.NVME):
        away = plan(model, Job(world=4, stage=2, offload=Offload(tier)))
        assert away.memory["master"] == away.memory["exp_avg"] == 0
        assert away.memory["padding"] < here.memory["padding"]
        largest = away.memory["pages"] // FRAMES
        freed = here.total - away.total
        assert freed == pytest.approx(state - away.memory["pages"], rel=1e-3)
        if tier is Tier.PAGED:
            assert away.host == freed + away.memory["pages"] and away.disk == 0
        elif tier is Tier.CPU:
            assert largest == 0 and away.host == pytest.approx(state + 10**8, rel=1e-3)  # gradients and parameters, too
        else:
            assert away.disk == freed + away.memory["pages"] and away.host == HOST_BUFFERS * largest


def test_what_speculation_and_offloaded_parameters_take_on_the_host():
    model, state = bf16(10**8), 3 * 10**8
    plain, speculating = (
        plan(model, Job(world=4, offload=Offload(Tier.CPU, 0, speculate=speculate))) for speculate in (False, True)
    )
    assert speculating.host - plain.host == pytest.approx(state, rel=1e-3)
    alone = plan(model, Job(world=1, offload=Offload(Tier.CPU, 0, speculate=True)))
    assert alone.host == pytest.approx(16 * 10**8, rel=1e-3)
    here, away = (plan(model, Job(world=4, stage=3, param_offload=offload)) for offload in (False, True))
    assert away.memory["parameters"] == 0 and here.memory["parameters"] == 2 * 10**8 // 4
    assert away.host == pytest.approx(here.memory["parameters"], rel=1e-3)  # with the padding of shards


def test_a_budget_keeps_pages_on_the_device():
    model = bf16(10**8)
    none, some, all_ = (plan(model, Job(offload=Offload(Tier.PAGED, n))) for n in (0, 6 * 10**8, 2 * 10**9))
    state = 12 * 10**8
    assert none.host == pytest.approx(state, rel=1e-3)
    assert 5 * 10**8 < none.host - some.host <= 6 * 10**8
    assert all_.host == 0 and all_.memory["pages"] == pytest.approx(state, rel=1e-3)
    room = none.most + 7 * 10**8
    automatic = plan(model, Job(offload=Offload(Tier.PAGED, None), device_memory=room))
    assert automatic.most <= room and automatic.host < some.host


# -- activations ---------------------------------------------------------------------------------------------------


def test_activations_are_those_of_the_published_formula():
    """A layer of GPT-3 keeps sbh(34 + 80) bytes, and 34 without the matrices of attention."""
    gpt3, once = Width(96, 12288, 96, 51200), 2048 * 12288
    head = 4 * once + 4 * 2048 * 51200
    assert activation_bytes(gpt3, Batch(1, 2048, flash=False), 2) == 96 * once * (34 + 80) + head
    assert activation_bytes(gpt3, Batch(1, 2048), 2) == 96 * once * 34 + head
    assert activation_bytes(gpt3, Batch(1, 2048, checkpointing=True), 2) == 96 * once * 2 + once * 34 + head
    assert activation_bytes(gpt3, Batch(3, 2048), 2) == 3 * activation_bytes(gpt3, Batch(1, 2048), 2)


# -- what fits -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_largest_model_fits_and_a_larger_one_does_not(stage, monkeypatch):
    monkeypatch.setattr(fit, "MOST_PARAMETERS", EVERY_SIZE)
    job, room = Job(world=16, stage=stage), 40 * GB
    most = memory.largest_model(job, torch.bfloat16, room)
    assert plan(bf16(most), job).most <= room < plan(bf16(most * 1.02), job).most


def test_the_smallest_stage_that_fits():
    model = bf16(7.5 * GB)
    stages = {room: memory.smallest_stage(model, Job(world=64), room * GB) for room in (140, 80, 40, 10, 1)}
    assert [made and made.job.stage for made in stages.values()] == [0, 1, 2, 3, None]


def test_smaller_buckets_where_they_are_what_is_missing():
    parameters = tuple(memory.ParameterShape(10**5, torch.bfloat16) for _ in range(10**3))
    model, job = memory.ModelShapes("many", parameters), Job(world=8)
    fits = plan(model, Job(world=8, stage=2, bucket_cap_mb=4))
    made = memory.smallest_stage(model, job, fits.most)
    assert made is not None and (made.job.stage, made.job.bucket_cap_mb) == (2, 4)


def test_the_cheapest_change():
    model = bf16(7.5 * GB)

    def change(room, **job):
        found = cheapest_change(plan(model, Job(**job)), room and room * GB)
        return found and found.what

    assert change(80, world=64, stage=0) == "stage=1"
    assert change(40, world=64, stage=0) == "stage=2"
    assert change(10, world=64, stage=0) == "zero_optim.shard_module (stage 3)"
    assert change(110, world=1, stage=2) == 'master="split"'
    assert change(100, world=1, stage=2) == 'master="split8"'
    assert change(70, world=1, stage=2) == 'master="split", state_dtype="int8"'
    assert change(55, world=1, stage=2) == 'master="split8", state_dtype="int8"'
    assert change(50, world=1, stage=2) == 'state_offload="paged"'
    averaged = AdamW().with_averages(Decays("ema_decay", (0.9,)), StochasticBf16())
    assert change(125, world=1, stage=2, rule=averaged) == 'master="split"'
    assert change(10, world=2, stage=2) == "zero_optim.shard_module (stage 3) and 32 ranks"
    stage_3 = "zero_optim.shard_module (stage 3) and "
    on_host = 'state_offload="paged" and shard_module(param_offload="cpu")'
    assert change(14, world=2, stage=2) == stage_3 + on_host
    assert change(14, world=2, stage=3) == on_host
    assert change(14, world=2, stage=3, param_offload=True) == 'state_offload="paged"'
    assert change(None, world=2, stage=1) == "stage=2"
    assert change(1, world=2, stage=1) is None
    split = AdamW().with_codecs({"master": Split()})
    no_device = change(None, world=1, device_memory=ON_THE_HOST, rule=split)
    assert no_device == "zero_optim.shard_module (stage 3) and 2 ranks"
    batch = Batch(16, 2048)
    assert change(80, world=64, stage=3, batch=batch) == "activation checkpointing"


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Job(stage=4), "stage must be"),
        (Job(world=0), "world must be"),
        (Job(world=2, rank=2), "rank must be one of 2"),
        (Job(stage=3), "units"),
        (Job(batch=Batch(1, 1)), "config"),
    ],
)
def test_what_cannot_be_planned(job, says):
    with pytest.raises(ValueError, match=says):
        plan(of_module(Tiny()), job)


# -- the command ---------------------------------------------------------------------------------------------------


def command(capsys, *flags):
    code = main(["plan", *flags])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def test_json_of_the_command(capsys):
    plans = json.loads(command(capsys, "--params", "7.5e9", "--world", "64", "--stage", "1,3", "--json"))
    assert [(made["stage"], made["world"]) for made in plans] == [(1, 64), (3, 64)]
    for made in plans:
        kinds = made["bytes_per_rank"]
        wanted = {"parameters", "gradients", "master", "exp_avg", "exp_avg_sq", "communication", "padding"}
        assert wanted | {"activations"} <= {*kinds}
        assert made["total_bytes"] == sum(kinds.values())
    assert plans[0]["communicated_bytes"] == pytest.approx(2 * 15e9 * 63 / 64, rel=0.01)
    assert plans[1]["communicated_bytes"] == pytest.approx(3 * 15e9 * 63 / 64, rel=0.03)
    assert [made["fits"] for made in plans] == [True, True]


def test_muon_is_for_the_matrices_of_layers(capsys):
    flags = ("--model", "llama-3-8b", "--world", "8", "--optimizer", "muon", "--json")
    matrices = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    others = 2 * 128256 * 4096 + 65 * 4096
    for made in json.loads(command(capsys, *flags)):
        shared = 8 if made["stage"] else 1
        kinds = made["bytes_per_rank"]
        assert kinds["momentum_buffer"] == 4 * matrices // shared
        assert kinds["exp_avg"] == kinds["exp_avg_sq"] == pytest.approx(4 * others / shared, rel=1e-4)
        assert made["collectives"].get("all_to_all", 0) == (4 * matrices // 8 if made["stage"] == 3 else 0)
    for made in json.loads(command(capsys, *flags, "--tp", "2")):  # slices to where they are made whole, and back
        of_rank = 4 * matrices // (8 if made["stage"] else 2)
        assert made["collectives"]["tensor_all_to_all"] == of_rank
        assert made["collectives"].get("all_to_all", 0) == (of_rank if made["stage"] == 3 else 0)
        assert made["communicated_along_slices_bytes"] == made["collectives"]["tensor_parallel"] + of_rank // 2


def matrices(count: int, numel: int, slices: int = 1) -> ModelShapes:
    """Each is a unit. ``slices``: a rank has one of so many of each."""
    shape = ParameterShape(numel // slices, torch.bfloat16, cut=slices > 1, joined=slices)
    return ModelShapes("matrices", (shape,) * count, ((), *((number,) for number in range(count))))


@pytest.mark.parametrize(
    ("model", "ranks", "stage", "exchanged", "iterated"),
    [
        (matrices(4, 2**20), 2, 2, 0, 10),
        (matrices(4, 2**20), 2, 3, 16, 8 + 10),
        (matrices(8, 2**20), 2, 3, 32, 16 + 10),
        (matrices(16, 2**20), 2, 3, 32, 16 + 10),  # a batch has four for each rank
        (matrices(1, 2**20), 4, 3, 2, 1 + 10),  # one rank has all of it
        (matrices(4, 2**20, 2), 1, 2, 16, 8 + 10),
        (matrices(8, 2**20, 2), 1, 2, 32, 16 + 10),
        (matrices(32, 2**20, 4), 1, 2, 32, 16 + 10),
        (matrices(16, 2**20, 2), 2, 3, 40, 24 + 10),
    ],
)
def test_what_whole_matrices_take(model, ranks, stage, exchanged, iterated):
    """In MiB. An exchange has both ends of a message, in bf16, beside what is made whole. The iteration has the
    copies of one matrix, at another time."""
    planned = plan(model, Job(world=ranks, stage=stage, host_waits=True, rule=Muon())).memory
    gone = sum(planned.get(kind, 0) for kind in ("unsharded", "local_gradients", "activations"))
    assert planned["whole_matrices"] == max(0, max(exchanged, iterated) * 2**20 - gone)


def test_replicas_share_the_work_of_matrices():
    """At stage 0 all ranks are replicas. A batch of four matrices is there in bf16, beside a message of as much."""
    model, mebi, kind = matrices(8, 2**20), 2**20, "replica_all_reduce"
    alone, repeating = Job(world=2, stage=0, host_waits=True, rule=Muon()), Muon(ns_replicas="repeat")
    made = plan(model, alone)
    assert made.traffic[kind] == 2 * 8 * mebi and made.sent_across == 0
    assert made.sent_within == plan(model, replace(alone, rule=repeating)).sent_within + 2 * 16 * mebi // 2
    gone = sum(made.memory.get(kind, 0) for kind in ("unsharded", "local_gradients", "activations"))
    assert made.memory["whole_matrices"] == max(0, (8 + max(8, 10)) * mebi - gone)
    of_four = replace(alone, world=8, stage=2, replicas=4)  # two share: a rank has half of the matrices
    made, repeated = plan(model, of_four), plan(model, replace(of_four, rule=repeating))
    assert made.traffic[kind] == 2 * 4 * mebi
    assert made.sent_across == repeated.sent_across + 2 * 8 * mebi * 3 // 4
    assert made.sent_within == repeated.sent_within and kind not in repeated.traffic
    assert kind not in plan(model, replace(of_four, offload=Offload(Tier.CPU))).traffic
    assert kind in plan(model, replace(of_four, stage=3, offload=Offload(Tier.CPU))).traffic


def test_replicas_share_less_and_are_told_of_by_link(capsys):
    """The formulas of docs/topologies.md, but for the padding of buckets."""
    flags = ["--params", "7.5e9", "--world", "64", "--replicate", "8", "--json"]
    for stage, within in ((1, 2), (2, 2), (3, 3)):
        (made,) = json.loads(command(capsys, *flags, "--stage", str(stage)))
        psi, across = 2 * made["parameters"], made["communicated_across_bytes"]
        assert made["replicas"] == 8
        assert across == pytest.approx(2 * psi / 8 * 7 / 8, rel=0.01)
        assert made["communicated_bytes"] - across == pytest.approx(within * psi * 7 / 8, rel=0.03)
        assert made["bytes_per_rank"]["exp_avg"] == pytest.approx(4 * made["parameters"] / 8, rel=0.01)
    said = command(capsys, "--params", "7.5e9", "--world", "64", "--replicate", "8", "--gpu-memory", "8GB", "--verbose")
    assert "64 ranks in 8 replicas" in said and "across replicas" in said
    assert "a mesh of one dimension, so that all ranks share" in said


def test_the_table_of_the_command(capsys, monkeypatch):
    monkeypatch.setattr(fit, "MOST_PARAMETERS", EVERY_SIZE)
    said = command(capsys, "--params", "7.5e9", "--world", "64", "--gpu-memory", "40GB")
    lines = {line[2:28].strip(): line[28:].split() for line in said.splitlines() if line.startswith("  ")}
    assert lines["model state"] == ["120.0", "31.41", "16.64", "1.88"]
    assert lines["fits into 40 GB"] == ["no", "no", "yes", "yes"] and "exp_avg" not in lines
    first = said.splitlines()[1:3]
    assert first[0] == "Fits into 40 GB at stage 2: 32.5 GB a rank, 7.48 GB to spare."
    wanted = "Not counted: activations (--seq and --batch count them), CUDA's context and NCCL's communicators."
    assert first[1] == wanted
    assert "does not fit" not in said.lower()


def test_the_verdict_comes_first(capsys):
    flags = ["--params", "8B", "--world", "8", "--gpu-memory", "10GB"]
    lines = command(capsys, *flags).splitlines()
    assert lines[1].startswith("Does not fit into 10 GB at any stage. The cheapest change that fits: ")
    # Of the stages that were asked for, the first that fits.
    lines = command(capsys, *flags[:4], "--stage", "2,3", "--seq", "8", "--batch", "1").splitlines()
    assert lines[1].startswith("Fits into 80 GB at stage 2: 47 GB a rank")
    assert lines[2].startswith("Activations: 1 x 8 tokens")
    assert lines[3] == "Not counted: CUDA's context and NCCL's communicators."


def test_a_number_of_parameters_is_read_as_it_is_written(capsys):
    said = {text: command(capsys, "--params", text, "--stage", "0") for text in ("8B", "8e9", "8000000000", "0.008T")}
    assert len({*said.values()}) == 1 and "8,000,000,000 parameters" in said["8B"]


def test_lora_trains_adapters_alone(capsys):
    (made,) = json.loads(command(capsys, "--model", "gpt2", "--stage", "0", "--lora", "8", "--json"))
    adapters = 12 * 8 * sum(rows + columns for rows, columns in ((2304, 768), (768, 768), (3072, 768), (768, 3072)))
    assert made["trained_parameters"] == adapters == made["parameters"] - KNOWN["gpt2"].numel
    of = made["bytes_per_rank"]
    assert (of["parameters"], of["gradients"]) == (2 * made["parameters"], 2 * adapters)
    assert (of["master"], of["exp_avg"], of["exp_avg_sq"]) == (4 * adapters,) * 3
    model = Configured()
    shapes = memory.of_module(model, (Block,))
    tuned = with_lora(shapes, 2)
    matrices = [p.shape for p in model.blocks.parameters() if p.ndim == 2]
    assert tuned.numel - shapes.numel == sum(2 * (rows + columns) for rows, columns in matrices) > 0
    held = [sum(tuned.parameters[i].numel for i in unit) for unit in tuned.units]  # each unit has its adapters
    assert sum(held) == tuned.numel and held[0] == sum(shapes.parameters[i].numel for i in shapes.units[0])


def test_room_for_adapters_is_their_own(capsys):
    """A module's parameters have a room in buckets by their own size, which is not that of their adapters."""
    shapes = with_lora(memory.of_module(Configured(), (Block,)), 1)
    trained = [parameter for parameter in shapes.parameters if parameter.trained]
    assert all(parameter.room == parameter.numel for parameter in trained)


@pytest.mark.parametrize(("part", "trained"), [("1%", 0.01 * 124439808), ("0.25", 124439808 / 4), ("20M", 20e6)])
def test_a_part_of_a_model_is_trained(capsys, part, trained):
    (made,) = json.loads(command(capsys, "--model", "gpt2", "--stage", "0", "--trainable", part, "--json"))
    assert made["parameters"] == KNOWN["gpt2"].numel
    assert made["trained_parameters"] == pytest.approx(trained, abs=len(KNOWN["gpt2"].numels))
    assert made["bytes_per_rank"]["exp_avg"] == 4 * made["trained_parameters"]
    assert made["bytes_per_rank"]["gradients"] == 2 * made["trained_parameters"]


def test_flags_have_the_words_of_the_package():
    """They are written twice, as the command line is read before the package is imported."""
    assert {*choices.DTYPES} == {*DTYPES} and (*MASTERS,) == choices.MASTERS and (*AVERAGES,) == choices.AVERAGES
    assert choices.STATE_DTYPES == STATE_DTYPES
    assert (*command_module.RULES,) == choices.RULES and (*memory.decoders.KNOWN,) == choices.MODELS


def test_activations_and_a_picture(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    flags = ["--model", "gpt2", "--world", "8", "--seq", "1024", "--batch", "2"]
    said = command(capsys, *flags, "--png", str(tmp_path / "plan.png"))
    assert "2 x 1,024 tokens" in said
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert said.endswith(f"drawn in {tmp_path / 'plan.png'}\n")


@pytest.mark.parametrize(
    ("file", "why"), [("no/plan.png", "No such file or directory: give"), ("plan.x", "not supported")]
)
def test_a_picture_that_cannot_be_drawn_is_told_before_the_plan(capsys, tmp_path, file, why):
    pytest.importorskip("matplotlib")
    assert main(["plan", "--params", "1e9", "--png", str(tmp_path / file)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and why in said.err and said.err.count("\n") == 1


def test_every_stage_of_the_picture_can_be_read(tmp_path, monkeypatch):
    """Stage 3 of 64 ranks takes 1/27 of stage 0: each has an axis of its own, and its figures beside it."""
    picture = pytest.importorskip("zero_optim.memory.picture")
    kept = []
    monkeypatch.setattr(picture, "png", lambda sheet, path: kept.append(sheet))
    model = bf16(7.5 * GB)
    plans = [plan(model, Job(world=64, stage=stage)) for stage in range(4)]
    picture.draw(tmp_path / "plan.png", plans[:3], 80 * GB)
    picture.draw(tmp_path / "plan.png", plans, 80 * GB)
    three, sheet = kept
    assert [len(line) for line in three.grid] == [2, 2] and three.grid[1][1] is None
    assert [len(line) for line in sheet.grid] == [2, 2] and sheet.note
    for made, bars in zip(plans, sheet.drawings, strict=True):
        *_, whole = bars.bars
        assert (whole.value, whole.ends[1]) == pytest.approx((made.total / GB, made.most / GB))
        assert (bars.roof is not None) == (made.most > 80 * GB)
    first, last = sheet.drawings[0], sheet.drawings[3]
    assert first.roof == ("the device:", 80.0)
    assert last.title == "Stage 3" and last.unit == "GB"
    figures = {bar.name: bar.figures for bar in last.bars}
    assert figures["parameters"] == ["0.234"] and figures["unsharded"] == ["1.29"]
    assert figures["on the device"] == ["4.90"] and "local_gradients" in figures


def test_rows_have_the_names_of_the_docs(capsys):
    said = command(
        capsys, "--model", "gpt2", "--world", "2", "--offload", "nvme", "--seq", "8", "--batch", "1", "--verbose"
    )
    rows = {line[2:28].strip() for line in said.splitlines() if line.startswith("  ")} - {""}
    assert {"local_gradients", "unsharded", "pages", "activations", "on the disk"} <= rows
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert not [name for name in rows if f"`{name}" not in page and f"*{name}*" not in page]


@pytest.mark.parametrize(("parameters", "unit", "cell"), [("1e6", "MB", "9.00"), ("2e9", "GB", "18.00")])
def test_a_small_model_is_told_in_a_small_unit(capsys, parameters, unit, cell):
    lines = command(capsys, "--params", parameters, "--world", "2", "--stage", "2").splitlines()
    assert f"; {unit} a rank" in lines[0]
    assert [line.split()[-1] for line in lines if line.startswith("  model state")] == [cell]


def test_a_factory_and_its_units(capsys):
    shapes = json.loads(command(capsys, "--model", "memory.test_plan:Tiny", "--world", "2", "--json"))
    made = {one["stage"]: one["bytes_per_rank"] for one in shapes}
    assert [*made] == [0, 1, 2, 3]  # Block is what the ModuleList holds
    assert made[3]["parameters"] == 4 * (2 * 1056 + 320) // 2 + 12
    assert main(["plan", "--model", "memory.test_plan:Tiny", "--units", "Layer"]) == 2
    assert "--units Layer" in capsys.readouterr().err


def test_a_configuration_of_transformers(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=100, n_positions=32)
    config.save_pretrained(tmp_path)
    flags = ["--world", "2", "--stage", "3", "--seq", "32", "--batch", "1", "--json"]
    (made,) = json.loads(command(capsys, "--model", str(tmp_path / "config.json"), *flags))
    assert made["parameters"] == memory.decoders.gpt("", 3, 64, 2, 32, 100).numel
    assert made["buckets"] == 4  # the blocks, and the root
    assert made["bytes_per_rank"]["activations"] == activation_bytes(Width(3, 64, 2, 100), Batch(1, 32), 2)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "gpt2-x"], "did you mean gpt2-xl?"),
        (["--model", "Qwen/Qwen3-8B"], "download its config.json and give the path"),
        (["--model", "mixtral-8x7b"], "download its config.json and give the path"),
        (["--model", "gpt2", "--lora", "0"], "--lora 0: at least 1"),
        (["--model", "torch.nn:Identity", "--lora", "8"], "--lora 8: the model has no matrices"),
        (["--model", "gpt2", "--trainable", "1B"], "--trainable 1,000,000,000: the model has 124,439,808 parameters"),
        (["--model", "gpt2", "--verbose", "--json"], "--verbose: --json has all of it"),
        (["--model", "nothing.at:all"], "ModuleNotFoundError"),
        (["--model", "no/config.json"], "no such file"),
        (["--params", "7e9", "--seq", "10"], "--seq and --batch"),
        (["--params", "7e9", "--checkpointing"], "--checkpointing"),
        (["--params", "7e9", "--world", "64", "--nodes", "5"], "--nodes 5"),
        (["--params", "7e9", "--world", "64", "--replicate", "5"], "--replicate 5"),
        (["--params", "7e9", "--world", "4", "--replicate", "4"], "--replicate 4"),
        (["--params", "7e9", "--replicate", "0"], "--replicate 0"),
        (["--params", "1e6", "--nodes", "1"], "without --offload or --param-offload"),
        (["--params", "7e9", "--world", "2", "--rank", "2"], "--rank 2"),
        (["--params", "7e9", "--bucket-cap-mb", "inf"], "--bucket-cap-mb inf"),
        (["--model", "llama-3-8b", "--world", "8", "--stage", "3", "--units", "Foo"], "--units Foo"),
        (["--params", "7e9", "--world", "8", "--stage", "2", "--param-offload"], "--param-offload"),
        (
            ["--params", "7e9", "--world", "8", "--optimizer", "muon", "--tp", "2", "--offload", "cpu"],
            "--optimizer muon: makes matrices whole on the device, which --tp 2 cuts; leave out --offload",
        ),
        (["--params", "7e9", "--world", "8", "--optimizer", "muon", "--offload", "cpu"], "compare --stage 0,1,2"),
    ],
)
def test_wrong_usage_is_told(capsys, flags, says):
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out


FLAGS = {
    "--dtype": "fp32",
    "--grad-reduce-dtype": "fp32",
    "--offload": "paged",
    "--param-offload": None,
    "--gpu-memory": "40GB",
    "--seq": "8",
    "--batch": "2",
    "--accumulate": "3",
    "--checkpointing": None,
    "--no-flash": None,
    "--units": "Block",
    "--prefetch": "0",
    "--bucket-cap-mb": "0.0001",
    "--rank": "0",
    "--nodes": "1",
    "--lora": "4",
    "--trainable": "50%",
    "--verbose": None,
}
SAME_BY_NATURE = {("--units", "3"), ("--units", None)}  # it names what is chosen without it
SAME_BY_NATURE |= {("--accumulate", stage) for stage in "01"}  # micro-batches add up in memory that is there anyhow


class Configured(Tiny):
    """With a width, by which activations are computed, and blocks for buckets of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(Block(32, 32) for _ in range(10))
        self.config = type("Config", (), {"layers": 2, "hidden": 32, "heads": 2, "vocab_size": 10})()
        self.half()


BESIDE = ("", "--seq 4 --batch 1", "--offload cpu", "--json", "--json --offload cpu")


@pytest.mark.parametrize(("world", "stage", "beside"), pairs(("1", "8"), (None, "0", "1", "2", "3"), BESIDE))
def test_no_flag_is_ignored(capsys, monkeypatch, world, stage, beside):
    """Each changes what is printed, or is refused by name: alone, and beside what gives it a meaning."""
    monkeypatch.setattr(command_module, "largest_model", lambda *_: 0)
    base = ["plan", "--model", "memory.test_plan:Configured", "--world", world, *(["--stage", stage] if stage else [])]
    base += beside.split()
    assert main(base) == 0
    plain = capsys.readouterr().out
    ignored = []
    for flag, value in FLAGS.items():
        if flag in beside:
            continue
        code = main([*base, flag, *([value] if value else [])])
        said = capsys.readouterr()
        if code == 2:
            assert flag in said.err
        elif said.out == plain and (flag, stage) not in SAME_BY_NATURE and (flag, world) != ("--accumulate", "1"):
            ignored.append(flag)
    assert not ignored


def test_what_a_node_takes_is_in_the_json(capsys):
    flags = ["--params", "1e6", "--world", "8", "--nodes", "2", "--stage", "2", "--offload", "cpu", "--json"]
    (made,) = json.loads(command(capsys, *flags))
    assert made["node_host_bytes"] == 4 * made["host_bytes"] > 0 == made["node_disk_bytes"]


@pytest.mark.parametrize("parameters", ["1e18", "1e30", "1e308", "1.001e15"])
def test_more_parameters_than_are_planned(capsys, parameters):
    with pytest.raises(SystemExit):
        main(["plan", "--params", parameters])
    said = capsys.readouterr().err
    assert "--params" in said and parameters in said and "at most 1e+15" in said


@pytest.mark.parametrize("size", ["11TB", "10.001TB", "1000000TB", "9" * 400 + "GB"])
def test_more_memory_than_is_planned(capsys, size):
    """The larger the memory, the larger are the models that are tried for it, and the longer that takes."""
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", "--gpu-memory", size])
    said = capsys.readouterr().err
    assert "--gpu-memory" in said and size in said and "at most 10TB" in said


def test_memory_without_a_unit_is_told_as_what_it_is(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", "--gpu-memory", "24"])
    assert "'24' is 24 bytes: give a unit, as in 80GB" in capsys.readouterr().err


def test_the_most_parameters_take_few_plans(monkeypatch):
    """Stages whose model state is too large are tried with one size of buckets."""
    tried = []
    monkeypatch.setattr(fit, "plan", lambda model, job: tried.append(job.stage) or plan(model, job))
    assert fit.smallest_stage(bf16(EVERY_SIZE / 1000), Job(world=2), 80 * GB) is None
    assert tried == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "fp8"],
        ["--stage", "4"],
        ["--offload", "tape"],
        ["--gpu-memory", "0"],
        ["--world", "x"],
        ["--trainable", "200%"],
    ],
)
def test_flags_that_cannot_be_read(capsys, flags):
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", *flags])
    assert flags[-1] in capsys.readouterr().err


# -- tensor parallelism --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_slice_takes_its_part_of_matrices_and_all_of_the_rest(stage):
    model = of_decoder(KNOWN["gpt2"], torch.bfloat16)
    hidden = KNOWN["gpt2"].width.hidden
    whole, cut = (plan(model, Job(world=4 * tensor, tensor=tensor, stage=stage)) for tensor in (1, 2))
    parts = [p.numel if p.numel <= hidden else -(-p.numel // 2) for p in model.parameters]
    alone = plan(replace(model, parameters=tuple(map(ParameterShape, parts, [torch.bfloat16] * len(parts)))), whole.job)
    assert cut.model is model
    assert cut.model_state == pytest.approx(alone.model_state, rel=1e-3)  # slices have buckets of their own
    assert cut.communicated == pytest.approx(alone.communicated, rel=0.01)
    assert cut.model_state < 0.51 * whole.model_state + 16 * sum(p for p in parts if p <= hidden)


def test_tensor_parallel_ranks_share_activations_evenly():
    model = of_decoder(KNOWN["gpt2"], torch.bfloat16)
    whole, cut = (plan(model, Job(world=4, tensor=t, batch=Batch(2, 512))) for t in (1, 4))
    assert cut.memory["activations"] == whole.memory["activations"] // 4


def test_what_cannot_be_cut_is_told():
    unknown = ModelShapes("a model", (ParameterShape(4, torch.float32),))
    with pytest.raises(ValueError, match="hidden size"):
        plan(unknown, Job(world=2, tensor=2))
    with pytest.raises(ValueError, match="tensor must be a divisor of the 6 ranks"):
        plan(unknown, Job(world=6, tensor=4))


def test_the_command_counts_all_ranks(capsys):
    flags = [
        "plan",
        "--model",
        "llama-2-7b",
        "--world",
        "64",
        "--tp",
        "8",
        "--replicate",
        "2",
        "--stage",
        "2",
        "--json",
    ]
    assert main(flags) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert (made["world"], made["tensor_parallel"], made["replicas"]) == (64, 8, 2)
    assert made["parameters"] == KNOWN["llama-2-7b"].numel
    # Parameters in bf16, an eighth of them; masters and moments of a quarter of that on each of four that share.
    assert made["bytes_per_rank"]["parameters"] == pytest.approx(2 * made["parameters"] / 8, rel=0.01)
    assert made["bytes_per_rank"]["exp_avg"] == pytest.approx(4 * made["parameters"] / 32, rel=0.01)
    assert main(["plan", "--model", "gpt2", "--world", "6", "--tp", "4"]) == 2
    assert "--tp 4: a divisor of the 6 ranks" in capsys.readouterr().err


def test_averages_in_two_bytes_are_planned(capsys):
    command = ["plan", "--model", "gpt2", "--stage", "0", "--averages", "1", "--json"]
    said = {}
    for form in ("fp32", "bf16_stochastic"):
        assert main([*command, "--ema-dtype", form]) == 0
        said[form] = capsys.readouterr().out
    assert '"ema": 497759232' in said["fp32"]
    assert '"ema_bf16": 248879616' in said["bf16_stochastic"]
    assert main(["plan", "--model", "gpt2", "--ema-dtype", "bf16_stochastic"]) == 2
    assert "--ema-dtype bf16_stochastic: no average is kept: give --averages, too" in capsys.readouterr().err
