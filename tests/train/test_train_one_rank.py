"""One rank, in this process: what a run writes, and that it resumes exactly."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_files import read_tensors, weights_in
from training import TINY, read_log, saved_steps, without_speed
from zero_optim import GradScaler
from zero_optim.train import loop, run_dir
from zero_optim.train.loop import draw_windows, load_corpus, unigram_entropy
from zero_optim.train.model import GPT, ModelConfig, generate, next_byte_loss

KEYS = ["step", "loss", "lr", "grad_norm", "loss_scale", "tokens_per_s", "ms"]
PHASES = ["data and forward", "backward", "step"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "bf16", "--master", "split", "--state-dtype", "int8"],
        ["--dtype", "fp16", "--accumulate", "3"],
        ["--dtype", "fp32", "--stage", "0"],
        ["--optimizer", "muon", "--muon-lr", "0.01"],
    ],
    ids=["bf16-small-state", "fp16-accumulate", "fp32", "muon"],
)
def test_a_resumed_run_repeats_the_whole_one(
    zero_optim: Callable, text: Path, tmp_path: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A scale that grows every other step shows in six steps whether the scaler's own count came back.
    monkeypatch.setattr(loop, "GradScaler", functools.partial(GradScaler, init_scale=64.0, growth_interval=2))
    whole, again = tmp_path / "whole", tmp_path / "again"
    common = ["--steps", "6", "--save-every", "3", "--data", text, "--out", whole]
    assert zero_optim("train", *TINY, *flags, *common).code == 0
    resumed = zero_optim("train", "--resume", whole / "checkpoint" / "step-3", "--out", again)
    assert resumed.code == 0, resumed.err
    records = read_log(whole)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert without_speed(read_log(again)) == without_speed(records[3:])
    saved = [read_tensors(run / "checkpoint" / "step-6") for run in (whole, again)]
    assert saved[0].keys() == saved[1].keys() and len(saved[0]) > 20
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])


def test_what_a_run_writes_and_prints(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [*TINY, "--steps", "3", "--accumulate", "2", "--data", text, "--out", run]
    outcome = zero_optim("train", *flags, whole=True)
    assert outcome.code == 0 and "100%" in outcome.err
    lines = read_log(run)
    assert [list(line) for line in lines] == [KEYS] * 3
    assert all(line["loss_scale"] == 1.0 and line["tokens_per_s"] > 0 and line["grad_norm"] > 0 for line in lines)
    for ms in (line["ms"] for line in lines):
        assert list(ms) == [*PHASES, "whole"]
        assert 0 < sum(ms[phase] for phase in PHASES) <= ms["whole"]
    corpus = load_corpus(str(text), 16)
    session = json.loads((run / "run.json").read_text())
    end = session["ending"]
    assert (end["outcome"], end["step"], end["entropy"]) == ("finished", 3, unigram_entropy(corpus.validation))
    assert end["ranks"][0]["peak_bytes"] > 50e6  # torch alone takes more
    for phase, seconds in end["ranks"][0]["seconds"].items():
        assert sum(line["ms"][phase] for line in lines) == pytest.approx(1000 * seconds, abs=0.01)
    assert session["command"] == f"zero-optim train {' '.join(map(str, flags))}"
    assert session["config"]["hidden"] == 32 and f"model  {session['facts']['model']}\n" in outcome.out
    assert f"validation loss {end['validation_loss']:.4f}\n" in outcome.out
    assert f"unigram entropy {end['entropy']:.4f}\n" in outcome.out
    assert "communication, rank 0\n" in outcome.out and "  none: one rank" in outcome.out
    assert outcome.out.endswith(f"page of the run: {run / 'report.html'}\nwritten to {run}\n")
    assert (run / "sample.txt").read_bytes()[:32] == bytes(corpus.validation[:32].tolist())
    assert (run / "report.html").exists() and (run / "loss.png").exists() != ("loss.png was not written" in outcome.out)


def test_telemetry_is_logged_where_it_is_asked_for(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = (*TINY, "--steps", "4", "--no-checkpoint", "--data", text, "--telemetry-every", "2", "--out", run)
    assert zero_optim("train", *flags).code == 0
    lines = read_log(run)
    assert [line["step"] for line in lines if "telemetry" in line] == [2, 4]
    for line in lines[1::2]:
        norms = [value for name, value in line["telemetry"].items() if name.startswith("grad_norm/")]
        assert len(line["telemetry"]) == 5 * len(norms)
        assert math.hypot(*norms) == pytest.approx(min(line["grad_norm"], 1.0), rel=2e-3)  # four digits of each


def test_tensorboard_has_what_the_log_has(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    flags = ["--steps", "4", "--save-every", "2", "--data", text, "--out", run]
    assert zero_optim("train", *TINY, *flags, whole=True).code == 0
    assert zero_optim("train", "--resume", run / "checkpoint" / "step-2", "--steps", "5", whole=True).code == 0
    events = accumulator.EventAccumulator(str(run / "tensorboard")).Reload()
    for name in ("loss", "grad_norm", "lr", "tokens_per_s"):
        seen = [(event.step, event.value) for event in events.Scalars(name)]
        assert seen == [(line["step"], pytest.approx(line[name], rel=1e-6)) for line in read_log(run)]
    assert {f"ms/{phase}" for phase in PHASES} <= {*events.Tags()["scalars"]}


def test_without_the_extra_a_run_prints_what_is_left_out(
    zero_optim: Callable, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "import_module", lambda name: exec("raise ImportError"))
    outcome = zero_optim("train", *TINY, "--steps", "1", "--data", text, "--out", tmp_path / "run")
    assert outcome.code == 0 and outcome.err == ""
    for what in ("tensorboard is not installed", "tqdm is not installed", "loss.png was not written: "):
        assert len(re.findall(f"^{what}", outcome.out, re.MULTILINE)) == 1
    assert not (tmp_path / "run" / "tensorboard").exists() and (tmp_path / "run" / "report.html").exists()


def test_a_step_averages_its_micro_batches(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    flags = ["--dtype", "fp32", "--accumulate", "3", "--steps", "1", "--seed", "4", "--data", text]
    assert zero_optim("train", *TINY, *flags, "--out", tmp_path / "run").code == 0
    torch.manual_seed(4)
    model = GPT(ModelConfig(layers=1, hidden=32, heads=2, seq=16), torch.float32)
    corpus = load_corpus(str(text), 16)
    loss = next_byte_loss(model, draw_windows(corpus.train, 16, range(6), seed=4, step=1))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    (record,) = read_log(tmp_path / "run")
    assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_the_learning_rate_warms_up_and_falls_to_a_tenth(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    flags = ["--steps", "40", "--warmup", "4", "--lr", "1e-3", "--data", text, "--out", tmp_path / "run"]
    assert zero_optim("train", *TINY, *flags).code == 0
    rates = [record["lr"] for record in read_log(tmp_path / "run")]
    assert rates[:5] == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4, 1e-3])
    assert all(a >= b for a, b in itertools.pairwise(rates[4:]))
    assert rates[22] == pytest.approx(5.5e-4)  # half-way
    assert rates[-1] == pytest.approx(1e-4, rel=0.03)


def test_training_learns_the_text(zero_optim: Callable, text: Path) -> None:
    outcome = zero_optim("train", *TINY, "--batch", "8", "--lr", "1e-2", "--steps", "80", "--data", text)
    said = dict(line.rsplit(" ", 1) for line in outcome.out.splitlines() if line.startswith(("validation", "unigram")))
    assert float(said["validation loss"]) < 0.75 * float(said["unigram entropy"])
    assert outcome.out.splitlines()[-1].startswith(f"written to {Path.cwd()}/runs/")


def test_fp16_on_a_cpu_is_small_and_scaled(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    flags = ["--dtype", "fp16", "--steps", "2", "--device", "cpu", "--data", text, "--seq", "16"]
    outcome = zero_optim("train", *flags, "--out", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    shrunk = sum(parameter.numel() for parameter in GPT(ModelConfig(2, 128, 2, 16), torch.float16).parameters())
    assert f"model  {shrunk:,} parameters in fp16" in outcome.out
    assert read_log(tmp_path / "run")[-1]["loss_scale"] > 1 and ", scale=" in outcome.err


def test_a_damaged_checkpoint_is_left_for_the_one_before_it(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ["--steps", "4", "--save-every", "2", "--data", text, "--out", run]
    assert zero_optim("train", *TINY, *flags).code == 0
    whole = read_log(run)
    file = run / "checkpoint" / "step-4" / "rank-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1  # its length is right: only a checksum shows it
    file.write_bytes(data)
    outcome = zero_optim("train", "--resume", "auto", *flags)
    assert outcome.code == 0, outcome.err
    assert re.search(r"step-2 was loaded, and none that is newer: .*rank-0.safetensors is damaged", outcome.out)
    assert ", after step 2\n" in outcome.out
    assert without_speed(read_log(run)) == without_speed(whole)
    assert saved_steps(run) == [2, 4]
    session = json.loads((run / "run.json").read_text())
    assert (session["after_step"], session["resumed_from"], session["ending"]["ranks"][0]["steps"]) == (2, str(run), 2)


def test_resume_auto_begins_where_there_is_nothing_and_ends_where_all_is_done(
    zero_optim: Callable, text: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = [*TINY, "--resume", "auto", "--steps", "5", "--save-every", "1", "--keep-last", "2", "--data", text]
    first = zero_optim("train", *flags, "--out", run)
    assert first.code == 0 and ", after step" not in first.out
    assert saved_steps(run) == [4, 5]
    records = read_log(run)
    again = zero_optim("train", *flags, "--out", run)
    assert again.code == 0 and "all 5 steps are done" in again.out
    assert read_log(run) == records
    # Died before its first checkpoint: the log begins anew.
    shutil.rmtree(run / "checkpoint")
    assert zero_optim("train", *flags, "--out", run).code == 0
    assert without_speed(read_log(run)) == without_speed(records)


def test_resuming_at_another_stage_and_dtype(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert zero_optim("train", *TINY, "--steps", "2", "--data", text, "--out", run).code == 0
    outcome = zero_optim("train", "--resume", run, "--steps", "3", "--dtype", "fp32", "--stage", "0")
    assert outcome.code == 0, outcome.err
    assert {tensor.dtype for tensor in weights_in(run / "checkpoint" / "step-3").values()} == {torch.float32}
    assert [record["step"] for record in read_log(run)] == [1, 2, 3]


def test_the_model_never_looks_ahead() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=2, hidden=32, heads=2, seq=16), torch.float32)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = (changed[0, 10:] + 1) % 256
    first, second = model(tokens), model(changed)
    assert torch.allclose(first[:, :10], second[:, :10], atol=1e-6)
    assert not torch.allclose(first[:, 10:], second[:, 10:], atol=1e-3)


def test_a_fresh_model_is_near_uniform_with_a_loss_in_fp32() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=2, hidden=64, heads=2, seq=16), torch.bfloat16)
    loss = next_byte_loss(model, torch.randint(0, 256, (8, 17)))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_a_sample_goes_past_the_window_and_repeats() -> None:
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=1, hidden=32, heads=2, seq=8), torch.float32)
    samples = [generate(model, torch.arange(4), 20, seed=7) for _ in range(2)]
    assert torch.equal(*samples) and samples[0].numel() == 24 and torch.equal(samples[0][:4], torch.arange(4))
