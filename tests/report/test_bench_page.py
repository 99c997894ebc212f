"""The page of benchmark results: its figures are those of the JSON files, all of them drawn."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from cells import slow_where
from run_cases import Page
from zero_optim.bench.record import read
from zero_optim.bench.rows import sheets_of
from zero_optim.bench.table import table
from zero_optim.cli import main
from zero_optim.drawing.sheet import Bars, Lines
from zero_optim.report.bench_page import results_in, write_bench_page

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FILES = sorted(RESULTS.rglob("*.json"))
OPS = {"train_step", "stages", "step_overhead", "memory_walkthrough", "scale", "endurance", "checkpoint", "adam_step"}
KINDS = {path: frozenset(row["op"] for row in json.loads(path.read_text())["rows"]) for path in FILES}
NEWEST = {max((path for path in FILES if KINDS[path] == kind), key=lambda path: path.name) for kind in KINDS.values()}
"""Of each kind of results: one file for what it has rows of."""


def bandwidth_record(numels: list[int]) -> dict:
    """Of two backends under a roof of 100 GB/s."""
    rows = [
        {
            "op": "pack", "backend": name, "dtype": "bf16", "numel": numel, "rounds": 3, "ms": numel * 4e-6 / gbps,
            "p20": numel * 4e-6 / (gbps + 1), "p80": numel * 4e-6 / (gbps - 1), "bytes": 4, "gbps": gbps,
            "yardstick": "copy", "copy_gbps": 100.0, "fraction": gbps / 100, "vs_torch": gbps / 25, "vs": {},
        }
        for numel in numels
        for name, gbps in (("triton", 90.0 + numel / 2**24), ("torch_pipeline", 25.0), ("copy", 100.0))
    ]  # fmt: skip
    about = {
        "device": "a <GPU>",
        "driver": None,
        "torch": "2",
        "cuda": None,
        "triton": None,
        "commit": "c",
        "isa": None,
    }
    return {
        "schema": 6,
        **about,
        "date": "2026-01-01",
        "python": "3",
        "load": 0,
        "threads": None,
        "baselines": {},
        "rows": rows,
    }


def page_of(path: Path, out: Path) -> Page:
    return Page(write_bench_page(path, out).read_text())


def test_there_is_a_result_of_every_kind() -> None:
    assert {row["op"] for path in FILES for row in read(path)["rows"]} >= OPS


@pytest.mark.parametrize("path", slow_where(lambda path: path not in NEWEST, FILES), ids=lambda path: path.stem)
def test_every_result_here_is_drawn(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, record = page_of(path, tmp_path / "a.html"), read(path)
    (said,) = page.data["results"]
    assert said["rows"] == record["rows"] and said["file"] == str(path)
    assert table(record) in page.text
    drawings = [drawing for sheet in sheets_of(record).values() for drawing in sheet.drawings]
    lines = [drawing for drawing in drawings if isinstance(drawing, Lines)]
    assert [[(line["name"], line["x"], line["y"]) for line in chart["lines"]] for chart in page.data["charts"]] == [
        [(line.name, line.x, line.y) for line in drawing.all_lines] for drawing in lines
    ]
    assert len(page.drawings) == len(drawings)
    assert drawings or (record["phases"] and not record["rows"]), "only tests on a GPU have nothing to draw"
    for drawing, words in zip(drawings, page.drawings, strict=True):
        assert not _said_by(drawing) - Counter(words)


def _said_by(drawing: Bars | Lines) -> Counter[str]:
    """Words that are on the drawing, each as often as here."""
    if isinstance(drawing, Lines):
        return Counter([drawing.title, drawing.unit, *(line.label for line in drawing.all_lines)])
    bars = [word for bar in drawing.bars for word in (bar.name, *bar.figures)]
    return Counter([drawing.title, drawing.unit, *({bar.group for bar in drawing.bars} - {""}), *bars])


def test_the_lines_of_endurance_are_its_samples() -> None:
    (path,) = [path for path in FILES if path.stem.endswith("endurance")]
    record = read(path)
    _, _, ms = sheets_of(record)["endurance"].grid[1]
    rows = [row for row in record["rows"] if row["ranks"] == 2]
    assert [(line.name, line.x, line.y) for line in ms.lines] == [
        (row["backend"], row["samples"]["step"], row["samples"]["ms"]) for row in rows
    ]


def test_one_size_is_bars_under_the_roof(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(bandwidth_record([2**24])))
    page = page_of(tmp_path / "a.json", tmp_path / "a.html")
    assert page.data["charts"] == [] and "GB/s, 4 bytes an element. triton 91, torch_pipeline 25." in page.html


def test_several_sizes_are_lines_under_the_roof(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(bandwidth_record([2**20, 2**24])))
    page = page_of(tmp_path / "a.json", tmp_path / "a.html")
    assert page.line("chart-0-0", "triton") == [(2**20, 90.0625), (2**24, 91.0)]
    assert page.line("chart-0-0", "copy") == [(2**20, 100.0), (2**24, 100.0)]
    assert "triton: 0.91; torch_pipeline: 0.25; copy: 100 GB/s." in page.html and "a <GPU>" in page.text


def test_a_folder_is_one_page_the_newest_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    below = tmp_path / "results" / "device"
    below.mkdir(parents=True)
    for day in ("01", "03", "02"):
        record = {**bandwidth_record([2**20]), "date": f"2026-01-{day}"}
        (below / f"2026-01-{day}-c.json").write_text(json.dumps(record))
    (below / "other.json").write_text('{"schema": 1}')
    (below / "broken.json").write_text("{")
    assert [path.stem for path in results_in(tmp_path)] == ["2026-01-03-c", "2026-01-02-c", "2026-01-01-c"]
    assert main(["report", str(tmp_path / "results")]) == 0
    written = tmp_path / "results" / "report.html"
    assert capsys.readouterr().out == f"{written}\n"
    page = Page(written.read_text())
    assert [result["date"] for result in page.data["results"]] == ["2026-01-03", "2026-01-02", "2026-01-01"]
    assert re.findall(r'href="#([\w-]+)"', page.html) == re.findall(r'<section id="([\w-]+)"', page.html)


def test_without_matplotlib_one_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "zero_optim.drawing.plot", raising=False)
    monkeypatch.delattr("zero_optim.drawing.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps(bandwidth_record([2**20, 2**24])))
    page = page_of(tmp_path, tmp_path / "all.html")
    assert page.text.count("pip install zero-kernels[train]") == 1 and page.drawings == []
    assert page.text.count("pack: 4 bytes an element") == 2 and len(page.data["charts"]) == 2


def test_one_result_is_written_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(bandwidth_record([2**20])))
    assert write_bench_page(tmp_path / "a.json") == tmp_path / "a.html"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("{", "is no record of a benchmark"),
        ('{"rows": [{"curve": []}], "schema": 3}', "its rows are of something else"),
        ('{"rows": [], "schema": 1}', "has schema 1; this version reads"),
    ],
)
def test_what_is_no_result_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, part: str
) -> None:
    (tmp_path / "a.json").write_text(content)
    assert main(["report", str(tmp_path / "a.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"zero-optim report: {tmp_path / 'a.json'}: ") and part in said and said.count("\n") == 1


def test_a_result_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(bandwidth_record([2**20])))
    before = file.read_text()
    assert main(["report", str(file), "--out", str(file)]) == 2
    assert "is what the page is made of" in capsys.readouterr().err and file.read_text() == before


def test_a_record_without_rows_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({**bandwidth_record([]), "rows": []}))
    assert "no rows" in page_of(tmp_path / "a.json", tmp_path / "a.html").text
