"""Several ranks, each a process: same losses at every stage, exact resuming, and a clean end however it comes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from cells import slow_after
from checkpoint_files import read_tensors, weights_in
from training import (
    ENDLESS,
    TINY,
    Command,
    read_log,
    run_ranks,
    saved_steps,
    shortened,
    table_row,
    train_ranks,
    without_speed,
)
from zero_optim.cli import main
from zero_optim.comm.collectives import Comm, make_comm
from zero_optim.train import loop
from zero_optim.train.model import GPT, ModelConfig

PARAMETERS = sum(p.numel() for p in GPT(ModelConfig(1, 32, 2, 16), torch.float32).parameters())
SHAPE = [*TINY, "--layers", "3"]
STEPS = ["--steps", "6", "--save-every", "3"]
UNCLIPPED = ["--clip", "1000"]  # at stage 3 the norm adds up over other shards than at stage 2, in another order

# As `zero-optim train`, and prints in the end which process groups are left.
SCRIPT = """
import sys, weakref
import torch.distributed as dist
from zero_optim.cli import main
destroy, groups = dist.destroy_process_group, []
def note_and_destroy():
    groups.extend(weakref.ref(group) for group in dist.distributed_c10d._world.pg_map)
    destroy()
dist.destroy_process_group = note_and_destroy
code = main(sys.argv[1:])
print("of", len(groups), "groups alive", sum(group() is not None for group in groups))
sys.exit(code)
"""


def train_here(rank: int, world_size: int, arguments: list[str], fails: int | None = None) -> tuple[int, str, str]:
    """The command line on a rank that has its process group; on the rank that ``fails``, no checkpoint can be written.

    Returns the exit code, stdout and stderr.
    """

    @contextlib.contextmanager
    def join(device: str) -> Iterator[Comm]:
        yield make_comm()

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    out, err = io.StringIO(), io.StringIO()
    with shortened() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(loop, "join_ranks", join)
        if rank == fails:
            patch.setattr(os, "pwrite", refuse)
        code = main(["train", *arguments])
    return code, out.getvalue(), err.getvalue()


def train(arguments: list[str]) -> str:
    """Trains on two ranks; returns what rank 0 printed."""
    (code, out, err), (other, *_) = harness.run_ranks(2, train_here, arguments)
    assert (code, other) == (0, 0), out + err
    return out


def newest_step(run: Path) -> int:
    """Of a checkpoint that two ranks have written, every byte of which is right."""
    step = saved_steps(run)[-1]
    folder = run / "checkpoint" / f"step-{step}"
    assert sorted(file.name for file in folder.iterdir()) == ["index.json", "rank-0.safetensors", "rank-1.safetensors"]
    assert len(read_tensors(folder)) > 20
    return step


# -- the same run ------------------------------------------------------------------------------------------------------


def test_a_run_resumes_with_more_ranks(two_ranks: object, tmp_path: Path) -> None:
    """As many windows a step, so the same losses but for the order of sums, which bf16 rounds: to 3e-5, measured."""
    whole = read_log(two_ranks.folder)
    checkpoint = two_ranks.folder / "checkpoint" / "step-3"
    output = run_ranks(4, ["--resume", str(checkpoint), "--batch", "1", "--out", "run"], tmp_path)
    assert "random states were saved by 2 ranks, and are not loaded by 4\n" in output
    losses = [record["loss"] for record in read_log(tmp_path / "run")]
    assert losses == pytest.approx([record["loss"] for record in whole[3:]], rel=2e-4)


@pytest.mark.parametrize(
    "flags",
    slow_after(
        2, [[], ["--dtype", "fp16", "--accumulate", "3", "--layers", "2"], ["--dtype", "fp32", "--layers", "1"]]
    ),
    ids=["bf16", "fp16-accumulate", "fp32"],
)
def test_stage_3_is_stage_2(text: Path, tmp_path: Path, flags: list[str]) -> None:
    """Bit for bit, but for the last bits of the norms."""
    common = [*SHAPE, *STEPS, *flags, *UNCLIPPED, "--data", str(text), "--out"]
    printed = [train(["--stage", stage, *common, str(tmp_path / stage)]) for stage in ("2", "3")]
    losses = [re.search(r"validation loss .*", output)[0] for output in printed]
    assert losses[0] == losses[1]
    logs = [without_speed(read_log(tmp_path / stage)) for stage in ("2", "3")]
    norms = [[record.pop("grad_norm") or 0.0 for record in log] for log in logs]  # None: inf
    assert logs[0] == logs[1] and norms[1] == pytest.approx(norms[0], rel=3e-7)
    saved = [weights_in(tmp_path / stage / "checkpoint" / "step-6") for stage in ("2", "3")]
    assert list(saved[0]) == list(saved[1])
    for name in saved[0]:
        assert torch.equal(saved[0][name], saved[1][name]), name
    assert (tmp_path / "2" / "sample.txt").read_bytes() == (tmp_path / "3" / "sample.txt").read_bytes()


def test_ranks_validate_the_same_number_of_windows_of_any_text(tmp_path: Path) -> None:
    """Of five windows each rank has two, in batches of one; of a single window, both have that one."""
    for size, name in ((870, "five"), (180, "one")):
        (tmp_path / name).write_bytes(bytes(range(97, 117)) * (size // 20) + bytes(size % 20))
        common = [*SHAPE, *UNCLIPPED, "--steps", "1", "--batch", "1", "--data", str(tmp_path / name), "--out"]
        printed = [train(["--stage", stage, *common, str(tmp_path / f"{name} {stage}")]) for stage in ("2", "3")]
        losses = [float(re.search(r"validation loss (\S+)", output)[1]) for output in printed]
        assert losses[0] == losses[1] < 7  # not nan


# -- figures -----------------------------------------------------------------------------------------------------------


def test_the_final_table_agrees_with_its_formula(two_ranks: object) -> None:
    sizes = table_row(two_ranks.output, "model state")
    assert sizes[-1] == 8.0  # 2 + 12 / 2 bytes a parameter
    assert sizes[-2] == pytest.approx(8 * PARAMETERS / 1e6, abs=0.01)
    assert sum(sizes[:2]) / 2 == pytest.approx(sizes[-2], rel=0.02)
    calls, size, a_step, planned, _ = table_row(two_ranks.output, "reduce_scatter")
    assert calls % 6 == 0 and size == pytest.approx(6 * a_step, abs=0.05)
    assert a_step == planned == pytest.approx(2 * PARAMETERS / 1e6, abs=0.01)


@pytest.mark.slow
def test_under_torchrun_memory_and_traffic_are_as_planned(text: Path, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["--stage", "3", *SHAPE, *STEPS, "--hidden", "64", "--data", str(text), "--out", "run"]
    command = Command([*launcher, "script.py", "train", *flags], tmp_path)
    assert command.finish() == 0, command.output

    model = GPT(ModelConfig(3, 64, 2, 16), torch.bfloat16)
    whole, block = (sum(p.numel() for p in part.parameters()) for part in (model, model.blocks[0]))
    root = whole - 3 * block
    *seen, planned, a_parameter = table_row(command.output, "model state")
    assert a_parameter == 7 and planned == pytest.approx(7 * whole / 1e6, abs=1e-3)  # 14 / N bytes
    assert sum(seen) / 2 == pytest.approx(planned, abs=1e-3)
    *seen, planned, _ = table_row(command.output, "unsharded, at most")
    assert planned == pytest.approx(2 * (root + 2 * block) / 1e6, rel=0.01)  # rows and equal shards pad it
    assert seen == [planned] * 2
    *seen, planned, _ = table_row(command.output, "communication")
    assert seen == [planned] * 2
    calls, _, a_step, _, _ = table_row(command.output, "all_gather")
    # Each of two saves frees the root and the first block, which the step before has gathered.
    assert calls == 6 * (1 + 2 * 3) + 2 * 2
    assert a_step == pytest.approx(2 * (root + 6 * block + 2 * (root + block) / 6) / 1e6, rel=0.02)
    calls, _, a_step, _, _ = table_row(command.output, "reduce_scatter")
    assert calls == 6 * (1 + 3) and a_step == pytest.approx(2 * whole / 1e6, rel=0.02)
    # The gathers' own group too: gloo's threads would end after the interpreter, and abort it at shutdown.
    assert command.output.count("of 4 groups alive 0\n") == 2, command.output


# -- how it ends -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_failure_is_printed_once(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    command = train_ranks(2, [*TINY, "--data", "empty"], tmp_path)
    assert command.finish() == 2
    failure = "zero-optim train: --data empty: empty, no byte to train on"
    assert command.output.splitlines() == ["starting 2 ranks", "reading the text", failure]


@pytest.mark.slow
def test_an_unexpected_error_of_a_rank_is_printed_with_its_traceback(text: Path, tmp_path: Path) -> None:
    script = """
