"""What can't be had is one clear line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from training import ENDLESS, ROOT, TINY, environment, read_log, saved_steps
from zero_optim.train import config, report
from zero_optim.train.config import TrainConfig, fresh_config, has_bf16_units
from zero_optim.train.run_dir import StepRecord
from zero_optim_cli.train import add_arguments


def expect_usage_error(outcome: object, *parts: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1 and "Traceback" not in outcome.err, outcome.err
    for part in ("zero-optim", *parts):
        assert part in outcome.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["command"]),
        (["tarin"], ["tarin", "train"]),
        (["train", "--bogus", "1"], ["--bogus"]),
        (["train", "--stage", "4"], ["--stage", "0, 1, 2, 3"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "--steps", "0"], ["--steps 0", "at least 1"]),
        (["train", "--lr", "nan"], ["--lr", "positive"]),
        (["train", "--lr", "-1"], ["--lr", "positive"]),
        (["train", "--optimizer", "muon", "--muon-lr", "0"], ["--muon-lr 0", "positive"]),
        (["train", "--muon-lr", "0.02"], ["--muon-lr 0.02", "--optimizer muon alone"]),
        (
            ["train", "--optimizer", "muon", "--stage", "3", "--state-offload", "cpu"],
            ["--optimizer muon", "leave out --state-offload", "--stage 2"],
        ),
        (["train", "--weight-decay", "-1"], ["--weight-decay", "below 0"]),
        (["train", "--hidden", "100", "--heads", "3"], ["--hidden 100", "--heads 3"]),
        (["train", "--hidden", "9", "--heads", "3"], ["--hidden 9", "even"]),
        (["train", "--data", "/nowhere"], ["--data /nowhere", "no such file"]),
        (["train", "--resume", "auto"], ["--resume auto", "--out"]),
        (["train", "--no-checkpoint", "--save-every", "2"], ["--no-checkpoint", "--save-every"]),
        (["train", "--no-checkpoint", "--keep-last", "2"], ["--no-checkpoint", "--keep-last"]),
        (["train", "--keep-last", "-1"], ["--keep-last", "below 0"]),
        (["train", "--resume", "/nowhere"], ["--resume /nowhere", "no such file"]),
        (["train", "--ranks", "0"], ["--ranks 0"]),
        (["train", "--ranks", "100000"], ["--ranks 100000", "cores"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments(zero_optim: Callable, arguments: list[str], parts: list[str]) -> None:
    expect_usage_error(zero_optim(*arguments), *parts)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("content", "parts"),
    [(b"", ["empty"]), (b"short", ["fewer than one window of 17"])],
    ids=["empty", "short"],
)
def test_text_that_is_too_little(zero_optim: Callable, tmp_path: Path, content: bytes, parts: list[str]) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    expect_usage_error(zero_optim("train", *TINY, "--data", file), str(file), *parts)


def test_a_folder_without_text(zero_optim: Callable, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    expect_usage_error(zero_optim("train", "--data", tmp_path / "folder"), "no file")


def test_more_ranks_than_gpus(zero_optim: Callable) -> None:
    ranks = torch.cuda.device_count() + 1
    outcome = zero_optim("train", "--device", "cuda", "--ranks", str(ranks))
    expect_usage_error(outcome, f"{ranks} ranks", f"{ranks - 1} GPUs")


def test_a_folder_that_holds_a_run_is_not_overwritten(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    flags = ["train", *TINY, "--steps", "1", "--data", text, "--out", tmp_path / "run"]
    assert zero_optim(*flags).code == 0
    log = (tmp_path / "run" / "log.jsonl").read_text()
    expect_usage_error(zero_optim(*flags), "already holds a run", "--resume")
    assert (tmp_path / "run" / "log.jsonl").read_text() == log


def test_what_checkpoints_need_is_missed_before_the_first_step(
    zero_optim: Callable, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    flags = ["train", *TINY, "--steps", "2", "--data", text, "--out", tmp_path / "run"]
    expect_usage_error(zero_optim(*flags), "google-crc32c", "pip install", "--no-checkpoint")
    assert not (tmp_path / "run").exists()
    assert zero_optim(*flags, "--no-checkpoint").code == 0
    assert (tmp_path / "run" / "log.jsonl").exists() and not (tmp_path / "run" / "checkpoint").exists()


def test_an_output_folder_that_cannot_be_made(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = zero_optim("train", *TINY, "--data", text, "--out", tmp_path / "file" / "run")
    expect_usage_error(outcome, "--out", "Not a directory")


def test_resuming_another_model_another_text_or_nothing(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    assert zero_optim("train", *TINY, "--steps", "1", "--data", text, "--out", run).code == 0
    other.write_bytes(bytes(500))
    again = ["train", "--resume", run, "--steps", "2"]
    expect_usage_error(zero_optim(*again, "--hidden", "64"), "--hidden 64", "--hidden 32")
    expect_usage_error(zero_optim(*again, "--data", other), str(other), "not the text")
    expect_usage_error(zero_optim("train", "--resume", run), "all 1 steps are done", "--steps")
    expect_usage_error(zero_optim("train", "--resume", tmp_path), "no complete checkpoint")


@pytest.mark.parametrize("ranks", [[], ["--ranks", "2"]])
def test_a_model_that_cannot_be_is_refused_before_text_is_read_or_ranks_start(
    zero_optim: Callable, ranks: list[str]
) -> None:
    outcome = zero_optim("train", "--heads", "5", "--device", "cpu", *ranks)
    expect_usage_error(outcome, "--hidden 192", "--heads 5")
    assert outcome.out == ""


def leave_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the standard output be a pipe whose other end was closed, as ``head`` leaves it."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))


def test_training_that_nobody_reads_saves_and_ends(
    zero_optim: Callable, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_unread(monkeypatch)
    outcome = zero_optim("train", *TINY, *ENDLESS, "--data", text, "--out", tmp_path / "run")
    assert (outcome.code, outcome.err) == (130, "")
    assert saved_steps(tmp_path / "run") == [1] and len(read_log(tmp_path / "run")) == 1


def test_a_table_that_nobody_reads(zero_optim: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_unread(monkeypatch)
    outcome = zero_optim("plan", "--model", "gpt2", "--stage", "0")
    assert (outcome.code, outcome.err) == (141, "")


def test_the_help_has_the_defaults() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    stated = {action.dest: re.findall(r"\(([^();]*)[^()]*\)", action.help)[-1:] for action in parser._actions}
    defaults = {field.name: field.default for field in fields(TrainConfig) if type(field.default) in (int, float)}
    assert {name: [float(text) for text in stated[name]] for name in defaults} == {
        name: [value] for name, value in defaults.items()
    }


def test_arguments_are_read_before_torch_is_imported() -> None:
    script = """if True:
        import sys, zero_optim_cli
        for line in sys.argv[1:]:
            try:
                zero_optim_cli.main(line.split())
            except SystemExit as end:
                print(end.code, *sorted({"torch", "zero_optim", "zero_kernels"} & {*sys.modules}), file=sys.stderr)
    """
    helps = ["--help", "train --help", "plan --help", "bench --help", "export --help"]
    wrong = [
        "",
        "tarin",
        "train --stpes 1",
        "train --stage 4",
        "plan --params many",
        "plan --model gpt2 --offload tape",
    ]
    wrong += ["plan --model gpt2 --gpu-memory 24", "plan --params 1B --lora 2 --trainable 1%", "bench --numel x"]
    command = [sys.executable, "-c", script, *helps, *wrong]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    codes = [line for line in done.stderr.splitlines() if not line.startswith("zero-optim")]
    assert codes == ["0"] * len(helps) + ["2"] * len(wrong), done.stderr
    assert '\nzero-optim = "zero_optim_cli:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_dtype_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "has_bf16_units", lambda device: False)
    made = fresh_config({}, "cpu")
    assert (made.dtype, made.steps, made.batch) == ("fp32", 250, 2)
    assert fresh_config({"dtype": "bf16"}, "cpu") == TrainConfig()
    assert fresh_config({"steps": 7}, "cpu").steps == 7
    assert fresh_config({"master": "split"}, "cpu") == TrainConfig(master="split")  # which fp32 parameters cannot have
    assert fresh_config({}, "cuda") == TrainConfig(dtype="fp32", device="cuda")
    monkeypatch.setattr(config, "has_bf16_units", lambda device: True)
    assert fresh_config({}, "cpu") == TrainConfig()


def test_units_for_bf16_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(**capabilities: object) -> bool:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        return has_bf16_units("cpu")

    assert on(avx2=True, avx512_bf16=True) and on(amx_bf16=True) and on(arm_sve_bf16=True)
    assert not on(avx2=True, avx512_bf16=False, cpu_name="bf16", cache_bf16=64)
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as before torch 2.11
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert not has_bf16_units("cpu")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert has_bf16_units("cpu")


@pytest.mark.parametrize("units", [False, True])
def test_what_the_hardware_lacks_is_told(
    zero_optim: Callable, text: Path, monkeypatch: pytest.MonkeyPatch, units: bool
) -> None:
    monkeypatch.setattr(config, "has_bf16_units", lambda device: units)
    flags = [*TINY[: TINY.index("--dtype")], "--steps", "1", "--no-checkpoint", "--data", text]
    said = zero_optim("train", *flags).out
    assert ("\nfp32: no bf16 units in this CPU" in "\n" + said) is not units
    assert f"parameters in {'bf16' if units else 'fp32'}:" in said and "scale" not in said


def test_lines_have_the_time_to_go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By the mean of the steps after the first, which is slower."""
    now = iter([100.0, 110.0, 120.0, 130.0, 140.0])
    monkeypatch.setattr(report.time, "monotonic", lambda: next(now))
    progress = report.Progress(20, 45, scaled=True)
    for step in (21, 22, 23, 44, 45):
        progress.show(StepRecord(step, 1.0, 0.1, None, 64.0, 1000.0))
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith("scale 64") for line in (lines[0], lines[-1]))
    assert [line.split("scale 64")[1].strip() for line in lines[1:3]] == ["3:50 to go", "3:40 to go"]


def test_help_and_version(zero_optim: Callable) -> None:
    shown = zero_optim("train", "--help")
    assert shown.code == 0
    for flag in ("stage", "dtype", "layers", "hidden", "heads", "seq", "batch", "accumulate", "steps", "lr", "seed"):
        assert f"--{flag} " in shown.out
    for flag in ("--data", "--out", "--save-every", "--keep-last", "--resume"):
        assert flag in shown.out
    version = zero_optim("--version")
    assert version.code == 0 and version.out.startswith("zero-optim 0.")
