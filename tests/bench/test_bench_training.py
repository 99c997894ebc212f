"""``bench_training.py``: who is compared trains the same, who cannot is left out by name, rows add up."""

from __future__ import annotations

from dataclasses import replace

import bench_training
import counted_bytes
import pytest
import torch
import torch.distributed as dist
from bench_training import QUESTIONS, TINY, TOLERANCE, Alone, Contest, of_all_ranks
from contenders import WAYS, Task
from counted_bytes import CountedTraffic
from harness import run_ranks
from ranks import RanksError
from zero_optim.errors import ZeroOptimError

FP32, BF16 = torch.float32, torch.bfloat16
TASK = Task(replace(TINY, layers=2), BF16, batch=2)
OURS = ("stage0", "stage1", "stage2", "stage3", "stage3_keep")
BY_TORCH = ("ddp", "zero_redundancy", "fsdp2", "fsdp2_zero2")


def contest_of(op: str, *names: str, ranks: int = 2, task: Task = TASK) -> Contest:
    return Contest(op, QUESTIONS[op], task, ranks, names)


# -- the same training -------------------------------------------------------------------------------------------------


def train_all(rank: int, world_size: int) -> dict:
    """(losses, norms, bytes of the last step) of each contender on this rank."""
    results, alive = {}, []
    for task in (TASK, replace(TASK, dtype=FP32)):
        for name in (*OURS, *BY_TORCH):
            training = WAYS[name].make(task)
            alive.append(training)  # as in a measurement, where all of them train in turn
            losses, norms = [], []
            for _ in range(3):
                with CountedTraffic() as traffic:
                    for lap, work in training.laps.items():
                        given = work()
                        if lap == "clip":
                            norms.append(float(given.full_tensor() if hasattr(given, "full_tensor") else given))
                losses.append(training.last_loss())
            results[task.dtype, name] = (losses, norms, traffic.bytes)
    return results


def test_the_contenders_train_the_same_model_and_communicate_as_they_must():
    """Losses, and the norms that are clipped: the update itself does not feel a factor on gradients."""
    results = run_ranks(2, train_all)
    for of_rank in results:
        for (dtype, name), (losses, norms, _) in of_rank.items():
            expected, expected_norms, _ = of_rank[dtype, "ddp"]
            assert expected[0] > expected[1] > expected[2] and min(expected_norms) > 1.0
            fall = expected[0] - expected[-1]
            assert losses == pytest.approx(expected, abs=min(fall / 10, TOLERANCE[dtype] * expected[0])), name
            assert norms == pytest.approx(expected_norms, rel=4 * TOLERANCE[dtype]), name
    assert results[0][FP32, "ddp"][0] != results[1][FP32, "ddp"][0], "ranks have windows of their own"
    assert results[0][BF16, "stage1"][0] == results[0][BF16, "stage2"][0], "stages 1 and 2 are the same arithmetic"
    # Twice the parameters, and blocks once more where they are gathered twice: ours but for the last.
    sizes = {name: parameter.nbytes for name, parameter in TASK.model().named_parameters()}
    whole, *blocks = (sum(size for name, size in sizes.items() if of in name) for of in ("", "blocks.0.", "blocks.1."))
    for (dtype, name), (_, _, counted) in results[0].items():
        if dtype == BF16 and name != "zero_redundancy":  # it broadcasts fp32 masters
            again = blocks if name.startswith("fsdp2") else blocks[:1]
            least = 2 * whole + sum(again) * WAYS[name].gathers_twice
            assert least <= counted < 1.02 * least, name  # padding, and small vectors


# -- what is made of it ------------------------------------------------------------------------------------------------


def test_a_training_that_differs_gives_no_figures():
    alike = Alone((5.0, 4.5), (), 0)
    contest = contest_of("train_step", "ddp", "stage1", task=replace(TASK, dtype=FP32))
    bench_training.check_losses(contest, {"ddp": alike, "stage1": Alone((5.0, 4.5001), (), 0)})
    with pytest.raises(ZeroOptimError, match="stage1 has loss 4.60000 in step 2, ddp 4.50000"):
        bench_training.check_losses(contest, {"ddp": alike, "stage1": Alone((5.0, 4.6), (), 0)})
    bench_training.check_losses(
        contest_of("forms", "stage2_fp32"), {"stage2_fp32": alike, "torchao": Alone((5.0, 4.6), (), 0)}
    )


def test_who_fails_is_left_out_and_ours_never(monkeypatch):
    def fail(count, work, task, name, device):
        if name != "ddp":
            raise RanksError(f"rank 0: {name} broke")
        return [Alone((5.0,), ("a",), 1, {"rest": 2, "start": 9}), Alone((6.0,), ("a",), 3, {"rest": 4, "start": 5})]

    monkeypatch.setattr(bench_training, "on_ranks", fail)
    alone, left_out = bench_training.train_alone(contest_of("train_step", "ddp", "fsdp2", "deepspeed1"))
    assert alone == {"ddp": Alone([5.5], ("a",), 3, {"rest": 4, "start": 9})}
    assert left_out == {"fsdp2": "rank 0: fsdp2 broke", "deepspeed1": "not installed"}
    in_fp32 = contest_of("stages", "stage3_smallest", task=replace(TASK, dtype=FP32))
    assert bench_training.train_alone(in_fp32)[1] == {"stage3_smallest": "8 bits of a master are for bf16 parameters"}
    for op, name in (("train_step", "stage0"), ("stages", "fsdp2_zero2")):
        with pytest.raises(ZeroOptimError, match=f"{op}: {name}: rank 0: {name} broke"):
            bench_training.train_alone(contest_of(op, name))
    assert of_all_ranks([Alone((1.0,), (), 0)]).memory is None


