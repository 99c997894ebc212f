"""Several ranks, each a process: same losses at every stage, exact resuming, and a clean end however it comes."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from cells import slow_after
from checkpoint_files import read_tensors
from training import (
    ENDLESS,
    TINY,
    Command,
    read_log,
    run_ranks,
    saved_steps,
    table_row,
    train_ranks,
    without_speed,
)
from zero_optim.train.model import GPT, ModelConfig

PARAMETERS = sum(p.numel() for p in GPT(ModelConfig(1, 32, 2, 16), torch.float32).parameters())


def newest_step(run: Path) -> int:
    """Of a checkpoint that two ranks have written, every byte of which is right."""
    step = saved_steps(run)[-1]
    folder = run / "checkpoint" / f"step-{step}"
    assert sorted(file.name for file in folder.iterdir()) == ["index.json", "rank-0.safetensors", "rank-1.safetensors"]
    assert len(read_tensors(folder)) > 20
    return step


def test_a_resumed_run_repeats_the_whole_one(two_ranks: object, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    checkpoint = two_ranks.folder / "checkpoint" / "step-3"
    run_ranks(2, ["--resume", str(checkpoint), "--out", str(resumed)], tmp_path)
    whole = read_log(two_ranks.folder)
    assert [record["step"] for record in whole] == [1, 2, 3, 4, 5, 6]
    assert without_speed(read_log(resumed)) == without_speed(whole[3:])


@pytest.mark.parametrize(("ranks", "batch"), [(1, 4), (4, 1)])
def test_a_run_goes_on_with_fewer_and_with_more_ranks(
    two_ranks: object, tmp_path: Path, ranks: int, batch: int
) -> None:
    """As many windows a step, so the same losses but for the order of sums, which bf16 rounds: to 3e-5, measured."""
    whole = read_log(two_ranks.folder)
    checkpoint = two_ranks.folder / "checkpoint" / "step-3"
    output = run_ranks(ranks, ["--resume", str(checkpoint), "--batch", str(batch), "--out", "run"], tmp_path)
    assert f"random states were saved by 2 ranks, and are not loaded by {ranks}\n" in output
    losses = [record["loss"] for record in read_log(tmp_path / "run")]
    assert losses == pytest.approx([record["loss"] for record in whole[3:]], rel=2e-4)


@pytest.mark.parametrize("stage", slow_after(1, [0, 1]))
def test_every_stage_gives_the_same_losses(two_ranks: object, tmp_path: Path, stage: int) -> None:
    flags = ["--stage", str(stage), "--steps", "6", "--data", str(two_ranks.text), "--out", "run"]
    output = run_ranks(2, [*TINY, *flags], tmp_path)
    ours, theirs = read_log(tmp_path / "run"), read_log(two_ranks.folder)
    if stage == 1:
        assert without_speed(ours) == without_speed(theirs)
    else:
        # The same sums of two terms; only the norm adds up in another order, by a few fp32 ulp, which bf16 may round.
        assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in theirs], rel=1e-3)
    state = 12 if stage == 0 else 6
    assert table_row(output, "model state")[-1] == 4 + state


def test_the_final_table_agrees_with_its_formula(two_ranks: object) -> None:
    sizes = table_row(two_ranks.output, "model state")
    assert sizes[-1] == 9.0  # 2 + 14 / 2 bytes a parameter
    assert sizes[-2] == pytest.approx(9 * PARAMETERS / 1e6, abs=0.01)
    assert sum(sizes[:2]) / 2 == pytest.approx(sizes[-2], rel=0.02)
    calls, size, a_step, _ = table_row(two_ranks.output, "reduce_scatter")
    assert calls % 6 == 0 and size == pytest.approx(6 * a_step, abs=0.05)
    assert a_step == pytest.approx(2 * PARAMETERS / 1e6, abs=0.01)


def test_the_page_of_the_run_has_the_figures_of_the_final_table(two_ranks: object) -> None:
    page = (two_ranks.folder / "report.html").read_text()
    cells = {row[0]: row[1:] for row in map(cells_of, page.split("<tr")[1:])}
    *of_ranks, planned, _ = table_row(two_ranks.output, "model state")
    assert [float(cell) for cell in cells["model state"][:2]] == [max(of_ranks), planned]
    for kind in ("reduce_scatter", "all_gather"):
        calls, _, a_step, blocked = table_row(two_ranks.output, kind)
        shown = cells[kind]
        assert [float(shown[n]) for n in (0, 3, 4)] == [a_step, calls, blocked]
        assert float(shown[1]) == pytest.approx(2 * PARAMETERS / 1e6, abs=0.001)
    (session,) = json.loads((two_ranks.folder / "run.json").read_text())["sessions"]
    assert len(session["ending"]["ranks"]) == 2 and "Memory of each rank" in page


def cells_of(row: str) -> list[str]:
    """Text of a table's row."""
    return [re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row.split("</tr>")[0])]


