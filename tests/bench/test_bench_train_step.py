"""``zero-optim bench train_step``: who is compared trains the same, who cannot is left out by name, rows add up."""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from zero_optim.bench import contenders, peak_memory, ranks, train_step
from zero_optim.bench.contenders import DDP, DDP_MUON, FORMS, MAKERS, MUON, MUON_STAGE3, OURS, PACKAGES, Task
from zero_optim.bench.contest import in_all, slower
from zero_optim.bench.train_step import Alone, Contest
from zero_optim.errors import ZeroOptimError

BY_TORCH = [name for name in MAKERS if name not in {*PACKAGES, *FORMS, MUON, MUON_STAGE3, DDP_MUON}]  # by AdamW in fp32
STEPS = 3


def tiny(dtype: torch.dtype) -> Task:
    return Task(train_step.TINY, dtype, batch=2)


def contest_of(*names: str, dtype: torch.dtype = torch.float32, batch: int = 2) -> Contest:
    return Contest("train_step", replace(tiny(dtype), batch=batch), names, 2, DDP)


# -- the same training -------------------------------------------------------------------------------------------------


def train_all(rank: int, world_size: int, dtypes: list[torch.dtype]) -> dict:
    """(losses, norms) of the steps of each contender on this rank."""
    results, alive = {}, []
    for dtype in dtypes:
        for name in BY_TORCH:
            contender = MAKERS[name](tiny(dtype))
            alive.append(contender)  # as in a measurement, where all of them train in turn
            losses, norms = [], []
            for _ in range(STEPS):
                for lap, work in contender.laps.items():
                    given = work()
                    if lap == "clip":
                        norms.append(float(given.full_tensor() if hasattr(given, "full_tensor") else given))
                losses.append(contender.last_loss())
            results[dtype, name] = (losses, norms)
    return results


def test_the_contenders_train_the_same_model():
    """Losses over the steps, and the norms that are clipped: the update itself does not feel a factor on gradients."""
    results = run_ranks(2, train_all, [torch.bfloat16, torch.float32])
    for dtype in (torch.bfloat16, torch.float32):
        tolerance = train_step.TOLERANCE[dtype]
        for rank in range(2):
            losses, norms = results[rank][dtype, DDP]
            assert losses[0] > losses[1] > losses[2] and min(norms) > contenders.MAX_NORM
            fall = losses[0] - losses[-1]
            assert fall > 2 * tolerance * losses[0] * (dtype == torch.float32) and fall > 0.01
            for name in BY_TORCH:
                assert results[rank][dtype, name][0] == pytest.approx(losses, abs=min(fall / 10, tolerance * losses[0]))
                assert results[rank][dtype, name][1] == pytest.approx(norms, rel=4 * tolerance)
    assert results[0][torch.float32, DDP][0] != results[1][torch.float32, DDP][0], "ranks have windows of their own"
    stages = [results[0][torch.bfloat16, name] for name in OURS[1:3]]
    assert stages[0] == stages[1], "stages 1 and 2 are the same arithmetic"


def test_a_training_that_differs_gives_no_figures():
    alike = Alone(1, 1, (5.0, 4.5))
    contest = contest_of(DDP, "stage1")
    train_step.check_losses(contest, {DDP: alike, "stage1": Alone(2, 2, (5.0, 4.5001))})
    with pytest.raises(ZeroOptimError, match="stage1 has loss 4.60000 in step 2, ddp 4.50000"):
        train_step.check_losses(contest, {DDP: alike, "stage1": Alone(2, 2, (5.0, 4.6))})


# -- a whole run, on the tests' own ranks ------------------------------------------------------------------------------


def call(rank: int, world_size: int, work, args: tuple) -> object:
    """The workers live on: what they free they may keep."""
    peak_memory.return_what_is_freed = lambda: None
    return work(*args)