def test_each_is_compared_with_the_fsdp2_that_has_its_setting():
    names = QUESTIONS["stages"].contenders
    contest = contest_of("stages", *names, ranks=4)
    alone = {name: Alone((5.0,), ("forward",), 100, {"steady": 3}) for name in names}
    times = {name: [[float(place)]] * 3 for place, name in enumerate(names, start=1)}
    rows = {row["backend"]: row for row in bench_training.make_rows(contest, alone, times)}
    with_fsdp2 = [name for name, row in rows.items() if row["baseline"] == "fsdp2"]
    assert with_fsdp2 == ["stage3", "stage3_int8", "stage3_smallest", "fsdp2"]
    assert {row["baseline"] for name, row in rows.items() if name not in with_fsdp2} == {"fsdp2_zero2"}
    assert rows["stage3"]["vs_torch"] == 10 / 4 and rows["stage3_keep"]["vs_torch"] == 11 / 5
    assert rows["stage0"]["tokens_per_s"] == 4 * 2 * 16 / 1e-3
    assert (rows["stage0"]["communicated"], rows["stage0"]["memory"], rows["stage0"]["ranks"]) == (
        100,
        {"steady": 3},
        4,
    )


def test_of_forms_the_update_is_compared():
    alone = {name: Alone((5.0,), ("forward", "update"), 0) for name in ("stage2_fp32", "stage2_int8")}
    times = {"stage2_fp32": [[10.0, 4.0]], "stage2_int8": [[10.0, 2.0]]}
    _, row = bench_training.make_rows(contest_of("forms", *alone, ranks=1), alone, times)
    assert (row["ms"], row["vs_torch"], row["phases"]) == (2.0, 2.0, {"forward": 10.0, "update": 2.0})
    assert row["tokens_per_s"] == pytest.approx(32 / 12e-3, rel=1e-4)


# -- a whole run, on the tests' own ranks ------------------------------------------------------------------------------


def call(rank: int, world_size: int, work, args: tuple) -> object:
    """The workers live on: what they free they may keep."""
    counted_bytes.return_what_is_freed = lambda: None
    return work(*args)


@pytest.fixture
def pooled(monkeypatch):
    monkeypatch.setattr(
        bench_training, "on_ranks", lambda count, work, *args, device: run_ranks(count, call, work, args)
    )
    monkeypatch.setattr(bench_training, "SEQ", {"cpu": 16})


def test_a_run(pooled, ran):
    flags = ["--numel", "50000", "--rounds", "2", "--dtype", "fp32", "--tokens", "32", "--device", "cpu"]
    outcome, found = ran(bench_training.main, *flags, "--contenders", "stage2", "deepspeed1", "stage1")
    assert "deepspeed1: not installed" in outcome.out
    rows = {row["backend"]: row for row in found}
    assert [*rows] == ["stage1", "stage2", "ddp"]
    for row in rows.values():
        assert (row["op"], row["dtype"], row["ranks"], row["rounds"]) == ("train_step", "fp32", 2, 2)
        assert row["tokens_per_s"] == pytest.approx(2 * 32 / row["ms"] * 1e3, rel=1e-3)
        assert row["vs_torch"] == pytest.approx(rows["ddp"]["ms"] / row["ms"], abs=1e-3)
        assert row["phases"].keys() == {"forward", "backward", "clip", "update", "zero_grad"}
        if counted_bytes.can_measure():
            assert 0 < row["memory"]["steady"] <= row["memory"]["start"] < 2**30


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--contenders", "apex"], ["--contenders apex", "stage0", "fsdp2_zero2", "deepspeed2"]),
        (["stages", "--contenders", "ddp"], ["--contenders ddp", "fsdp2"]),
        (["--dtype", "fp16"], ["--dtype fp16", "bf16 or fp32"]),
        (["--tokens", "100"], ["--tokens 100", "windows of 64"]),
        (["--ranks", "0"], ["--ranks", "at least 1"]),
        (["--ranks", "3", "--replicas", "2"], ["--replicas 2", "3 ranks"]),
        (["walkthrough"], ["walkthrough"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(run_here, arguments, parts):
    outcome = run_here(bench_training.main)(*arguments, "--device", "cpu", "--no-write")
    assert outcome.code == 2 and outcome.err.startswith("bench_training.py: ") and outcome.err.count("\n") == 1
    assert all(part in outcome.err for part in parts), outcome.err


def test_more_ranks_than_gpus(run_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    outcome = run_here(bench_training.main)("--device", "cuda", "--ranks", "4", "--no-write")
    assert outcome.code == 2 and "--ranks 4: a rank needs a GPU of its own, and there are 2" in outcome.err


@pytest.mark.slow
def test_a_rank_of_its_own_processes():
    """Not of the pool, once: what a script's ranks return comes back by pickle."""
    found = bench_training.on_ranks(1, bench_training.alone_on_rank, replace(TASK, batch=1), "stage2")
    assert not dist.is_initialized() and len(found[0].losses) == 5
    assert found[0].laps == ["forward", "backward", "clip", "update", "zero_grad"]
