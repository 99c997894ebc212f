"""``make gpu-check``, rehearsed on the CPU: every phase ends, failures and hangs are named, outcomes are kept."""

from __future__ import annotations

import json
import os
import runpy
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import gpu_memory
import gpu_profile
import gpu_ranks
import gpu_trainer
import pytest
import torch
from cells import slow
from gpu_check import FAILED, NOT_RUN, OK, PARTS, SKIPPED, TIMED_OUT, Outcome, Phase, Run
from zero_optim import memory
from zero_optim.bench.record import Result
from zero_optim.cli import main

ROOT = Path(__file__).resolve().parents[2]
FEW = ("build", "bench_adam_step", "profile", "nccl_two_ranks", "train_step")
ALL = (*FEW, "test_large", "test_each_collective", "test_nccl_ranks", "test_work_order", "link", "memory", "trainer")
ALL += ("test_symmetric_product",)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def phases_of(part: str, device: str = "cuda", nccl: Path | None = None) -> list[list[Phase]]:
    return gpu_check.groups_of(part, device, Path("out"), nccl)


@pytest.fixture
def check(tmp_path: Path) -> Any:
    """``check(*phases)`` runs them at the same time; gives their outcomes."""

    def run(*phases: Phase, seconds: float = 60.0) -> dict[str, Outcome]:
        of = Run("test", Result(torch.device("cpu"), tmp_path, about="gpu-test"), tmp_path, seconds)
        of.group(phases)
        (path,) = tmp_path.glob("*-gpu-test.json")
        kept = json.loads(path.read_text())["rows"]
        assert [(row["phase"], row["result"]) for row in kept] == [(each.phase, each.result) for each in of.outcomes]
        path.unlink()
        return {each.phase: each for each in of.outcomes}

    return run