@pytest.fixture
def pooled(monkeypatch):
    monkeypatch.setattr(train_step, "on_ranks", lambda count, work, *args, device: run_ranks(count, call, work, args))
    monkeypatch.setattr(train_step, "SEQ", {"cpu": 16})
    monkeypatch.setattr(contenders, "PACKAGES", dict(PACKAGES))
    monkeypatch.setattr(train_step, "PACKAGES", dict.fromkeys(PACKAGES, "no_such_package"))


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(bench, draws_again, pooled):
    pytest.importorskip("matplotlib")
    flags = ["--numel", "50000", "--rounds", "2", "--dtypes", "fp32", "--tokens", "64", "32", "--out", "."]
    first = bench("train_step", *flags, "--contenders", "stage2", "deepspeed1", "stage1", "ddp_autocast")
    assert first.code == 0, first.err
    missing = [line for line in first.err.splitlines() if "deepspeed" in line]
    assert missing == ["left out: deepspeed1: not installed"] * 2
    (file,) = Path().glob("*.json")
    (plot,) = Path().glob("*.png")
    assert file.stem.endswith("-train_step") and plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(file.read_text())
    assert record["baselines"] == {"ddp_autocast": "in fp32 it is ddp", "deepspeed1": "not installed"}
    assert "deepspeed1: not installed" in first.out
    names = ["stage1", "stage2", DDP]
    rows = {(row["tokens"], row["backend"]): row for row in record["rows"]}
    assert [*rows] == [(tokens, name) for tokens in (32, 64) for name in names]
    for (tokens, _), row in rows.items():
        baseline = rows[tokens, DDP]
        assert (row["op"], row["dtype"], row["ranks"], row["rounds"]) == ("train_step", "fp32", 2, 2)
        assert row["numel"] == baseline["numel"] > 40_000
        assert row["tokens_per_s"] == pytest.approx(2 * tokens / row["ms"] * 1e3, rel=1e-3)
        assert row["vs_torch"] == pytest.approx(baseline["ms"] / row["ms"], abs=1e-3)
        assert row["phases"].keys() == {"forward", "backward", "clip", "update", "zero_grad"}
        assert row["loss"] == pytest.approx(baseline["loss"], rel=1e-4)
        if peak_memory.can_measure():
            assert 0 < row["memory"]["steady"] <= row["memory"]["start"] < 2**30
    assert rows[32, DDP]["loss"] != rows[64, DDP]["loss"]
    assert "tokens/s" in first.out and "vs ddp" in first.out
    assert all(f"train_step, 2 ranks, {tokens} tokens each: " in first.out for tokens in (32, 64))
    draws_again(first, file, plot)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train_step", "--contenders", "apex"], ["--contenders apex", "stage0", "fsdp2_zero2", "deepspeed2"]),
        (["train_step", "pack"], ["train_step is measured alone", "pack"]),
        (["train_step", "--dtypes", "fp16"], ["--dtypes fp16", "bf16 or fp32"]),
        (["train_step", "--device", "cuda"], ["--device cuda", "on the CPU"]),
        (["train_step", "--numel", "1Mi", "2Mi"], ["--numel", "one size"]),
        (["step_overhead", "--contenders", "ddp"], ["--contenders", "it is of train_step, offload"]),
        (["step_overhead", "--backends", "cpu"], ["--backends", "step_overhead"]),
        (["train_step", "--tokens", "100"], ["--tokens 100", "windows of 64"]),
        (["train_step", "--tokens", "0"], ["--tokens 0", "at least 1"]),
        (["step_overhead", "--tokens", "64"], ["--tokens", "it is of train_step\n"]),
        (["pack", "--tokens", "64"], ["--tokens", "it is of train_step\n"]),
        (["pack", "--contenders", "ddp"], ["--contenders", "it is of train_step, offload"]),
        (["pack", "--dtypes", "fp32"], ["--dtypes fp32", "pack", "fp16 and bf16"]),
    ],
    ids=lambda value: "-".join(value) if value[0] in ("train_step", "step_overhead", "pack") else None,
)
def test_bad_arguments(refuses, arguments, parts):
    refuses(*arguments, "--out", "results", saying=parts)