def test_what_takes_long_is_said_before_it_begins(two_ranks: object) -> None:
    lines = two_ranks.output.splitlines()
    assert lines[:2] == ["starting 2 ranks", "reading the text"]
    last_step = next(number for number, line in enumerate(lines) if line.startswith("step     6/6"))
    assert lines[last_step + 1] == "validating and sampling"


def test_a_failure_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    command = train_ranks(2, [*TINY, "--data", "empty"], tmp_path)
    assert command.finish() == 2
    failure = "zero-optim train: --data empty: empty, no byte to train on"
    assert command.output.splitlines() == ["starting 2 ranks", "reading the text", failure]


def test_ctrl_c_saves_and_ends_every_rank(two_ranks: object, tmp_path: Path) -> None:
    command = train_ranks(2, [*TINY, *ENDLESS, "--data", str(two_ranks.text), "--out", "run"], tmp_path)
    command.read_until("step     1/")
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == 130, command.output
    stopped = newest_step(tmp_path / "run")
    assert f"interrupted after step {stopped}; go on with --resume {tmp_path / 'run'}\n" in command.output
    assert f"It was interrupted after step {stopped:,} of 4,000." in (tmp_path / "run" / "report.html").read_text()
    assert "Traceback" not in command.output
    assert read_log(tmp_path / "run")[-1]["step"] == stopped < 4000
    # Its own two more steps: the shorter schedule changes rates, not what is restored.
    run_ranks(2, ["--resume", "run", "--steps", str(stopped + 2)], tmp_path)
    assert [record["step"] for record in read_log(tmp_path / "run")] == list(range(1, stopped + 3))


def test_one_rank_asked_to_stop_stops_all_at_the_same_step(two_ranks: object, tmp_path: Path) -> None:
    command = train_ranks(2, [*TINY, *ENDLESS, "--data", str(two_ranks.text), "--out", "run"], tmp_path)
    process = int(re.search(r"process (\d+)", command.read_until("run    "))[1])
    command.read_until("step     1/")
    os.kill(process, signal.SIGTERM)
    assert command.finish() == 130, command.output
    assert newest_step(tmp_path / "run") < 4000


def test_a_dead_launcher_leaves_no_rank_behind(two_ranks: object, tmp_path: Path) -> None:
    command = train_ranks(2, [*TINY, *ENDLESS, "--data", str(two_ranks.text), "--out", "run"], tmp_path)
    command.read_until("step     1/")
    command.process.kill()
    assert command.finish() == -signal.SIGKILL
    assert newest_step(tmp_path / "run") < 4000


def test_a_dead_rank_ends_the_others(two_ranks: object, tmp_path: Path) -> None:
    command = train_ranks(2, [*TINY, *ENDLESS, "--data", str(two_ranks.text), "--out", "run"], tmp_path)
    process = int(re.search(r"process (\d+)", command.read_until("run    "))[1])
    command.read_until("step     1/")
    os.kill(process, signal.SIGKILL)
    assert command.finish() == 128 + signal.SIGKILL, command.output
    assert "rank 0 was killed by SIGKILL" in command.output


def test_the_process_group_is_gone_before_python_shuts_down(text: Path, tmp_path: Path) -> None:
    """Gloo's threads end with the group. One that outlived it freed a tensor at shutdown and aborted the process."""
    script = """
import os, sys, weakref
import torch.distributed as dist
from zero_optim.cli import main
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
destroy, groups = dist.destroy_process_group, []
def note_and_destroy():
    groups.append(weakref.ref(dist.group.WORLD))
    destroy()
dist.destroy_process_group = note_and_destroy
code = main(sys.argv[1:])
print("exit code", code, "groups alive", [group() is not None for group in groups])
"""
    command = Command(["-c", script, "train", *TINY, "--steps", "2", "--data", str(text)], tmp_path)
    assert command.finish() == 0, command.output
    assert command.output.endswith("exit code 0 groups alive [False]\n"), command.output
