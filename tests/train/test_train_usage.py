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
from zero_optim.train import model
from zero_optim.train.model import TrainConfig, fresh_config, has_bf16_units
from zero_optim_cli.train import add_arguments


def expect_usage_error(outcome: object, *parts: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.err.count("\n") == 1 and "Traceback" not in outcome.err, outcome.err
    for part in ("zero-optim", *parts):
        assert part in outcome.err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("", ["command"]),
        ("tarin", ["tarin", "train"]),
        ("train --bogus 1", ["--bogus"]),
        ("train --stage 4", ["--stage", "0, 1, 2, 3"]),
        ("train --steps many", ["--steps", "invalid int value: 'many'"]),
        ("train --steps 0", ["--steps", "0: at least 1"]),
        ("train --lr nan", ["--lr", "positive"]),
        ("train --lr -1", ["--lr", "positive"]),
        ("train --muon-lr 0 --optimizer muon", ["--muon-lr", "positive"]),
        ("train --param-offload cpu", ["--param-offload cpu", "--stage 3"]),
        ("train --state-offload tape", ["--state-offload", "tape"]),
        ("train --weight-decay -1", ["--weight-decay", "-1: at least 0"]),
        ("train --keep-last -1", ["--keep-last", "-1: at least 0"]),
        ("train --hidden 100 --heads 3", ["--hidden 100", "--heads 3"]),
        ("train --hidden 9 --heads 3", ["--hidden 9", "twice --heads"]),
        ("train --resume /nowhere", ["--resume /nowhere", "no complete checkpoint"]),
        ("train --resume auto", ["--resume auto", "--out"]),
        ("train --no-checkpoint --save-every 2", ["--no-checkpoint", "--save-every"]),
        ("train --ranks 0", ["--ranks", "0: at least 1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments(zero_optim: Callable, arguments: str, parts: list[str]) -> None:
    """Refused before text is read, ranks start, or a folder is made."""
    outcome = zero_optim(*arguments.split())
    expect_usage_error(outcome, *parts)
    assert outcome.out == "" and list(Path().iterdir()) == []


def test_too_little_text(zero_optim: Callable, tmp_path: Path) -> None:
    for content, part in ((b"", "empty"), (b"short", "fewer than one window of 17")):
        (tmp_path / "text").write_bytes(content)
        expect_usage_error(zero_optim("train", *TINY, "--data", tmp_path / "text"), str(tmp_path / "text"), part)
    (tmp_path / "folder").mkdir()
    expect_usage_error(zero_optim("train", "--data", tmp_path / "folder"), "no byte to train on")
    expect_usage_error(zero_optim("train", "--data", tmp_path / "gone"), f"--data {tmp_path / 'gone'}: No such file")


def test_more_ranks_than_gpus(zero_optim: Callable) -> None:
    ranks = torch.cuda.device_count() + 1
    outcome = zero_optim("train", "--device", "cuda", "--ranks", str(ranks))
    expect_usage_error(outcome, f"{ranks} ranks", f"{ranks - 1} GPUs")


def test_output_folders_that_cannot_be(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    flags = ["train", *TINY, "--steps", "1", "--data", text, "--out", tmp_path / "run"]
    assert zero_optim(*flags).code == 0
    log = (tmp_path / "run" / "log.jsonl").read_text()
    expect_usage_error(zero_optim(*flags), "already holds a run", "--resume")
    assert (tmp_path / "run" / "log.jsonl").read_text() == log
    (tmp_path / "file").touch()
    expect_usage_error(zero_optim(*flags[:-1], tmp_path / "file" / "run"), "--out", "Not a directory")


def test_resuming_another_model_another_text_or_nothing(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    assert zero_optim("train", *TINY, "--steps", "1", "--data", text, "--out", run).code == 0
    other.write_bytes(bytes(500))
    again = ["train", "--resume", run, "--steps", "2"]
    expect_usage_error(zero_optim(*again, "--hidden", "64"), "--hidden 64", "--hidden 32")
    expect_usage_error(zero_optim(*again, "--data", other), str(other), "not the text")
    expect_usage_error(zero_optim("train", "--resume", tmp_path), "no complete checkpoint")
    (run / "checkpoint" / "step-1" / "rank-0.safetensors").write_bytes(b"no tensors")
    outcome = zero_optim(*again)
    assert outcome.code == 1 and "rank-0.safetensors has 10 bytes" in outcome.err and "Traceback" not in outcome.err


def leave_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the standard output be a pipe whose other end was closed, as ``head`` leaves it."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stdout", os.fdopen(writing, "w"))


def test_output_that_nobody_reads(
    zero_optim: Callable, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training saves and ends; a table is cut off."""
    leave_unread(monkeypatch)
    outcome = zero_optim("train", *TINY, *ENDLESS, "--data", text, "--out", tmp_path / "run")
    assert outcome.code == 130 and "Error" not in outcome.err
    assert saved_steps(tmp_path / "run") == [1] and len(read_log(tmp_path / "run")) == 1
    leave_unread(monkeypatch)
    outcome = zero_optim("plan", "--model", "gpt2", "--stage", "0")
    assert (outcome.code, outcome.err) == (141, "")


def test_the_help_has_every_flag_with_its_default() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    stated = {action.dest: re.findall(r"\(([^();]*)[^()]*\)", action.help)[-1:] for action in parser._actions}
    assert {field.name for field in fields(TrainConfig)} <= stated.keys()
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
    wrong = ["", "tarin", "train --stpes 1", "train --stage 4", "train --steps 0", "plan --params many"]
    wrong += ["plan --model gpt2 --offload tape", "plan --model gpt2 --gpu-memory 24", "bench --numel x"]
    command = [sys.executable, "-c", script, *helps, *wrong]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    codes = [line for line in done.stderr.splitlines() if not line.startswith("zero-optim")]
    assert codes == ["0"] * len(helps) + ["2"] * len(wrong), done.stderr
    assert '\nzero-optim = "zero_optim_cli:main"\n' in (ROOT / "pyproject.toml").read_text()


def test_the_dtype_follows_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "has_bf16_units", lambda device: False)
    made = fresh_config({}, "cpu")
    assert (made.dtype, made.steps, made.batch) == ("fp32", 250, 2)
    assert fresh_config({"dtype": "bf16"}, "cpu") == TrainConfig()
    assert fresh_config({"steps": 7}, "cpu").steps == 7
    assert fresh_config({"master": "split"}, "cpu") == TrainConfig(master="split")  # which fp32 parameters cannot have
    assert fresh_config({}, "cuda") == TrainConfig(dtype="fp32", device="cuda")
    monkeypatch.setattr(model, "has_bf16_units", lambda device: True)
    assert fresh_config({}, "cpu") == TrainConfig()


def test_units_for_bf16_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(**capabilities: object) -> bool:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
        return has_bf16_units("cpu")

    assert on(avx2=True, avx512_bf16=True) and on(amx_bf16=True) and on(arm_sve_bf16=True)
    assert not on(avx2=True, avx512_bf16=False, cpu_name="bf16", cache_bf16=64)
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as before torch 2.11
    assert not has_bf16_units("cpu")
