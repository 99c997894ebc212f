"""What is kept of a run, where, and what its table and its plot show."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from zero_optim.bench import record as records
from zero_optim.bench.case import COPY, STREAM, TORCH, Case, Setting
from zero_optim.bench.columns import mebibytes, milliseconds
from zero_optim.bench.rows import sheets_of
from zero_optim.bench.rows.op import BANDWIDTH, WIDTH, Row
from zero_optim.bench.rows.phase import PhaseRow
from zero_optim.bench.table import table
from zero_optim.drawing.figures import elements
from zero_optim.drawing.sheet import Bars, Lines
from zero_optim.errors import UsageError

import zero_kernels

CPU = torch.device("cpu")
PNG = b"\x89PNG\r\n\x1a\n"

KEYS = [
    "schema", "device", "driver", "torch", "cuda", "triton", "version", "commit", "date", "python", "load", "threads",
    "isa", "baselines", "rows",
]  # fmt: skip
ROW_KEYS = [
    "op", "backend", "dtype", "numel", "rounds", "ms", "p20", "p80", "bytes", "gbps", "yardstick", "copy_gbps",
    "fraction", "vs_torch", "vs", "phases", "launches", "parameters", "ranks", "tokens_per_s", "memory", "loss",
    "baseline", "communicated", "keeps", "tokens", "newton_schulz", "imbalance", "padding",
]  # fmt: skip


def make_rows(op: str, numel: int, baselines: tuple[str, ...] = (), yardstick: str = COPY, dtype: str = "fp16") -> list:
    case = Case(op, Setting(CPU, dtype, numel, ("cuda", "triton")), 28, yardstick, {}, baselines)
    names = ["cuda", "triton", TORCH, *baselines, COPY, *([STREAM] if yardstick == STREAM else [])]
    return case.rows({name: [numel * (1 + i) / 1e9, numel * (1.1 + i) / 1e9] for i, name in enumerate(names)})


def make(rows: list[Row], **baselines: str) -> dict:
    return json.loads(json.dumps(records.make_record(rows, CPU, baselines)))


# -- the record --------------------------------------------------------------------------------------------------------


def test_the_keys_are_those_of_the_readme():
    record = make(make_rows("adam_step", 2**20))
    assert list(record) == KEYS
    assert all(list(row) == ROW_KEYS for row in record["rows"])
    readme = (records.CHECKOUT / "benchmarks" / "README.md").read_text()
    first_cells = [line.split("|")[1] for line in readme.splitlines() if line.startswith("| `")]
    keys = {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)}
    assert set(KEYS) | set(ROW_KEYS) <= keys
    assert f"version of this format: {record['schema']}" in readme


def test_what_the_record_says_of_a_cpu():
    record = make([])
    assert (record["schema"], record["driver"], record["triton"]) == (7, None, None)
    assert record["torch"] == torch.__version__ and record["threads"] == torch.get_num_threads()
    assert record["device"].endswith(f", {torch.get_num_threads()} threads")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", record["date"])


def test_what_the_record_says_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(records.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "580.159.04\n"))
    monkeypatch.setattr(records, "commit", lambda: "0123456789")
    record = records.make_record([], torch.device("cuda"), {})
    assert (record["device"], record["driver"]) == ("NVIDIA H200", "580.159.04")
    assert record["threads"] is None and record["isa"] is None
    assert records.slug(record["device"]) == "nvidia-h200"


def test_a_driver_that_does_not_say_its_version(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(records.subprocess, "run", missing)
    assert records.driver_version(torch.device("cuda")) is None


def test_slugs():
    assert records.slug("Intel(R) Xeon(R) Processor, 2 threads") == "intel-xeon-processor-2-threads"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"ls-files": "a", "rev-parse": "0123456789", "status": ""}, "0123456789"),
        ({"ls-files": "a", "rev-parse": "0123456789", "status": " M setup.py"}, "0123456789-dirty"),
        ({"rev-parse": "feedfeedfe", "status": ""}, None),  # another project's checkout around an installed package
        ({}, None),
    ],
)
def test_the_commit(monkeypatch, answers, expected):
    def git(*words: str) -> str:
        if words[0] not in answers:
            raise subprocess.CalledProcessError(128, "git")
        return answers[words[0]]

    monkeypatch.delenv(records.COMMIT_ENVIRONMENT, raising=False)
    monkeypatch.setattr(records, "_git", git)
    assert records.commit() == expected


def test_the_commit_of_copied_sources_is_told_by_the_environment(monkeypatch):
    for given in ("abcdef0123", "abcdef0123" + 30 * "4"):
        monkeypatch.setenv(records.COMMIT_ENVIRONMENT, given)
        assert records.commit() == "abcdef0123"
    monkeypatch.setenv(records.COMMIT_ENVIRONMENT, "a-branch-of-40-characters-that-is-no-hash")
    assert records.commit() == "a-branch-of-40-characters-that-is-no-hash"


def test_a_second_run_overwrites_nothing(tmp_path):
    record = {"date": "2026-01-02", "commit": "abc", "rows": []}
    paths = [records.write(record, tmp_path) for _ in range(3)]
    assert [path.name for path in paths] == ["2026-01-02-abc.json", "2026-01-02-abc-2.json", "2026-01-02-abc-3.json"]
    assert json.loads(paths[2].read_text()) == record


def test_where_there_is_no_commit_the_version_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "commit", lambda: None)
    record = make(make_rows("pack", 2**20))
    assert (record["commit"], record["version"]) == (None, zero_kernels.__version__)
    path = records.write(record, tmp_path, "pack")
    assert path.name == f"{record['date']}-v{zero_kernels.__version__}-pack.json"
    assert json.loads(path.read_text())["commit"] is None
    assert table(records.read(path)).splitlines()[0].endswith(f"; zero-kernels {zero_kernels.__version__}")


def test_an_installed_package_says_its_version_and_no_commit(tmp_path):
    """As after ``pip install``: the two packages in a folder of their own, called from another one."""
    site = tmp_path / "site"
    for source in (records.HERE.parent, Path(zero_kernels.__file__).parent):
        shutil.copytree(source, site / source.name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**os.environ, "PYTHONPATH": str(site), "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    environment.pop(records.COMMIT_ENVIRONMENT, None)
    program = """
