"""``examples/nanogpt``: both scripts train alike and go on from one another's files, and its README shows the diff."""

from __future__ import annotations

import difflib
import itertools
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from client_cases import EPS, EXAMPLES, as_torchrun, assert_like_adamw, load_example
from harness import run_ranks

FOLDER = EXAMPLES / "nanogpt"
README = FOLDER / "README.md"
LR, STEPS = 1e-3, 4
SIZES = ["--layers", "1", "--width", "32", "--window", "16", "--batch", "4"]
OPTIONS = [*SIZES, "--steps", str(STEPS), "--lr", str(LR), "--data", str(FOLDER / "model.py")]


def _options(out: Path, dtype: str, *more: str) -> list[str]:
    fixed = ["--eval-interval", "100", "--clip", "0.5", "--eps", str(EPS)]
    return [*OPTIONS, *fixed, "--dtype", dtype, "--out", str(out), *more]


def _main(name: str, options: list[str]) -> None:
    sys.path.insert(0, str(FOLDER))  # as python does for a script
    try:
        load_example(f"nanogpt/{name}").main(options)
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("model", None)


def _run(rank: int, world_size: int, runs: list[tuple[str, list[str]]]) -> None:
    with as_torchrun(rank, world_size):
        for name, options in runs:
            _main(name, options)


def load_model() -> Any:
    """The GPT of the scripts, not trained."""
    return load_example("nanogpt/model").GPT(window=16, layers=1, width=32, heads=2)


def _load(out: Path) -> dict[str, Any]:
    return torch.load(out / "ckpt.pt")


def _assert_alike(ours: dict[str, Any], torchs: dict[str, Any], steps: int, since: int = 0) -> None:
    """Weights, moments, step counts and the scaler of two checkpoints; ``since`` which step they have trained apart."""
    assert ours["model"].keys() == torchs["model"].keys()
    assert_like_adamw(ours["model"].values(), torchs["model"].values(), LR, steps - since)
    state, expected = ours["optimizer"]["state"], torchs["optimizer"]["state"]
    assert state.keys() == expected.keys()
    for index in expected:
        assert float(state[index]["step"]) == float(expected[index]["step"]) == steps
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[index][moment], expected[index][moment], rtol=1e-3, atol=1e-7)
    assert (ours["scaler"], ours["step"]) == (torchs["scaler"], torchs["step"])


def _assert_near(ours: dict[str, Any], torchs: dict[str, Any]) -> None:
    """Autocast rounds weights that differ in their last bit to two 16-bit neighbours, and from then on gradients differ
    by 2^-9 of themselves; where they are rounding noise, Adam's ratio is anything. So over several steps weights are
    compared with what one step does, on average."""
    for name, weight in torchs["model"].items():
        assert (ours["model"][name] - weight).abs().mean() <= LR / 100, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_both_train_alike(dtype: str, tmp_path: Path) -> None:
    """On two ranks, two micro-batches a step on each, with clipping."""
    run_ranks(2, _run, [(name, _options(tmp_path / name, dtype)) for name in ("before", "after")], timeout=120)
    before, after = _load(tmp_path / "before"), _load(tmp_path / "after")
    if dtype == "float32":
        _assert_alike(after, before, STEPS)
    _assert_near(after, before)
    assert after["best"] == pytest.approx(before["best"], abs=1e-3)
    torch.manual_seed(1337)
    untrained = load_model().state_dict()
    assert all((after["model"][name] - untrained[name]).abs().mean() > LR for name in untrained)  # they do train


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_go_on_from_one_anothers_files(dtype: str, tmp_path: Path) -> None:
    """A step of each. Then both go on from the file of either."""
    run_ranks(
        2, _run, [(name, _options(tmp_path / name, dtype, "--stop", "1")) for name in ("before", "after")], timeout=120
    )
    _assert_alike(_load(tmp_path / "after"), _load(tmp_path / "before"), 1)
    runs = []
    for start, script in itertools.product(("before", "after"), repeat=2):
        shutil.copytree(tmp_path / start, tmp_path / f"{start}-{script}")
        runs.append((script, _options(tmp_path / f"{start}-{script}", dtype, "--stop", "2", "--resume")))
    run_ranks(2, _run, runs, timeout=120)
    for start in ("before", "after"):
        _assert_alike(_load(tmp_path / f"{start}-after"), _load(tmp_path / f"{start}-before"), 2, since=1)


# ---- what README says ------------------------------------------------------------------------------------------------


def _diff() -> list[str]:
    """Lines that are gone begin with -, new ones with +; indentation as in the scripts."""
    before, after = ((FOLDER / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    lines = difflib.unified_diff(before, after, lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def test_readme_shows_the_diff() -> None:
    text = README.read_text()
    shown = re.search(r"\*\*(\d+) of (\d+) lines\*\*.*?```diff\n(.*?)```", text, re.DOTALL)
    assert shown, "README has no diff of examples/nanogpt"
    assert shown[3].splitlines() == _diff()
    new = sum(line.startswith("+") for line in _diff())
    assert (int(shown[1]), int(shown[2])) == (new, len((FOLDER / "after.py").read_text().splitlines()))