from zero_optim.train import ranks
def fail(arguments):
    raise KeyError("what is this")
ranks.main = fail  # in the ranks, too, which import this file
if __name__ == "__main__":
    raise SystemExit(ranks.launch(2, "cpu", []))
"""
    (tmp_path / "script.py").write_text(script)
    command = Command([str(tmp_path / "script.py")], tmp_path)
    assert command.finish() == 1, command.output
    assert "Traceback" in command.output and "KeyError: 'what is this'" in command.output


def test_a_save_that_fails_on_one_rank_ends_all(text: Path, tmp_path: Path) -> None:
    flags = ["--stage", "3", *SHAPE, "--steps", "1", "--data", str(text), "--out", str(tmp_path / "run")]
    outcomes = harness.run_ranks(2, train_here, flags, 1)
    assert [code for code, *_ in outcomes] == [1, 1]
    assert all("No space left on device" in err for *_, err in outcomes)
    assert not list((tmp_path / "run" / "checkpoint").iterdir())


@pytest.mark.slow
def test_ctrl_c_saves_and_ends_every_rank(two_ranks: object, tmp_path: Path) -> None:
    command = train_ranks(2, [*TINY, *ENDLESS, "--data", str(two_ranks.text), "--out", "run"], tmp_path)
    command.read_until(" 0/4000 ")
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == 130, command.output
    stopped = newest_step(tmp_path / "run")
    assert f"interrupted after step {stopped}; go on with --resume {tmp_path / 'run'}\n" in command.output
    assert "The run is not finished: interrupted." in (tmp_path / "run" / "report.html").read_text()
    assert "Traceback" not in command.output
    assert read_log(tmp_path / "run")[-1]["step"] == stopped < 4000
    # Two more steps: the shorter schedule changes rates, not what is restored.
    run_ranks(2, ["--resume", "run", "--steps", str(stopped + 2)], tmp_path)
    assert [record["step"] for record in read_log(tmp_path / "run")] == list(range(1, stopped + 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "number"), [("rank", signal.SIGTERM), ("rank", signal.SIGKILL), ("launcher", signal.SIGKILL)]
)
def test_a_signal_to_one_ends_all(two_ranks: object, tmp_path: Path, whom: str, number: signal.Signals) -> None:
    """A rank that is asked to stop stops all at the same step, and so does a dead launcher; a dead rank ends all."""
    command = train_ranks(2, [*TINY, *ENDLESS, "--data", str(two_ranks.text), "--out", "run"], tmp_path)
    rank = int(re.search(r"process (\d+)", command.read_until("run    "))[1])
    command.read_until(" 0/4000 ")
    os.kill(rank if whom == "rank" else command.process.pid, number)
    dead_rank = whom == "rank" and number == signal.SIGKILL
    expected = 128 + signal.SIGKILL if dead_rank else -signal.SIGKILL if whom == "launcher" else 130
    assert command.finish() == expected, command.output
    if dead_rank:
        assert "process 0 terminated with signal SIGKILL; the others were stopped" in command.output
    else:
        assert newest_step(tmp_path / "run") < 4000
