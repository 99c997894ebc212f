"""The examples as scripts: under torchrun, in what they say of themselves, and in what they compute."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest
from cells import slow
from client_cases import EXAMPLES, as_torchrun, load_example, needs
from harness import run_ranks

SCRIPTS = ("accelerate_loop", "compile_model", "hf_trainer", "lightning_module", "transformers_loop", "trl_sft")
SCRIPTS += ("muon", "packed_sequences", "sam", "sleep_wake")


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# With --cpu it starts one process. --multi_gpu starts two, on CPUs too, where there is no GPU or the script says so.
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
ACCELERATE += ["--main_process_port", "0"]  # any that is free
ACCELERATE_LOOP = ("accelerate_loop", ["--steps", "10", "--checkpoint"], "micro-batch 20")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name", "options", "sign"),
    [
        # The same loop by the other launcher, and the Trainer in test_sharded_trainer.py, stay.
        pytest.param(TORCHRUN, *ACCELERATE_LOOP, marks=[slow, needs("accelerate")], id="torchrun-accelerate"),
        pytest.param(ACCELERATE, *ACCELERATE_LOOP, marks=needs("accelerate"), id="accelerate-launch"),
        pytest.param(
            TORCHRUN,
            *("lightning_module", ["--epochs", "1", "--output"], "world_size=2"),
            marks=needs("lightning"),
            id="torchrun-lightning",
        ),
        pytest.param(
            TORCHRUN,
            *("hf_trainer", ["--steps", "10", "--output"], "'train_loss'"),
            marks=[slow, needs("transformers", "accelerate")],
            id="torchrun-trainer",
        ),
    ],
)
def test_two_processes(launcher: list[str], name: str, options: list[str], sign: str, tmp_path: Any) -> None:
    """At stage 3. The launchers are as they are, not as the other tests imitate them."""
    command = [
        sys.executable,
        *launcher,
        str(EXAMPLES / f"{name}.py"),
        "--stage",
        "3",
        *options,
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(sign) == 1, done.stdout  # rank 0 alone prints
    assert list(tmp_path.glob("out/**/rank-1.safetensors"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_how_to_run_it(name: str) -> None:
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert f"python examples/{name}.py" in text
    assert f"torchrun --standalone --nproc-per-node 2 examples/{name}.py" in text


# -- what they compute, on ranks of this process ----------------------------------------------------------------------


def run_example(rank: int, world_size: int, name: str, *arguments: Any) -> Any:
    with as_torchrun(rank, world_size):
        return load_example(name).main(*arguments)


def test_packed_sequences_on_two_ranks_are_as_in_one_process() -> None:
    (alone,) = run_ranks(1, run_example, "packed_sequences", [])
    assert alone[-1] < 0.7 * alone[0]
    for losses in run_ranks(2, run_example, "packed_sequences", []):
        assert losses == pytest.approx(alone, rel=1e-4)


def test_muon_learns() -> None:
    for loss in run_ranks(2, run_example, "muon", ["--steps", "60"]):
        assert loss < 0.5  # four classes: 1.386 at first


def test_an_actor_that_sleeps_learns() -> None:
    first, last = (run_ranks(2, run_example, "sleep_wake", ["--rounds", rounds]) for rounds in ("1", "12"))
    assert max(first) < -2.5 and min(last) > -2  # the reward is the distance to 3, which begins at 0


@pytest.mark.parametrize("stage", [2, 3])
def test_tensor_parallel_learns(stage: int) -> None:
    for loss in run_ranks(4, run_example, "tensor_parallel", ["--steps", "20", "--stage", str(stage)]):
        assert loss < 1.2


def test_the_memory_table_is_the_papers() -> None:
    for rows in run_ranks(2, run_example, "memory_table"):
        assert [by_formula for by_formula, _ in rows[:4]] == [16, 10, 9, 8]
        assert [counted for _, counted in rows] == [by_formula for by_formula, _ in rows]
