"""``zero-optim bench``: a table, a file and a plot; what can't be had is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zero_optim.bench import run as runner
from zero_optim_cli.bench import parse_numel

import zero_kernels

SMALL = ["--device", "cpu", "--numel", "4096", "--rounds", "2"]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["adam"], ["'adam'", "adam_step, pack, grad_stats, step_overhead"]),
        (["--numel", "many"], ["--numel", "'many'", "64Mi"]),
        (["--numel", "0"], ["--numel", "'0'"]),
        (["--rounds", "0"], ["--rounds 0", "at least 1"]),
        (["--threads", "-1"], ["--threads -1", "at least 1"]),
        (["--dtypes", "fp8"], ["--dtypes", "fp8"]),
        (["--device", "tpu"], ["--device", "tpu"]),
        (["--device", "cpu", "--backends", "metal", "--out", "results"], ["--backends metal", "reference"]),
        (["--bogus"], ["--bogus"]),
        (["--redraw", "nowhere.json"], ["--redraw nowhere.json", "no such file"]),
        pytest.param(["--device", "cuda"], ["--device cuda", "torch"], marks=NO_GPU),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_bad_arguments(refuses, arguments, parts):
    refuses(*arguments, saying=parts)


def test_a_folder_that_cannot_be_made_is_found_out_before_measuring(refuses, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("measured"))
    Path("file").touch()
    refuses("--device", "cpu", "--out", "file/results", saying=["--out file/results", "Not a directory"])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1, "rows": []}'])
def test_what_is_no_record_is_not_drawn(refuses, content):
    Path("file.json").write_text(content)
    refuses("--redraw", "file.json", saying=["--redraw file.json"])


@pytest.mark.parametrize(
    ("text", "numel"),
    [
        ("1000", 1000),
        ("2^20", 2**20),
        ("2**20", 2**20),
        ("64Mi", 2**26),
        ("1Gi", 2**30),
        ("3Ki", 3072),
        ("1e6", 10**6),
        ("2.5e3", 2500),
    ],
)
def test_sizes(text, numel):
    assert parse_numel(text) == numel


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1.5e0", "1e-3", "0e1", "2^", "1M", "0x10", "Mi", "2^2^2"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="2\\^20"):
        parse_numel(text)


def test_a_run_prints_a_table_and_leaves_a_file_and_a_plot(bench):
    pytest.importorskip("matplotlib")
    outcome = bench(*SMALL, "--numel", "4096", "2^13", "--out", "results")
    assert outcome.code == 0, outcome.err
    (file,) = Path("results").glob("*.json")
    (plot,) = Path("results").glob("*.png")
    assert plot.stem == file.stem and plot.read_bytes().startswith(b"\x89PNG")
    assert outcome.out.endswith(f"\n{file}\n{plot}\n")
    record = json.loads(file.read_text())
    assert file.stem == "-".join([record["date"], record["commit"] or f"v{record['version']}"])
    assert record["baselines"].keys() == {"deepspeed", "apex", "te"}
    groups = {(row["op"], row["dtype"], row["numel"]) for row in record["rows"]}
    assert groups == {
        (op, dtype, numel)
        for op in ("adam_step", "pack", "grad_stats")
        for dtype in ("fp16", "bf16")
        for numel in (4096, 8192)
    }
    preferred = zero_kernels.available_backends("cpu")[0]
    for group in groups:
        rows = {row["backend"]: row for row in record["rows"] if (row["op"], row["dtype"], row["numel"]) == group}
        assert {preferred, "torch_pipeline", "copy"} <= rows.keys()
        for row in rows.values():
            moved = row["bytes"] * row["numel"]
            assert row["rounds"] == 2 and row["p20"] <= row["ms"] <= row["p80"]
            assert row["gbps"] == pytest.approx(moved / row["ms"] / 1e6, abs=1e-3)
            assert row["copy_gbps"] == rows[row["yardstick"]]["gbps"]
            yardstick = rows[row["yardstick"]]
            share = moved / (yardstick["bytes"] * row["numel"]) * yardstick["ms"] / row["ms"]
            assert row["fraction"] == pytest.approx(share, abs=1e-4)
            assert row["vs_torch"] == pytest.approx(rows["torch_pipeline"]["ms"] / row["ms"], abs=1e-4)
            for baseline, ratio in row["vs"].items():
                other = rows[row["backend"].split(",")[0] if baseline == "fp32" else baseline]
                assert ratio == pytest.approx(other["ms"] / row["ms"], abs=1e-4)
        assert f"{rows[preferred]['fraction']:.3f}" in outcome.out


def test_the_plot_is_drawn_again_from_the_file(bench):
    pytest.importorskip("matplotlib")
    first = bench("pack", *SMALL, "--out", ".")
    (plot,) = Path().glob("*.png")
    plot.unlink()
    (file,) = Path().glob("*.json")
    again = bench("--redraw", file)
    assert again.code == 0 and plot.exists()
    assert again.out.splitlines()[:-1] == first.out.splitlines()[:-2]


def test_without_matplotlib_the_table_is_there_and_one_line_says_why_no_plot(bench, monkeypatch):
    for name in ("bench", "drawing"):
        monkeypatch.delitem(sys.modules, f"zero_optim.{name}.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = bench("pack", *SMALL, "--dtypes", "bf16", "--out", ".")
    assert outcome.code == 0, outcome.err
    (file,) = Path().glob("*.json")
    assert "pack: 4 bytes an element" in outcome.out and not list(Path().glob("*.png"))
    assert outcome.out.splitlines()[-1].startswith("no plot: ") and f"--redraw {file}" in outcome.out


def test_no_write_leaves_nothing(bench):
    outcome = bench("grad_stats", *SMALL, "--no-write")
    assert outcome.code == 0 and "grad_stats" in outcome.out and list(Path().iterdir()) == []


def test_ops_dtypes_backends_and_threads_are_those_asked_for(bench):
    flags = ["--dtypes", "bf16", "--backends", "reference", "--threads", "2", "--out", "."]
    before = torch.get_num_threads()
    assert bench("grad_stats", "pack", *SMALL, *flags).code == 0
    assert torch.get_num_threads() == before
    record = json.loads(next(Path().glob("*.json")).read_text())
    assert record["threads"] == 2 and record["device"].endswith(", 2 threads") and record["baselines"] == {}
    assert list(dict.fromkeys((row["op"], row["dtype"]) for row in record["rows"])) == [
        ("grad_stats", "bf16"),
        ("pack", "bf16"),
    ]
    backends = {row["backend"] for row in record["rows"]}
    assert backends == {"reference", "torch_pipeline", "norm", "foreach_copy", "cat", "copy"}


def test_a_size_that_does_not_fit_is_left_out(bench, monkeypatch):
    measure = runner.OPS["pack"].measure

    def small_memory(setting, clock, rounds):
        if setting.numel > 5000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(setting, clock, rounds)

    monkeypatch.setitem(runner.OPS, "pack", replace(runner.OPS["pack"], measure=small_memory))
    flags = ["--device", "cpu", "--rounds", "1", "--dtypes", "fp16", "--out", "."]
    outcome = bench("pack", "--numel", "4096", "8192", *flags)
    assert outcome.code == 0 and "left out: pack fp16, 8,192 elements" in outcome.err
    record = json.loads(next(Path().glob("*.json")).read_text())
    assert {row["numel"] for row in record["rows"]} == {4096}
    outcome = bench("pack", "--numel", "8192", *flags)
    assert outcome.code == 1 and "nothing was measured" in outcome.err.splitlines()[-1]


def test_sizes_by_device():
    assert runner.NUMELS["cuda"][0] == 2**20 and runner.NUMELS["cuda"][-1] == 2**30
    assert set(runner.NUMELS) == {"cpu", "cuda"}


def test_help(bench):
    shown = bench("--help")
    assert shown.code == 0
    for flag in (
        "device",
        "numel",
        "dtypes",
        "backends",
        "rounds",
        "threads",
        "contenders",
        "out",
        "no-write",
        "redraw",
    ):
        assert f"--{flag}" in shown.out


WRAPPERS = ("adam_step", "pack", "grad_stats", "step_overhead", "train_step", "checkpoint", "offload")


@pytest.mark.parametrize("script", [*(f"bench_{op}" for op in WRAPPERS), "memory_walkthrough"])
def test_the_scripts_of_the_checkout_run_their_op(script):
    source = (Path(__file__).parents[2] / "benchmarks" / f"{script}.py").read_text()
    assert f'main(["bench", "{script.removeprefix("bench_")}", *sys.argv[1:]])' in source


def test_what_was_measured_is_on_disk_when_the_run_is_ended(bench, monkeypatch):
    """Ctrl-C in the second case: the first has been said, and is in the file."""
    measure = runner._measure

    def once(op, *rest):
        if op == "grad_stats":
            raise KeyboardInterrupt
        return measure(op, *rest)

    monkeypatch.setattr(runner, "_measure", once)
    outcome = bench("pack", "grad_stats", *SMALL, "--dtypes", "bf16", "--out", "results")
    assert outcome.code != 0
    (path,) = Path("results").glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert rows and {row["op"] for row in rows} == {"pack"}
    assert f"    {rows[0]['backend']} {rows[0]['ms']:.3f} ms" in outcome.err
