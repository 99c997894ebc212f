"""Plans from shapes alone: the table of the ZeRO paper, published models, padding, stores, what fits; the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zero_optim_cli.choices as choices
from cells import slow
from torch import nn
from zero_optim import memory
from zero_optim.cli import main
from zero_optim.memory import KNOWN, Batch, Job, activation_bytes, gpt_of, of_decoder, of_module, plan
from zero_optim.memory import command as command_module
from zero_optim.memory.models import ModelShapes, ParameterShape, Width, gpt, with_lora
from zero_optim.memory.report import remedy, verdict
from zero_optim.rules import AdamW
from zero_optim.rules.codec import MASTERS, STATE_DTYPES
from zero_optim.stores.offload import Offload, Tier

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
        state = plan(model, Job(world=world, stage=stage, rule=AdamW())).model_state
        last_digit = 10.0 ** -len(printed.partition(".")[2])
        assert abs(state / GB - float(printed)) < last_digit, (world, printed)
        sharded = {1: 12, 2: 14, 3: 16}[stage]
        exact = model.numel * (16 - sharded + sharded / world)
        assert state == pytest.approx(exact, rel=1e-5)


def test_gpt_2_of_the_paper_takes_24_gb():
    assert plan(bf16(1.5 * GB), Job(stage=0, rule=AdamW())).model_state == 24 * GB
    assert plan(bf16(1.5 * GB), Job(stage=0)).model_state == 21 * GB, "split masters"
    assert plan(of_decoder(gpt_of(int(1.5 * GB)), torch.float16), Job(stage=0)).model_state == 24 * GB


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
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_known_models_have_their_published_parameters(name, parameters):
    assert KNOWN[name].numel == parameters


@pytest.mark.parametrize("parameters", [10**6, 124 * 10**6, 7_500_000_001, 175 * GB, 10**12])
def test_an_invented_gpt_has_exactly_the_parameters(parameters):
    decoder = gpt_of(parameters)
    assert decoder.numel == parameters
    assert decoder.width.layers == max(1, round((parameters / 196_608) ** (1 / 3)))
    if parameters > 10**9:
        assert 120 < decoder.width.hidden / decoder.width.layers < 136
        assert 50257 <= decoder.before[0] / decoder.width.hidden < 50257 + 200 * decoder.width.layers


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("parameters", [7.5 * GB, 70 * GB, pytest.param(1000 * GB, marks=slow)])
def test_padding_is_under_one_percent_of_16384_ranks(stage, parameters):
    model = bf16(parameters)
    for rank in (None, 0):
        made = plan(model, Job(world=16384, stage=stage, rank=rank))
        assert made.memory["padding"] < 0.01 * made.total
    last = plan(model, Job(world=16384, stage=stage, rank=16383))
    assert last.total == made.total and last.memory["padding"] > made.memory["padding"]


def test_units_that_are_kept_and_gathered_ahead():
    model = of_module(Tiny(), (Block,))

    def unsharded(**more):
        made = plan(model, Job(world=4, stage=3, **more))
        return made.memory["unsharded"] // 4 - 512, made.traffic["all_gather"] // 4 - 512

    block = 1536  # 9 rows, of 4 ranks 12
    assert unsharded(prefetch=0) == (block, 3 * block)
    assert unsharded(reshard_after_forward=False, prefetch=0) == (2 * block, 2 * block)
    assert unsharded(reshard_after_forward=2, prefetch=0) == (block + block, 2 * block)
    assert unsharded(accumulate=3)[1] == 3 * 3 * block + 2 * 512


def test_the_first_step_holds_every_gradient_at_stage_0():
    model = bf16(10**8)
    made = plan(model, Job(world=4, stage=0))
    assert made.first_step + made.memory["local_gradients"] == pytest.approx(2 * 10**8, rel=1e-3)
    for stage in (1, 2, 3):
        assert plan(model, Job(world=4, stage=stage)).first_step == 0
    assert plan(model, Job(world=1)).first_step == 0
    accumulating = plan(model, Job(world=4, stage=2, accumulate=2))
    assert accumulating.memory["local_gradients"] == pytest.approx(2 * 10**8, rel=1e-3)
    accumulating = plan(model, Job(world=4, stage=2, accumulate=2, grad_accumulation_dtype=torch.float32))
    assert accumulating.memory["local_gradients"] == pytest.approx(4 * 10**8, rel=1e-3)
    made = plan(model, Job(world=4, stage=0, grad_accumulation_dtype=torch.float32))
    assert made.first_step + made.memory["local_gradients"] == pytest.approx(4 * 10**8, rel=1e-3)


@pytest.mark.parametrize(("device", "buckets"), [("cuda", 162), ("cpu", 227)])
def test_buckets_are_as_large_as_the_device_makes_them(device, buckets):
    """The counts are those of the table of docs/step.md."""
    made = plan(of_decoder(KNOWN["llama-2-7b"], torch.bfloat16), Job(world=8, stage=2, device=device))
    assert made.buckets == buckets
    assert made.calls == {"reduce_scatter": buckets, "all_gather": buckets}


# -- stores --------------------------------------------------------------------------------------------------------


def test_what_offloaded_state_and_parameters_take_on_the_host():
    model = bf16(10**8)
    alone = plan(model, Job(world=1, offload=Offload(Tier.CPU, 0)))
    assert alone.host == pytest.approx(14 * 10**8, rel=1e-3)
    places = (None, "cpu", "nvme")
    here, away, on_disk = (plan(model, Job(world=4, stage=3, prefetch=4, param_offload=place)) for place in places)
    assert away.memory["parameters"] == 0 and here.memory["parameters"] == 2 * 10**8 // 4
    assert away.host == pytest.approx(here.memory["parameters"], rel=1e-3)  # with the padding of shards
    assert (on_disk.memory, on_disk.disk) == (away.memory, away.host) and on_disk.host % 5 == 0  # buffers of one size


def test_a_budget_keeps_pages_on_the_device():
    model = bf16(10**8)
    none, some, all_ = (plan(model, Job(offload=Offload(Tier.PAGED, n))) for n in (0, 6 * 10**8, 2 * 10**9))
    state = 10 * 10**8
    assert none.host == pytest.approx(state, rel=1e-3)
    assert 5 * 10**8 < none.host - some.host <= 6 * 10**8
    assert all_.host == 0 and all_.memory["pages"] == pytest.approx(state, rel=1e-3)
    room = none.most + 7 * 10**8
    automatic = plan(model, Job(offload=Offload(Tier.PAGED, None), device_memory=room))
    assert automatic.most <= room and automatic.host < some.host


# -- activations ---------------------------------------------------------------------------------------------------


def test_activations_are_those_of_the_published_formula():
    """A layer of GPT-3 keeps 34 sbh bytes."""
    gpt3, once = Width(96, 12288, 51200), 2048 * 12288
    head = 4 * once + 4 * 2048 * 51200
    assert activation_bytes(gpt3, Batch(1, 2048), 2) == 96 * once * 34 + head
    assert activation_bytes(gpt3, Batch(1, 2048, checkpointing=True), 2) == 96 * once * 2 + once * 34 + head
    assert activation_bytes(gpt3, Batch(3, 2048), 2) == 3 * activation_bytes(gpt3, Batch(1, 2048), 2)


# -- what fits -----------------------------------------------------------------------------------------------------


def test_the_first_stage_that_fits_and_what_takes_less():
    model, job = bf16(7.5 * GB), Job(world=64)
    plans = [plan(model, replace(job, stage=stage)) for stage in range(4)]
    for room, stage in ((140, 0), (80, 1), (20, 2), (10, 3)):
        assert verdict(plans, room * GB).startswith(f"Fits into {room} GB at stage {stage}: ")
    assert verdict(plans, 20 * GB) == "Fits into 20 GB at stage 2: 17.7 GB a rank, 2.28 GB to spare."
    assert verdict(plans, GB).startswith(
        'Does not fit into 1 GB at any stage below. What takes less: state_dtype="int8"'
    )
    assert remedy(plans[0], 20 * GB) == "stage=2 fits: 17.7 GB a rank."
    assert remedy(plans[0], 10 * GB) == "zero_optim.shard_module (stage 3) fits: 4.67 GB a rank."
    full = plan(model, Job(batch=Batch(16, 2048)))
    assert remedy(full, 80 * GB).startswith("What takes less: activation checkpointing, state_dtype=")


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Job(stage=4), "stage must be"),
        (Job(world=0), "world must be"),
        (Job(world=2, rank=2), "rank must be one of 2"),
        (Job(stage=3), "units"),
        (Job(batch=Batch(1, 1)), "config"),
        (Job(world=6, tensor=4), "tensor must divide the 6 ranks"),
        (Job(world=4, replicas=4), "replicas must divide the 4 ranks"),
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
        wanted = {"parameters", "gradients", "master_low", "exp_avg", "exp_avg_sq", "communication", "padding"}
        assert wanted | {"activations"} <= {*kinds}
        assert made["total_bytes"] == sum(kinds.values())
    for made, psi in zip(plans, (2, 3), strict=True):
        assert sum(made["collectives"].values()) == pytest.approx(psi * 15e9, rel=0.03)
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


def test_replicas_with_the_state_over_all_of_them(capsys):
    flags = ["--params", "7.5e9", "--world", "64", "--replicate", "8", "--state-over", "all"]
    for stage, within in ((1, 2), (2, 2), (3, 3)):
        (made,) = json.loads(command(capsys, *flags, "--stage", str(stage), "--json"))
        psi, held, sent = 2 * made["parameters"], made["bytes_per_rank"], made["collectives"]
        for kind in ("replica_reduce_scatter", "replica_all_gather"):
            assert sent.pop(kind) == pytest.approx(psi / 8, rel=0.01)
        assert sum(sent.values()) == pytest.approx(within * psi, rel=0.03)
        assert held["exp_avg"] == pytest.approx(4 * made["parameters"] / 64, rel=0.01)
        assert held["gradients"] == pytest.approx(psi / (64 if stage > 1 else 1), rel=0.01)
        assert held["parameters"] == pytest.approx(psi / (8 if stage == 3 else 1), rel=0.01)
    assert "64 ranks in 8 replicas, state over all" in command(capsys, *flags)


def test_the_table_of_the_command(capsys):
    said = command(capsys, "--params", "7.5e9", "--world", "64", "--gpu-memory", "20GB")
    lines = {line[2:28].strip(): line[28:].split() for line in said.splitlines() if line.startswith("  ")}
    assert lines["model state"] == ["105.0", "31.17", "16.41", "1.64"]
    assert lines["fits into 20 GB"] == ["no", "no", "yes", "yes"] and "exp_avg" not in lines
    first = said.splitlines()[1:3]
    assert first[0] == "Fits into 20 GB at stage 2: 17.7 GB a rank, 2.28 GB to spare."
    wanted = "Not counted: activations (--seq and --batch count them), CUDA's context and NCCL's communicators."
    assert first[1] == wanted
    assert "does not fit" not in said.lower()


def test_the_verdict_comes_first(capsys):
    flags = ["--params", "8B", "--world", "8"]
    lines = command(capsys, *flags, "--gpu-memory", "10GB").splitlines()
    assert lines[1].startswith("Does not fit into 10 GB at any stage below. What takes less: ")
    # Of the stages that were asked for, the first that fits.
    lines = command(capsys, *flags, "--stage", "2,3", "--seq", "8", "--batch", "1").splitlines()
    assert lines[1].startswith("Fits into 80 GB at stage 2: 29.5 GB a rank")
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
    assert (2 * of["master_low"], of["exp_avg"], of["exp_avg_sq"]) == (4 * adapters,) * 3
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


def test_flags_have_the_words_of_the_package():
    """They are written twice, as the command line is read before the package is imported."""
    assert {*choices.DTYPES} == {*command_module.DTYPES} and (*MASTERS,) == choices.MASTERS
    assert choices.STATE_DTYPES == STATE_DTYPES
    assert (*command_module.RULES,) == choices.RULES and (*KNOWN,) == choices.MODELS


def test_rows_have_the_names_of_the_docs(capsys):
    said = command(
        capsys, "--model", "gpt2", "--world", "2", "--offload", "nvme", "--seq", "8", "--batch", "1", "--verbose"
    )
    rows = {line[2:28].strip() for line in said.splitlines() if line.startswith("  ")} - {""}
    assert {"local_gradients", "unsharded", "pages", "activations", "on the disk"} <= rows
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    assert not [name for name in rows if f"`{name}" not in page and f"*{name}*" not in page]


@pytest.mark.parametrize(("parameters", "unit", "cell"), [("1e6", "MB", "8.00"), ("2e9", "GB", "16.00")])
def test_a_small_model_is_told_in_a_small_unit(capsys, parameters, unit, cell):
    lines = command(capsys, "--params", parameters, "--world", "2", "--stage", "2").splitlines()
    assert f"; {unit} a rank" in lines[0]
    assert [line.split()[-1] for line in lines if line.startswith("  model state")] == [cell]


def test_a_configuration_of_transformers(capsys, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=3, n_embd=64, n_head=2, vocab_size=100, n_positions=32)
    config.save_pretrained(tmp_path)
    flags = ["--world", "2", "--stage", "3", "--seq", "32", "--batch", "1", "--json"]
    (made,) = json.loads(command(capsys, "--model", str(tmp_path / "config.json"), *flags))
    assert made["parameters"] == gpt("", 3, 64, 32).numel - (50257 - 100) * 64
    assert made["buckets"] == 4  # the blocks, and the root
    assert made["bytes_per_rank"]["activations"] == activation_bytes(Width(3, 64, 100), Batch(1, 32), 2)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "gpt2-x"], "did you mean gpt2-xl?"),
        (["--model", "Qwen/Qwen3-8B"], "download its config.json and give the path"),
        (["--model", "mixtral-8x22b"], "download its config.json and give the path"),
        (["--model", "gpt2", "--lora", "0"], "--lora 0: at least 1"),
        (["--model", "no/config.json"], "no such file"),
        (["--params", "7e9", "--seq", "10"], "--seq and --batch"),
        (["--params", "7e9", "--checkpointing"], "--checkpointing"),
        (["--params", "7e9", "--world", "64", "--replicate", "5"], "--replicate must divide the 64 ranks"),
        (["--params", "7e9", "--world", "4", "--replicate", "4"], "--replicate must divide the 4 ranks"),
        (["--params", "7e9", "--replicate", "0"], "got 0"),
        (["--params", "7e9", "--state-over", "all"], "--replicate"),
        (["--params", "7e9", "--world", "0"], "--world must be 1 rank or more"),
        (["--params", "7e9", "--world", "6", "--tp", "4"], "--tp must divide the 6 ranks, got 4"),
        (["--params", "7e9", "--world", "6", "--ep", "4"], "--ep must divide the 6 ranks, got 4"),
        (["--params", "7e9", "--world", "4", "--ep", "4"], "--ep 4: the model has no experts"),
        (["--model", "mixtral-8x7b", "--world", "3", "--ep", "3"], "--ep must divide the model's 8 experts"),
        (["--model", "mixtral-8x7b", "--world", "8", "--tp", "2", "--ep", "2"], "--ep beside tensor-parallel ranks"),
        (["--params", "7e9", "--world", "8", "--stage", "2", "--param-offload"], "--param-offload"),
    ],
)
def test_wrong_usage_is_told(capsys, flags, says):
    assert main(["plan", *flags]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not said.out


class Configured(Tiny):
    """With a width, by which activations are computed, and blocks for buckets of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(Block(32, 32) for _ in range(10))
        self.config = type("Config", (), {"layers": 2, "hidden": 32, "heads": 2, "vocab_size": 10})()
        self.half()


