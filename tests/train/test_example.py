"""The loop that a user copies works as it stands."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from training import ROOT, Command

EXAMPLE = ROOT / "examples" / "train_gpt.py"


def final_loss(output: str) -> float:
    return float(re.search(r"step 2  loss ([\d.]+)", output)[1])


def test_alone(tmp_path: Path) -> None:
    command = Command([str(EXAMPLE), "--steps", "2"], tmp_path)
    assert command.finish() == 0, command.output
    assert 4 < final_loss(command.output) < 7


def test_under_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = Command([*launcher, str(EXAMPLE), "--steps", "2"], tmp_path)
    assert command.finish() == 0, command.output
    assert command.output.count("step 2") == 1
    assert 4 < final_loss(command.output) < 7


def test_it_imports_torch_and_zero_optim_alone() -> None:
    tree = ast.parse(EXAMPLE.read_text())
    names = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert names - {"argparse", "os", "pathlib"} == {"torch", "zero_optim"}
