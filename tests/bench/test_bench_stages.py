"""``bench_stages.py``: what is communicated is counted alike for all, and each is held to its own baseline."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import bench_stages
import bench_topologies
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_bench_train_step import call
from zero_optim import ShardedAdamW
from zero_optim.bench import contenders, train_step
from zero_optim.bench.contenders import (
    DDP_MUON,
    FORMS,
    FSDP2,
    FSDP2_ZERO2,
    GATHERING_TWICE,
    MAKERS,
    MUON,
    MUON_STAGE3,
    OURS,
    Task,
    keeps,
)
from zero_optim.bench.rows.op import WIDTH
from zero_optim.bench.rows.phase import PhaseRow
from zero_optim.bench.table import table
from zero_optim.bench.traffic import CountedTraffic
from zero_optim.bench.train_step import Alone, Contest

TASK = Task(train_step.TINY, torch.bfloat16, batch=2)

# -- what is communicated ----------------------------------------------------------------------------------------------


def communicate(rank: int, world_size: int, task: Task, names: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Of each contender, bytes of a step as Traffic counts them, and as the optimizer does; of FSDP2, 0."""
    made: list[ShardedAdamW] = []

    class Kept(ShardedAdamW):
        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    def own_bytes() -> int:
        collectives = made[-1].stats()["collectives"]
        return sum(of["bytes"] * (1 + (kind in ("all_reduce", "exchange"))) for kind, of in collectives.items())

    counted = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contenders, "ShardedAdamW", Kept)
        for name in names:
            contender = MAKERS[name](task)
            train_step.train(contender, 2)
            before = own_bytes() if name in OURS else 0
            with CountedTraffic() as traffic:
                train_step.train(contender, 1)
            counted[name] = (traffic.bytes, own_bytes() - before if name in OURS else 0)
    return counted


def test_what_is_communicated_is_two_or_three_times_the_parameters_whoever_does_it():
    _check_communicated(run_ranks(2, communicate, TASK, bench_stages.NAMES), across=0)


def test_across_replicas_goes_an_all_reduce_of_the_shards_whoever_does_it():
    hybrid = bench_topologies.MeshTask(**vars(TASK), topology=bench_topologies.TOPOLOGIES[1])
    _check_communicated(run_ranks(4, communicate, hybrid, bench_topologies.NAMES), across=2 / 2)


def losses(rank: int, world_size: int, task: Task) -> dict[str, list[float]]:
    return {name: train_step.train(MAKERS[name](task), 5) for name in bench_topologies.NAMES}


def test_slices_train_alike_whoever_shares_them():
    """Parameters of FSDP2 without fp32 masters would lose small updates: after four steps that is seen in the loss."""
    sliced = bench_topologies.MeshTask(**vars(TASK), topology=bench_topologies.TOPOLOGIES[2])
    for of_rank in run_ranks(4, losses, sliced):
        for name, found in of_rank.items():
            assert found == pytest.approx(of_rank["stage2"], rel=1e-4), name


def smaller_losses(rank: int, world_size: int) -> dict[str, list[float]]:
    return {name: train_step.train(MAKERS[name](TASK), 5) for name in ("stage2", *FORMS)}


def test_smaller_state_trains_alike():
    for of_rank in run_ranks(2, smaller_losses):
        for name in FORMS:
            assert of_rank[name] == pytest.approx(of_rank["stage2"], rel=5e-3), name


def muon_losses(rank: int, world_size: int) -> list[list[float]]:
    return [train_step.train(MAKERS[name](TASK), 5) for name in (MUON, MUON_STAGE3, DDP_MUON)]


def test_muon_trains_as_torchs_does():
    for ours, at_stage_3, theirs in run_ranks(2, muon_losses):
        assert ours == at_stage_3
        assert ours == pytest.approx(theirs, rel=5e-3)
        assert ours[-1] < ours[0]


def _check_communicated(results: list[dict[str, tuple[int, int]]], across: float) -> None:
    """``across``: bytes across replicas, times those of the parameters."""
    assert all(result == results[0] for result in results)
    sizes = {name: parameter.nbytes for name, parameter in TASK.model().named_parameters()}
    whole, blocks = sum(sizes.values()), sum(size for name, size in sizes.items() if "blocks." in name)
    for name, (counted, own) in results[0].items():
        expected = (2 + across) * whole + blocks * (name in GATHERING_TWICE)
        assert counted == pytest.approx(expected, rel=0.02), name  # padding, and small vectors
        assert counted >= expected, name
        if name in OURS:
            assert counted == own, name