import pathlib, torch
from zero_optim.bench import record
record.write(record.make_record([], torch.device("cpu"), {}), pathlib.Path("."))
"""
    run = [sys.executable, "-c", program]
    outcome = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, outcome.stderr
    (file,) = tmp_path.glob("*.json")
    record = json.loads(file.read_text())
    assert (record["commit"], record["version"]) == (None, zero_kernels.__version__)
    assert file.stem == f"{record['date']}-v{zero_kernels.__version__}"


def test_where_results_go(monkeypatch, tmp_path):
    slug = records.slug(records.device_name(CPU))
    assert records.results_folder(CPU, Path("here")) == Path("here")
    assert records.results_folder(CPU, None) == records.CHECKOUT / "benchmarks" / "results" / slug
    monkeypatch.setattr(records, "CHECKOUT", tmp_path)
    assert records.results_folder(CPU, None) == Path("zero-optim-bench") / slug


def test_what_an_older_file_lacks_is_not_shown_and_what_a_newer_one_holds_is_not_read(tmp_path):
    record = {**make(make_rows("pack", 2**20)), "commit": "abc"}
    of_then = {key: value for key, value in record.items() if key != "version"}
    old = {**of_then, "schema": 2, "rows": [{k: row[k] for k in ROW_KEYS[:17]} for row in record["rows"]]}
    path = records.write(old, tmp_path, "pack")
    assert path.stem == f"{record['date']}-abc-pack"
    read = records.read(path)
    assert read["version"] is None and read["rows"] == old["rows"]
    assert table(read) == table(record)
    assert [bars.title for bars in sheets_of(read)["bandwidth"].drawings] == ["pack, fp16, 1 Mi elements"]
    (tmp_path / "new.json").write_text(json.dumps({**record, "schema": 8}))
    with pytest.raises(UsageError, match="schema 8; this version reads 2 to 7"):
        records.read(tmp_path / "new.json")


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_is_aligned_and_fits():
    rows = [row for numel in (2**20, 2**30) for row in make_rows("adam_step", numel, ("deepspeed", "apex", "te"))]
    rows += make_rows("pack", 2**20)
    lines = table(make(rows, deepspeed="0.19.8", apex="not installed")).splitlines()
    assert max(map(len, lines)) <= WIDTH
    heading = next(line for line in lines if "elements" in line and "dtype" in line)
    assert "p20" not in heading, "five ratios leave no room for it"
    assert any("p20" in line for line in lines), "one ratio does"
    first = lines[lines.index(heading) + 1]
    assert first.split()[:4] == ["1", "Mi", "fp16", "cuda"]
    assert len(first) == len(heading), "a number ends where its heading does"
    assert "deepspeed: 0.19.8" in lines and "apex: not installed" in lines


def test_the_table_names_the_yardstick_and_the_rounds():
    text = table(make(make_rows("adam_step", 2**20, yardstick=STREAM)))
    assert "of stream" in text and "of copy" not in text and "medians of 2 rounds" in text
    rows = make_rows("pack", 2**20)
    assert "medians of 2 to 9 rounds" in table(make([replace(rows[0], rounds=9), *rows[1:]]))


def test_the_table_shows_launches_and_phases():
    rows = make_rows("step", 10**9 + 1)
    counts = {"kernels": 240, "memcpys": 1, "memsets": 0, "buckets": 80}
    rows[0] = replace(rows[0], launches=counts, phases={"unscale": 1.5, "update": 0.25})
    text = table(make(rows))
    assert re.search(r"cuda .* 240 +3\.00\n", text)
    assert "fp16 cuda, ms: unscale 1.500  update 0.2500" in text
    whole = replace(rows[0], op="train_step", bytes=None, gbps=None, yardstick=None, copy_gbps=None, fraction=None)
    assert "train_step: medians of 2 rounds" in table(make([*rows, whole]))


@pytest.mark.parametrize(
    ("numel", "text"),
    [(2**30, "1 Gi"), (3 * 2**20, "3 Mi"), (1000, "1,000"), (1_007_263_744, "1,007.3 M"), (2**11, "2 Ki")],
)
def test_sizes_in_words(numel, text):
    assert elements(numel) == text


def test_milliseconds_keep_four_digits():
    assert [milliseconds(value) for value in (0.01234, 1.5, 12.345, 1234.5)] == ["0.0123", "1.500", "12.35", "1,234.50"]


def test_mebibytes():
    assert [mebibytes(count) for count in (2**20, 3 * 2**19, 200 * 2**20, 2**31)] == ["1.0", "1.5", "200", "2,048"]


def test_the_table_of_ranks_fits_too():
    memory = {"steady": 2**33, "start": 2**34}
    rows = make_rows("train_step", 10**9 + 1)
    none = dict.fromkeys(("bytes", "gbps", "yardstick", "copy_gbps", "fraction"))
    rows = [replace(row, ranks=2, tokens_per_s=2_345_678.9, memory=memory, vs={}, **none) for row in rows]
    rows[0] = replace(rows[0], backend="zero_redundancy", memory=None)
    lines = table(make(rows)).splitlines()
    assert max(map(len, lines)) <= WIDTH
    heading, first, second = lines[3:6]
    assert heading.split()[-4:] == ["MiB", "at", "start", "vs", "ddp"][-4:] and "tokens/s" in heading
    assert first.split()[-3:-1] == ["-", "-"] and second.split()[-3:-1] == ["8,192", "16,384"]
    assert len(first) == len(second) == len(heading)


# -- the plot ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numels", [[2**20], [2**20, 2**24, 2**28]], ids=["bars", "lines"])
def test_the_plot_is_drawn(tmp_path, numels):
    plot = pytest.importorskip("zero_optim.bench.plot", exc_type=ImportError)
    rows = [row for n in numels for dtype in ("fp16", "bf16") for row in make_rows("adam_step", n, dtype=dtype)]
    rows += make_rows("pack", 2**20, ("cat",))  # a panel of its own kind, and none beside it
    rows.append(replace(rows[0], op="train_step", bytes=None, gbps=None, yardstick=None, copy_gbps=None, fraction=None))
    record = make(rows)
    (sheet,) = sheets_of(record).values()
    shapes = [[type(drawing) for drawing in line] for line in sheet.grid]
    assert shapes == [[Bars if len(numels) == 1 else Lines] * 2, [Bars, type(None)]]
    assert plot.draw(record, tmp_path / "plot.png") == [tmp_path / "plot.png"]
    way = [replace(row, backend=f"{row.backend}, zeros") for row in make_rows("pack", 2**20, ("cat",))]
    sheets = sheets_of(make([*rows, *way, *make_rows("pack", 2**22, ("cat",))])).values()
    assert [type(line[0]) for sheet in sheets for line in sheet.grid][1:] == [Lines, Bars], "ways are bars of their own"
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_rows_of_two_kinds_are_two_plots(tmp_path):
    plot = pytest.importorskip("zero_optim.bench.plot", exc_type=ImportError)
    phase = PhaseRow("memory_walkthrough", "stage0", "bf16", 2**20, 2, "model", 2**20, 2**21)
    record = make([*make_rows("pack", 2**20), phase])
    names = ["plot.png", "plot-memory_walkthrough.png"]
    assert [path.name for path in plot.draw(record, tmp_path / "plot.png")] == names
    assert {path.name for path in tmp_path.iterdir()} == {*names}
    assert "pack: 28 bytes" in table(record) and "memory_walkthrough: 1 Mi bf16" in table(record)


def test_what_a_panel_shows():
    plot = pytest.importorskip("zero_optim.drawing.plot", exc_type=ImportError)
    from matplotlib.figure import Figure

    rows = [asdict(row) for numel in (2**20, 2**24) for row in make_rows("adam_step", numel)]
    axes = Figure().subplots()
    plot.draw_panel(*BANDWIDTH.sheet(rows).grid[0], axes)
    assert {tuple(line.get_xdata()) for line in axes.lines} == {(2**20, 2**24)}
    curves = {line.get_label().split(":")[0]: list(line.get_ydata()) for line in axes.lines}
    assert curves == {
        **{name: [row["gbps"] for row in rows if row["backend"] == name] for name in ("cuda", "triton", TORCH)},
        COPY: [row["copy_gbps"] for row in rows if row["backend"] == COPY],
    }
    of_bars = Figure().subplots()
    plot.draw_panel(*BANDWIDTH.sheet(rows[:4]).grid[0], of_bars)
    widths = [bar.get_width() for bar in of_bars.patches]
    assert widths[:3] == pytest.approx([row["gbps"] for row in rows[:3]])
    assert f"{COPY} {rows[0]['copy_gbps']:,.1f}" in {text.get_text() for text in of_bars.texts}
