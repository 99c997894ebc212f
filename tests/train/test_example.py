"""The loops that a user copies work as they stand."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from checkpoint_files import read_contents, weights_in
from training import ROOT, Command

EXAMPLE = ROOT / "examples" / "train_gpt.py"
SHARDED = ROOT / "examples" / "train_sharded.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def final_loss(output: str, step: int = 2) -> float:
    return float(re.search(rf"step {step}  loss ([\d.]+)", output)[1])


def test_alone(tmp_path: Path) -> None:
    command = Command([str(EXAMPLE), "--steps", "2"], tmp_path)
    assert command.finish() == 0, command.output
    assert 4 < final_loss(command.output) < 7


@pytest.mark.slow
def test_muon_has_the_matrices_of_blocks(tmp_path: Path) -> None:
    command = Command([str(EXAMPLE), "--steps", "2", "--optimizer", "muon"], tmp_path)
    assert command.finish() == 0, command.output
    assert 4 < final_loss(command.output) < 7
    whole, matrices = 478_976, 2 * 12 * 128 * 128
    held = command.output.splitlines()[-1]
    assert f"momentum_buffer {4 * matrices:,}," in held
    assert f"exp_avg {4 * (whole - matrices):,}," in held


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    command = Command([*TORCHRUN, str(EXAMPLE), "--steps", "2"], tmp_path)
    assert command.finish() == 0, command.output
    assert command.output.count("step 2") == 1
    assert 4 < final_loss(command.output) < 7


@pytest.mark.slow
def test_sharded_on_two_ranks_and_resumed_on_one(tmp_path: Path) -> None:
    command = Command([*TORCHRUN, str(SHARDED), "--steps", "2", "--save", "checkpoints"], tmp_path)
    assert command.finish() == 0, command.output
    assert 4 < final_loss(command.output) < 7
    whole = sum(weight.numel() for weight in weights_in(tmp_path / "checkpoints" / "step-2").values())
    held = dict(re.findall(r"(\w+) ([\d,]+)(?:, |$)", command.output.splitlines()[-1]))
    held = {kind: int(size.replace(",", "")) for kind, size in held.items()}
    state = sum(held[kind] for kind in ("parameters", "master_low", "exp_avg", "exp_avg_sq"))
    assert state == pytest.approx(6 * whole, rel=1e-3)  # 12 / N bytes; a rank's shard is whole rows
    assert held["unsharded"] == held["gradients"] == 0

    command = Command([str(SHARDED), "--steps", "3", "--resume", "checkpoints", "--save", "checkpoints"], tmp_path)
    assert command.finish() == 0, command.output
    assert 4 < final_loss(command.output, 3) < 7
    (optimizer,) = read_contents(tmp_path / "checkpoints" / "step-3")["optimizers"]
    assert {*optimizer["steps"].values()} == {3}


@pytest.mark.parametrize("script", [EXAMPLE, SHARDED], ids=lambda path: path.stem)
def test_it_imports_torch_and_zero_optim_alone(script: Path) -> None:
    tree = ast.parse(script.read_text())
    names = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - {"argparse", "os", "pathlib"} == {"torch", "zero_optim"}
