"""Stage 3: the losses, checkpoints and samples of stage 2, from parameters that are whole only while in use."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from cells import slow_after
from checkpoint_files import weights_in
from training import TINY, Command, read_log, table_row, without_speed
from zero_optim.cli import main
from zero_optim.comm.collectives import make_comm
from zero_optim.train import loop
from zero_optim.train.model import GPT, ModelConfig
from zero_optim.train.trainer import _parts_of_rank
from zero_optim.train.world import World

SHAPE = [*TINY, "--layers", "3"]
# Nothing is clipped: the norm adds up over other shards than at stage 2's, in another order.
UNCLIPPED = ["--clip", "1000"]
STEPS = ["--steps", "6", "--save-every", "3"]

# As `zero-optim train`, saying in the end which process groups are left.
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


def numel(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train_here(rank: int, world_size: int, arguments: list[str], fails: int | None = None) -> tuple[int, str, str]:
    """The command line on a rank that has its process group; on the rank that ``fails``, no checkpoint can be written.

    Returns the exit code, and what was said on stdout and stderr.
    """

    @contextlib.contextmanager
    def join(device: str) -> Iterator[World]:
        yield World(make_comm(), torch.device(device), "gloo")

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(loop, "join_world", join)
        patch.setattr(loop, "_SAMPLE_LENGTH", 20)
        patch.setitem(sys.modules, "matplotlib", None)  # nothing is drawn
        if rank == fails:
            patch.setattr(os, "pwrite", refuse)
        code = main(["train", *arguments])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return code, out.getvalue(), err.getvalue()


def train(arguments: list[str], **more: Any) -> str:
    """Trains on two ranks; returns what rank 0 said."""
    (code, out, err), (other, *_) = harness.run_ranks(2, train_here, arguments, **more)
    assert (code, other) == (0, 0), out + err
    return out


def of_both_stages(text: Path, folder: Path, *flags: str) -> list[str]:
    common = [*SHAPE, *STEPS, *flags, "--data", str(text), "--out"]
    return [train(["--stage", stage, *common, str(folder / stage)]) for stage in ("2", "3")]


def weights(run: Path, step: int = 6) -> dict[str, torch.Tensor]:
    return weights_in(run / "checkpoint" / f"step-{step}")


def assert_same_run(ours: Path, theirs: Path, *, but: str = "tokens_per_s") -> None:
    logs = [[{k: v for k, v in record.items() if k != but} for record in without_speed(read_log(run))]
            for run in (ours, theirs)]  # fmt: skip
    assert logs[0] == logs[1]
    saved = weights(ours), weights(theirs)
    assert list(saved[0]) == list(saved[1])
    for name in saved[0]:
        assert type(saved[0][name]) is torch.Tensor
        assert torch.equal(saved[0][name], saved[1][name]), name
    assert (ours / "sample.txt").read_bytes() == (theirs / "sample.txt").read_bytes()


def assert_stage_3_is_stage_2(folder: Path) -> None:
    """Bit for bit in the runs 3 and 2 of ``folder``, but for the last bits of the norms."""
    assert_same_run(folder / "3", folder / "2", but="grad_norm")
    norms = [[record["grad_norm"] or 0.0 for record in read_log(folder / stage)] for stage in ("2", "3")]  # None: inf
    assert norms[1] == pytest.approx(norms[0], rel=3e-7)


@pytest.mark.parametrize(
    "flags",
    slow_after(
        2, [[], ["--dtype", "fp16", "--accumulate", "3", "--layers", "2"], ["--dtype", "fp32", "--layers", "1"]]
    ),
    ids=["bf16", "fp16-accumulate", "fp32"],
)
def test_stage_3_is_stage_2(text: Path, tmp_path: Path, flags: list[str]) -> None:
    said = of_both_stages(text, tmp_path, *flags, *UNCLIPPED)
    assert_stage_3_is_stage_2(tmp_path)
    losses = [re.search(r"validation loss .*", output)[0] for output in said]
    assert losses[0] == losses[1]


def test_clipped_it_is_close(text: Path, tmp_path: Path) -> None:
    of_both_stages(text, tmp_path)
    losses = [[record["loss"] for record in read_log(tmp_path / stage)] for stage in ("2", "3")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_resumed_run_repeats_the_whole_one(text: Path, tmp_path: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    train(["--stage", "3", *SHAPE, *STEPS, "--data", str(text), "--out", str(whole)])
    resumed = train(["--resume", str(whole / "checkpoint" / "step-3"), "--out", str(again)])
    assert "stage 3" in resumed and "after step 3" in resumed
    log = whole / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[3:]))
    assert_same_run(again, whole)


def test_on_one_rank_it_is_stage_2(zero_optim: Callable, text: Path, tmp_path: Path) -> None:
    for stage in ("2", "3"):
        flags = ["--stage", stage, *SHAPE, *STEPS, *UNCLIPPED, "--data", text, "--out", tmp_path / stage]
        outcome = zero_optim("train", *flags)
        assert outcome.code == 0, outcome.err
    assert_stage_3_is_stage_2(tmp_path)
    assert re.search(r"^  unsharded, at most +0\.000 +0\.000 +0$", outcome.out, re.MULTILINE)


def test_under_torchrun_memory_and_traffic_are_as_planned(text: Path, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ["--stage", "3", *SHAPE, *STEPS, "--hidden", "64", "--data", str(text), "--out", "run"]
    command = Command([*launcher, "script.py", "train", *flags], tmp_path)
    assert command.finish() == 0, command.output

    model = GPT(ModelConfig(3, 64, 2, 16), torch.bfloat16)
    whole, block = numel(model), numel(model.blocks[0])
    root = whole - 3 * block
    *seen, planned, a_parameter = table_row(command.output, "model state")
    assert a_parameter == 8 and planned == pytest.approx(8 * whole / 1e6, abs=1e-3)  # 16 / N bytes
    assert sum(seen) / 2 == pytest.approx(planned, abs=1e-3)
    *seen, planned, _ = table_row(command.output, "unsharded, at most")
    assert planned == pytest.approx(2 * (root + 2 * block) / 1e6, rel=0.01)  # rows and equal shards pad it
    assert seen == [planned] * 2
    *seen, planned, _ = table_row(command.output, "communication")
    assert seen == [planned] * 2
    calls, _, a_step, _ = table_row(command.output, "all_gather")
    assert calls == 6 * (1 + 2 * 3) and a_step == pytest.approx(2 * (root + 6 * block) / 1e6, rel=0.02)
    calls, _, a_step, _ = table_row(command.output, "reduce_scatter")
    assert calls == 6 * (1 + 3) and a_step == pytest.approx(2 * whole / 1e6, rel=0.02)
    assert "gather_parameters" not in command.output  # saving gathers nothing
    assert "stage 3: 3 blocks, each gathered when it is used\n" in command.output
    # The gathers' own group too: gloo's threads would end after the interpreter.
    assert command.output.count("of 4 groups alive 0\n") == 2, command.output


@pytest.mark.parametrize(("stage", "kinds"), [("0", ["all_reduce"]), ("3", ["all_gather", "reduce_scatter"])])
def test_what_run_json_plans_is_what_is_measured(text: Path, tmp_path: Path, stage: str, kinds: list[str]) -> None:
    """Of a model whose buckets have hardly any padding; micro-batches gather again, and reduce once."""
    shape = ["--hidden", "128", "--accumulate", "2", "--steps", "3"]
    train(["--stage", stage, *SHAPE, *shape, "--data", str(text), "--out", str(tmp_path / "run")])
    (session,) = json.loads((tmp_path / "run" / "run.json").read_text())["sessions"]
    planned, (rank, other) = session["forecast"], session["ending"]["ranks"]
    assert sorted(planned["traffic"]) == kinds
    for kind, size in planned["traffic"].items():
        assert rank["collectives"][kind]["bytes"] / 3 == pytest.approx(size, rel=0.01), kind
    for kind, size in planned["memory"].items():
        assert (rank["memory"][kind] + other["memory"][kind]) / 2 == pytest.approx(size, rel=0.01), kind


def test_a_save_that_fails_on_one_rank_ends_all(text: Path, tmp_path: Path) -> None:
    flags = ["--stage", "3", *SHAPE, "--steps", "1", "--data", str(text), "--out", str(tmp_path / "run")]
    outcomes = harness.run_ranks(2, train_here, flags, 1)
    assert [code for code, *_ in outcomes] == [1, 1]
    assert all("No space left on device" in err for *_, err in outcomes)
    assert not list((tmp_path / "run" / "checkpoint").iterdir())


def test_ranks_validate_in_step_on_any_text(tmp_path: Path) -> None:
    """Five windows, two a batch: rank 0 has two batches and a half, rank 1 two; with one of its own, none."""
    for size, name in ((870, "five"), (180, "one")):
        (tmp_path / name).write_bytes(bytes(range(97, 117)) * (size // 20) + bytes(size % 20))
        said = of_both_stages(tmp_path / name, tmp_path / f"of {name}", *UNCLIPPED, "--steps", "1", "--batch", "1")
        losses = [float(re.search(r"validation loss (\S+)", output)[1]) for output in said]
        assert losses[0] == losses[1] < 7  # not nan


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_window_counts_once(count: int, ranks: int) -> None:
    windows = torch.arange(count)[:, None]
    parts = [list(_parts_of_rank(windows, rank, ranks, 2)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in parts}) == 1
    counted = torch.cat([part[:n] for of_rank in parts for part, n in of_rank])
    assert sorted(counted.flatten().tolist()) == list(range(count))
    assert all(1 <= len(part) <= 2 and n in (0, len(part)) for of_rank in parts for part, n in of_rank)
