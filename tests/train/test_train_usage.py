"""What can't be had is one clear line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from training import ENDLESS, TINY, read_log, saved_steps
from zero_optim.train.config import TrainConfig, add_arguments


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
    stated = {action.dest: re.findall(r"\(([^()]*)\)", action.help)[-1:] for action in parser._actions}
    defaults = {field.name: field.default for field in fields(TrainConfig) if type(field.default) in (int, float)}
    assert {name: [float(text) for text in stated[name]] for name in defaults} == {
        name: [value] for name, value in defaults.items()
    }


def test_help_and_version(zero_optim: Callable) -> None:
    shown = zero_optim("train", "--help")
    assert shown.code == 0
    for flag in ("stage", "dtype", "layers", "hidden", "heads", "seq", "batch", "accumulate", "steps", "lr", "seed"):
        assert f"--{flag} " in shown.out
    for flag in ("--data", "--out", "--save-every", "--keep-last", "--resume"):
        assert flag in shown.out
    version = zero_optim("--version")
    assert version.code == 0 and version.out.startswith("zero-optim 0.")
