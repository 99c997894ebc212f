"""``zero-optim doctor`` says what is active, and why the rest is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import Command
from zero_optim.doctor import report

from zero_kernels import compiled, use_backend


def fact(text: str, name: str) -> str:
    return next(line.strip()[len(name) :].strip() for line in text.splitlines() if line.strip().startswith(name))


def test_the_module_and_the_command_are_the_same(tmp_path: Path) -> None:
    command = Command(["-m", "zero_optim", "doctor"], tmp_path)
    assert command.finish() == 0, command.output
    assert fact(command.output, "torch") == torch.__version__


def test_what_runs_is_what_the_kernels_say(zero_optim: Callable) -> None:
    outcome = zero_optim("doctor")
    assert outcome.code == 0
    status = compiled.status()
    assert fact(outcome.out, "on cpu tensors").split()[0] == ("cpu" if status.loaded else "reference")
    if status.loaded:
        assert fact(outcome.out, "instruction set") == f"{status.isa} in use, of {', '.join(status.isas)}"
    for backend in ("gloo", "nccl"):
        assert fact(outcome.out, backend)


def test_a_failed_build_shows_its_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = compiled.Status(
        loaded=False,
        path=None,
        build_error="$ c++ -c ops.cpp\nops.cpp:1: no such header\n",
        load_error="it was not built",
    )
    monkeypatch.setattr(compiled, "status", lambda name: failed)
    text = report()
    assert fact(text, "file") == "not there"
    assert fact(text, "not in use") == "it was not built"
    assert fact(text, "not built") == "$ c++ -c ops.cpp"
    assert "ops.cpp:1: no such header" in text


def test_a_forced_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_KERNELS_BACKEND", "reference")
    assert fact(report(), "forced").startswith("reference")
    with use_backend("reference"):
        assert fact(report(), "on cpu tensors")
