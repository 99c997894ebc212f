"""The examples as scripts: under torchrun, and in what they say of themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest
from client_cases import EXAMPLES, needs

SCRIPTS = ("accelerate_loop", "compile_model", "hf_trainer", "lightning_module", "transformers_loop")


@pytest.mark.parametrize(
    ("name", "options", "sign"),
    [
        pytest.param("accelerate_loop", ["--steps", "10"], "micro-batch 20", marks=needs("accelerate")),
        pytest.param("lightning_module", ["--epochs", "1", "--output"], "world_size=2", marks=needs("lightning")),
    ],
)
def test_torchrun(name: str, options: list[str], sign: str, tmp_path: Any) -> None:
    """The launchers are as they are, not as the other tests imitate them."""
    options = [*options, str(tmp_path)] if options[-1] == "--output" else options
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(EXAMPLES / f"{name}.py"), *options], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(sign) == 1, done.stdout  # rank 0 alone speaks


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_to_run_it(name: str) -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert f"python examples/{name}.py" in text
    assert f"torchrun --standalone --nproc-per-node 2 examples/{name}.py" in text