@pytest.mark.parametrize("parameters", ["1e18", "1e30", "1e308", "1.001e15"])
def test_more_parameters_than_are_planned(capsys, parameters):
    with pytest.raises(SystemExit):
        main(["plan", "--params", parameters])
    said = capsys.readouterr().err
    assert "--params" in said and parameters in said and "at most 1e15" in said


def test_memory_without_a_unit_is_told_as_what_it_is(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", "--gpu-memory", "24"])
    assert "'24' is 24 bytes: give a unit, as in 80GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "fp8"],
        ["--stage", "4"],
        ["--offload", "tape"],
        ["--offload", "cpu:8GB"],
        ["--gpu-memory", "0"],
        ["--world", "x"],
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
    assert sum(cut.traffic.values()) == pytest.approx(sum(alone.traffic.values()), rel=0.01)
    assert cut.model_state < 0.51 * whole.model_state + 16 * sum(p for p in parts if p <= hidden)


def test_tensor_parallel_ranks_share_activations_evenly():
    model = of_decoder(KNOWN["gpt2"], torch.bfloat16)
    whole, cut = (plan(model, Job(world=4, tensor=t, batch=Batch(2, 512))) for t in (1, 4))
    assert cut.memory["activations"] == whole.memory["activations"] // 4


def test_what_cannot_be_cut_is_told():
    unknown = ModelShapes("a model", (ParameterShape(4, torch.float32),))
    with pytest.raises(ValueError, match="hidden size"):
        plan(unknown, Job(world=2, tensor=2))


def test_the_command_counts_all_ranks(capsys):
    flags = ["--model", "llama-2-7b", "--world", "64", "--tp", "8", "--replicate", "2", "--stage", "2", "--json"]
    (made,) = json.loads(command(capsys, *flags))
    assert (made["world"], made["tensor_parallel"], made["replicas"]) == (64, 8, 2)
    assert made["parameters"] == KNOWN["llama-2-7b"].numel
    # Parameters in bf16, an eighth of them; masters and moments of a quarter of that on each of four that share.
    assert made["bytes_per_rank"]["parameters"] == pytest.approx(2 * made["parameters"] / 8, rel=0.01)
    assert made["bytes_per_rank"]["exp_avg"] == pytest.approx(4 * made["parameters"] / 32, rel=0.01)