# -- the whole ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=slow)])
def test_phases_are_rehearsed(names: tuple[str, ...], tmp_path: Path) -> None:
    """By the make target, with $OUT, in an environment that must not matter to the phases."""
    arguments = f"ARGS=--rehearse --only {' '.join(names)}"
    command = ["make", "-C", str(ROOT), "gpu-check", f"PYTHON={sys.executable}", arguments]
    environment = {**os.environ, "OUT": str(tmp_path), "RANK": "3", "WORLD_SIZE": "7", "ZERO_KERNELS_BACKEND": "abacus"}
    environment["ZERO_KERNELS_ORDER_PROGRAMS"] = "few"
    for name in ("PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of a make that runs this test
        environment.pop(name, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for path in tmp_path.glob("*.json") for row in json.loads(path.read_text())["rows"]]
    results = {row["phase"]: row["result"] for row in rows if row["op"] == "phase"}
    assert results == dict.fromkeys(names, OK)
    assert {"adam_step", "train_step"} <= {row["op"] for row in rows}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_ends_within_its_time(part: str) -> None:
    groups = phases_of(part)
    assert sum(max(phase.limit for phase in group) for group in groups) + gpu_check.KEPT <= gpu_check.SECONDS == 530


def test_the_parts_cover_all_tests_and_no_phase_is_in_two() -> None:
    phases = [phase for part in PARTS for group in phases_of(part) for phase in group]
    names = [phase.name for phase in phases]
    assert len(names) == len(set(names)) and names[0] == "build"
    given = {word for phase in phases for word in phase.command}
    assert {str(path) for path in (ROOT / "tests/gpu").glob("test_*.py")} <= given
    assert str(ROOT / "tests/kernels/test_bit_contract.py") in given
    scripts = {word for word in given if word.endswith(".py")}
    assert {path for path in scripts if not Path(path).exists()} == set()


BENCHMARKS = [
    phase
    for device in ("cuda", "cpu")
    for part in PARTS
    for group in phases_of(part, device)
    for phase in group
    if "--out" in phase.command
]


@pytest.mark.parametrize("phase", BENCHMARKS, ids=[f"{of.name} on {of.command[-3]}" for of in BENCHMARKS])
def test_benchmarks_know_their_flags(phase: Phase, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments are parsed, and nothing is measured."""
    parsed = []
    monkeypatch.setattr("zero_optim.cli.run_command", lambda name, work: parsed.append(name) or 0)
    _, *arguments = phase.command
    if arguments[0] == "-m":
        assert main(arguments[2:]) == 0
    else:
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as left:
            runpy.run_path(arguments[0], run_name="__main__")
        assert left.value.code == 0
    assert len(parsed) == 1


def test_without_a_device_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("gpu-check: ") and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


# -- phases that go wrong ----------------------------------------------------------------------------------------------


def test_a_phase_that_fails_does_not_stop_the_others(check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    bad = Phase("bad", python("print('before'); raise SystemExit('the culprit')"), 30)
    outcomes = check(bad, Phase("good", python("print('fine')"), 30))
    assert (outcomes["bad"].result, outcomes["bad"].note) == (FAILED, "the culprit")
    assert (outcomes["good"].result, outcomes["good"].note) == (OK, "fine")
    assert "    before\n    the culprit\n" in capsys.readouterr().out


SKIPS = """
print("SKIPPED [2] tests/gpu/test_nccl_ranks.py:50: one GPU, and an old NCCL: take another")
print("SKIPPED [1] tests/gpu/test_nccl_ranks.py:61: one GPU, and an old NCCL: take another")
print("3 skipped in 0.1s")
"""


def test_tests_that_were_all_skipped_are_not_ok_and_say_why_once(check: Any) -> None:
    (outcome,) = check(Phase("skips", python(SKIPS), 30)).values()
    assert (outcome.result, outcome.skipped) == (SKIPPED, ["one GPU, and an old NCCL: take another"])
    assert gpu_check.verdict(0, ["1 passed, 3 skipped in 1s"]) == OK
    assert gpu_check.verdict(77, ["NCCL takes one rank a GPU"]) == SKIPPED
    assert gpu_check.verdict(5, ["no tests ran"]) == FAILED


HANGS = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
for ignored in (signal.SIGINT, signal.SIGTERM):
    signal.signal(ignored, signal.SIG_IGN)
print(child.pid, flush=True)
signal.pause()
"""
LINUX = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: descendants are found in /proc")


def has_ended(pid: int) -> bool:
    """Whether a process that is no child of this one ends within the time that a kill may take."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    return bool(select.select([process], [], [], 10)[0])


@LINUX
def test_a_phase_that_hangs_is_ended_with_what_it_started(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ignores the request to end, and its child has a session of its own, as the ranks of a training have."""
    monkeypatch.setattr(gpu_check, "GRACE", 0.1)
    (outcome,) = check(Phase("hangs", python(HANGS), 5.0)).values()
    assert outcome.result == TIMED_OUT and has_ended(int(outcome.note))


def test_without_time_phases_are_not_run(check: Any) -> None:
    (outcome,) = check(Phase("late", python("print('fine')"), 30), seconds=0.0).values()
    assert (outcome.result, outcome.seconds) == (NOT_RUN, 0)


# -- which NCCL --------------------------------------------------------------------------------------------------------


def test_why_ranks_cannot_use_one_gpu() -> None:
    assert gpu_ranks.why_not_on_one_gpu(2, 2, (2, 28, 7)) is None, "a GPU each"
    assert gpu_ranks.why_not_on_one_gpu(4, 1, (2, 30, 4)) is None, "one for all"
    reason = str(gpu_ranks.why_not_on_one_gpu(2, 1, (2, 28, 7)))
    assert "2 ranks, one GPU, and NCCL 2.28.7 takes one rank a GPU" in reason and "nvidia-nccl-cu13>=2.30" in reason


# -- the scripts -------------------------------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 7
adam_step cuda: launched
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","dram__bytes_write.sum"
"","","ns","byte","byte"
"0","void adam_step_kernel<float>(Args)","1,000","2,000,000","1,000,000"
"""


def test_the_table_of_ncu_is_read() -> None:
    (kernel,) = gpu_profile.read(NCU.splitlines())
    assert kernel["kernel"] == "void adam_step_kernel<float>"
    assert (kernel["ns"], kernel["bytes_read"], kernel["occupancy_percent"]) == (1000, 2_000_000, None)
    assert gpu_profile.read(["==ERROR== ERR_NVGPUCTRPERM"]) == []


def log(*losses: float | None, scale: float = 65536.0) -> list[dict[str, Any]]:
    return [{"loss": loss, "loss_scale": scale} for loss in losses]


@pytest.mark.parametrize(
    ("gpu", "cpu", "problem"),
    [
        (log(5.0, 4.02), log(5.0, 4.0), "None"),
        (log(5.0, 4.1), log(5.0, 4.0), "beyond rounding"),
        (log(5.0, None), log(5.0, 4.0), "beyond rounding"),
        (log(5.0), log(5.0, 4.0), "1 steps here and 2 on the CPU"),
        (log(5.0, 4.0, scale=1.0), log(5.0, 4.0), "loss scale"),
        ("exit code 1: out of memory", log(5.0, 4.0), "out of memory"),
        (log(5.0, 4.0), "exit code 1: no text", "no run on the CPU: exit code 1"),
    ],
)
def test_a_training_is_compared_with_the_cpus(gpu: Any, cpu: Any, problem: str) -> None:
    assert problem in str(gpu_trainer.compare(gpu, cpu, 2, "bf16")["problem"])


def test_a_training_elsewhere_than_asked_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU run that fell back to the CPU would have the CPU's losses to the bit."""
    said = subprocess.CompletedProcess([], 0, "ranks  1 on cpu (gloo, 2 threads), stage 1\n")
    monkeypatch.setattr(gpu_trainer.subprocess, "run", lambda *_, **__: said)
    assert "did not run on cuda under nccl" in str(gpu_trainer.train("cuda", "bf16", 1, [], tmp_path))


def test_rank_0_of_64_holds_what_was_planned() -> None:
    decoder = memory.gpt_of(8_000_000)  # of which what no plan has, some 15 KB at stage 3, is little
    for stage, least in {1: 4 + 10 / 64, 2: 2 + 12 / 64, 3: 14 / 64}.items():
        row = gpu_memory.measure(decoder, stage, torch.device("cpu"))
        assert abs(row["difference"]) < 0.01 and row["held"] > least * 8e6
        assert row["held"] < row["peak"] < 1.01 * row["planned_peak"]