def test_who_fails_is_left_out_and_ours_never():
    lines: list[str] = []

    def fail(count, work, task, name, device):
        if name != DDP:
            raise ranks.RanksError(f"rank 0: {name} broke")
        return [Alone(1, 2, (5.0,)), Alone(3, 4, (6.0,))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "on_ranks", fail)
        alone, left_out = train_step.train_alone(contest_of(DDP, "fsdp2"), lines.append)
        with pytest.raises(ranks.RanksError, match="stage0 broke"):
            train_step.train_alone(contest_of(DDP, "stage0"), lines.append)
    assert alone == {DDP: Alone(3, 4, (5.5,))} and left_out == {"fsdp2": "rank 0: fsdp2 broke"}
    assert "left out: fsdp2: rank 0: fsdp2 broke" in lines


def test_the_slower_rank_counts_in_every_round():
    first = {"a": [{"x": 1.0, "y": 1.0}, {"x": 5.0, "y": 1.0}]}
    second = {"a": [{"x": 2.0, "y": 2.0}, {"x": 1.0, "y": 1.0}]}
    assert slower([first, second], in_all) == {"a": [{"x": 2.0, "y": 2.0}, {"x": 5.0, "y": 1.0}]}
    contest = contest_of(DDP, dtype=torch.bfloat16, batch=8)
    (row,) = train_step.make_rows(contest, 10, {DDP: Alone(None, None, (1.5,))}, {DDP: [{"x": 2.0, "y": 2.0}] * 3})
    assert (row.ms, row.phases, row.memory, row.loss, row.dtype) == (4.0, {"x": 2.0, "y": 2.0}, None, 1.5, "bf16")
    assert row.tokens_per_s == 2 * 8 * 16 / 4e-3


# -- ranks and memory --------------------------------------------------------------------------------------------------


def meet(text: str) -> tuple[int, int, int, str]:
    print("printed on a rank")
    total = torch.ones(1)
    dist.all_reduce(total)
    return dist.get_rank(), int(total), torch.get_num_threads(), text


def test_fresh_ranks_meet_and_print_nothing(capfd):
    assert ranks.on_ranks(2, meet, "given") == [(0, 2, 1, "given"), (1, 2, 1, "given")]
    assert "printed" not in "".join(capfd.readouterr())


class Answers:
    """Two ranks as ``_collect`` sees them: what they send, or None for one that dies, or says nothing."""

    def __init__(self, folder: Path, answers: dict[int, object]) -> None:
        self.places = [ranks._Place(rank, 2, folder, port=0, threads=1) for rank in range(2)]
        pipes = [Pipe(duplex=False) for _ in range(2)]
        self.connections = [here for here, _ in pipes]
        self.open = [there for rank, (_, there) in enumerate(pipes) if rank not in answers]
        for rank, answer in answers.items():
            if answer is not None:
                pipes[rank][1].send(answer)
            pipes[rank][1].close()

    def collect(self) -> list[object]:
        return ranks._collect(self.places, self.connections, limit=0.2)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({0: (True, 1), 1: (False, "ValueError: no luck")}, "rank 1: ValueError: no luck"),
        ({0: None, 1: (False, "RuntimeError: Connection closed by peer")}, "rank 0: the process died; .* 'its last'"),
        ({1: (False, "ValueError: no luck")}, "rank 1: ValueError: no luck"),
        ({1: (True, 2)}, "rank 0 had not finished after 0 s"),
    ],
)
def test_a_rank_that_fails_is_told(tmp_path, answers, message):
    (tmp_path / "rank-0.log").write_text("its first\nits last\n\n")
    with pytest.raises(ranks.RanksError, match=f"^{message}$"):
        Answers(tmp_path, answers).collect()
    assert Answers(tmp_path, {0: (True, "a"), 1: (True, "b")}).collect() == ["a", "b"]


@pytest.mark.skipif(not peak_memory.can_measure(), reason="needs Linux with glibc")
def test_the_peak_is_that_of_the_work_and_not_of_what_came_before():
    size = 64 * 2**20
    del_me = torch.ones(2 * size // 4)
    del del_me
    before = peak_memory.resident()

    def work() -> None:
        torch.ones(size // 4)

    assert peak_memory.peak_of(work) - before == pytest.approx(size, rel=0.1)
    assert peak_memory.peak_of(lambda: None) - before < size / 4