def reduce_functionally(rank: int, world_size: int) -> list[int]:
    """Bytes of an all-reduce, of an all-gather, and of a DTensor's."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    sums = []
    for work in (
        lambda: dist.all_reduce(torch.zeros(3)),
        lambda: dist.all_gather_into_tensor(torch.zeros(8), torch.zeros(4)),
        lambda: DTensor.from_local(torch.zeros(5), init_device_mesh("cpu", (2,)), [Shard(0)]).full_tensor(),
    ):
        with CountedTraffic() as traffic:
            work()
        sums.append(traffic.bytes)
    return sums


def test_an_all_reduce_counts_twice_and_a_part_as_the_whole():
    assert run_ranks(2, reduce_functionally)[0] == [2 * 12, 32, 40]


# -- rows --------------------------------------------------------------------------------------------------------------


def test_each_is_held_to_the_fsdp2_that_has_its_setting():
    contest = bench_stages.contest(TASK, bench_stages.NAMES, 4)
    alone = {name: Alone(3, 4, (5.0,), 2, 100) for name in bench_stages.NAMES}
    laps = {name: [{"forward": float(place)}] * 3 for place, name in enumerate(bench_stages.NAMES, start=1)}
    rows = {row.backend: row for row in train_step.make_rows(contest, 10, alone, laps)}
    with_fsdp2 = [name for name, row in rows.items() if row.baseline == FSDP2]
    assert with_fsdp2 == ["stage3", "stage3_split", "stage3_small", "stage3_smallest", FSDP2]
    assert rows["stage3"].vs_torch == 12 / 4
    assert {row.baseline for name, row in rows.items() if name not in with_fsdp2} == {FSDP2_ZERO2}
    assert rows["stage3_keep"].vs_torch == 13 / 5 and rows["stage0"].vs_torch == 13
    assert {row.ranks for row in rows.values()} == {4} and rows["stage0"].communicated == 100
    assert rows["stage0"].memory == {"steady": 3, "start": 4, "rest": 2}


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("stage0", torch.bfloat16, "parameters 2, gradients 2, state 12"),
        ("stage1", torch.bfloat16, "parameters 2, gradients 2, state 12/N"),
        ("stage2", torch.float32, "parameters 4, gradients 4/N, state 8/N"),
        ("stage3_keep", torch.bfloat16, "parameters 2/N, gradients 2/N, state 12/N"),
        ("stage3_split", torch.bfloat16, "parameters 2/N, gradients 2/N, state 10/N"),
        ("stage3_keep_split", torch.bfloat16, "parameters 2/N, gradients 2/N, state 10/N"),
        ("stage2_small", torch.bfloat16, "parameters 2, gradients 2/N, state (4 + 1/16)/N"),
        ("stage3_smallest", torch.bfloat16, "parameters 2/N, gradients 2/N, state (3 + 1/16)/N"),
        (FSDP2, torch.bfloat16, "parameters 4/N, gradients 4/N until zero_grad, state 8/N"),
        ("ddp", torch.bfloat16, None),
    ],
)
def test_what_each_keeps(name, dtype, expected):
    assert keeps(name, dtype) == expected


def test_a_baseline_that_fails_is_no_run_without_it():
    def fail(count, work, task, name, device):
        raise train_step.RanksError(f"{name} broke")

    contest = Contest("stages", TASK, [FSDP2_ZERO2], 2, FSDP2, {"stage0": FSDP2_ZERO2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "on_ranks", fail)
        with pytest.raises(train_step.RanksError, match="fsdp2_zero2 broke"):
            train_step.train_alone(contest, lambda line: None)


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_a_run_on_two_numbers_of_ranks(run_here, draws_again, monkeypatch):
    pytest.importorskip("matplotlib")
    counts: list[int] = []

    def pooled(count, work, *args, device):
        counts.append(count)
        return run_ranks(count, call, work, args)

    monkeypatch.setattr(train_step, "on_ranks", pooled)
    monkeypatch.setattr(train_step, "SEQ", {"cpu": 16})
    flags = ["--numel", "50000", "--rounds", "1", "--ranks", "2", "1", "--device", "cpu", "--out", "."]
    first = run_here(bench_stages.main)(*flags, "--tokens", "64", "--contenders", "stage3")
    assert first.code == 0, first.err
    assert counts == [1] * 4 + [2] * 4, "three alone, and then together"
    (file,) = Path().glob("*-stages.json")
    (plot,) = Path().glob("*-stages.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["ranks"], row["backend"]) for row in rows] == [
        (count, name) for count in (1, 2) for name in ("stage3", FSDP2, FSDP2_ZERO2)
    ]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["ranks"] * 64 / row["ms"] * 1e3, rel=1e-3)
        assert row["memory"] is None or 0 < row["memory"]["rest"] <= row["memory"]["start"]
        assert (row["op"], row["rounds"], row["keeps"]) == ("stages", 1, keeps(row["backend"], torch.bfloat16))
    assert all(f"stages, {count} ranks, 64 tokens each: " in first.out for count in (1, 2))
    assert "vs fsdp2\n" in first.out
    draws_again(first, file, plot)
    assert all(len(line) <= WIDTH for line in first.out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train_step", "--ranks", "2"], ["--ranks", "step_overhead, memory_walkthrough"]),
        (["pack", "--ranks", "2"], ["--ranks", "pack does not take it", "step_overhead, memory_walkthrough"]),
        (["memory_walkthrough", "--ranks", "2", "4"], ["--ranks", "one number of them"]),
        (["memory_walkthrough", "--numel", "1Mi"], ["--numel", "memory_walkthrough does not take it"]),
        (["memory_walkthrough", "--rounds", "3"], ["--rounds", "memory_walkthrough does not take it"]),
        (["memory_walkthrough", "--contenders", "ddp"], ["--contenders", "it is of train_step, offload"]),
        (["step_overhead", "memory_walkthrough"], ["measured alone"]),
        (["stages"], ["stages is not in the package", "benchmarks/bench_stages.py"]),
        (["step"], ["step is not in the package", "benchmarks/bench_gpt_step.py"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(refuses, arguments, parts):
    refuses(*arguments, "--out", "results", saying=parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--ranks", "0"], ["--ranks 0", "at least 1"]),
        (["--dtypes", "fp16"], ["--dtypes fp16", "bf16 or fp32"]),
        (["--contenders", "paged 0"], ["--contenders paged 0", "fsdp2"]),
        (["memory_walkthrough"], ["memory_walkthrough"]),
    ],
    ids=" ".join,
)
def test_bad_arguments_of_the_script(run_here, refuses, arguments, parts):
    flags = ["--device", "cpu", "--out", "results"]
    refuses(*arguments, *flags, saying=["bench_stages.py: ", *parts], by=run_here(bench_stages.main))


def test_more_ranks_than_gpus(run_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    outcome = run_here(bench_stages.main)("--device", "cuda", "--ranks", "2", "4", "--out", "results")
    assert outcome.code == 2 and "--ranks 4: a rank needs a GPU of its own, and there are 2" in outcome.err


# -- phases beside each other ------------------------------------------------------------------------------------------


def test_the_table_of_a_walkthrough_has_a_phase_a_line():
    rows = [
        PhaseRow("memory_walkthrough", f"stage{stage}", "bf16", 2**20, 2, phase, after * 2**20, (after + 1) * 2**20)
        for stage in (0, 3)
        for phase, after in (("model", 2), ("step 1", 18 - 4 * stage))
    ]
    record = {"device": "d", "torch": "t", "commit": "c", "baselines": {}, "rows": [asdict(row) for row in rows]}
    lines = table(record).splitlines()[2:]
    assert lines[0].startswith("memory_walkthrough: 1 Mi bf16 parameters, 2 ranks")
    assert [line.split() for line in lines[1:]] == [
        ["phase", "stage0", "peak", "stage3", "peak"],
        ["model", "2.0", "3.0", "2.0", "3.0"],
        ["step", "1", "18", "19", "6.0", "7.0"],
        ["bytes", "a", "parameter", "18.00", "19.00", "6.00", "7.00"],
    ]
