"""The page of a run: its figures are those of the run's files, and a browser shows it without network."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from zero_optim.train.page import charts, problems, read_run, tables, write_page

KINDS = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq")
PLANNED = dict.fromkeys(KINDS, 1_000_000.0)
EVIL = "</title><script>document.title = 'taken'</script><b>&\"'"

# How many images have been drawn, and how wide what must fit into the window is.
DRAWN = "return [...document.images].filter((image) => image.naturalWidth > 300).length"
WIDTHS = """return [...document.querySelectorAll("h1, dl, figure, .wide")]
    .map((one) => one.getBoundingClientRect().right)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window and without network. Skips where there is none, no driver of it, or no selenium."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (requirements-dev.txt)")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("there is no chromium with its driver on the PATH; on Debian: make browser")
    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with selenium.Chrome(options, selenium.ChromeService(shutil.which("chromedriver"))) as driver:
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        driver.execute_cdp_cmd("Network.enable", {})
        driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        yield driver


def step(number: int, **more: Any) -> dict[str, Any]:
    values = {"loss": 5.0 / number, "lr": 1e-3, "grad_norm": 2.0 / number, "tokens_per_s": 1000.0 + number}
    ms = {"data and forward": 10.0, "backward": 20.0, "step": 5.0, "whole": 40.0}
    return {"step": number, "loss_scale": 1.0, "ms": ms, **values, **more}


def rank(**memory: float) -> dict[str, Any]:
    return {
        "memory": {**PLANNED, "communication": 250_000.0, **memory},
        "collectives": {
            "all_gather": {"calls": 30, "bytes": 10_010_000, "wait_seconds": 0.5},
            "construction": {"calls": 4, "bytes": 2_000_000, "wait_seconds": 0.25},
        },
        "seconds": {"data and forward": 0.2, "backward": 0.4, "step": 0.1},
        "steps": 10,
        "peak_bytes": 123_000_000,
    }


def make_run(folder: Path, steps: list[dict[str, Any]], end: dict[str, Any] | None = None, **more: Any) -> Path:
    """Write a run's files. ``end`` changes its ending; ``more`` changes ``run.json``."""
    ending = {"outcome": "finished", "step": 10, "seconds": 90.0, "validation_loss": 2.5, "entropy": 3.25}
    session = {
        **{"started": "2026-01-02T03:04:05.000006+00:00", "after_step": 0, "resumed_from": None},
        **{"command": "zero-optim train --ranks 2", "facts": {"model": "1 M parameters"}, "parameters": 1_000_000},
        **{"peak_of": "resident", "config": {"steps": 10, "stage": 2, "device": "cpu", "clip": 1.0}},
        "plan": {"memory": PLANNED, "traffic": {"all_gather": 1_000_000.0}, "state_kinds": KINDS},
        "ending": {**ending, "ranks": [rank(), rank(master=1_004_000.0)], **(end or {})},
    }
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    (folder / "run.json").write_text(json.dumps({**session, **more}))
    return folder


STEPS = [step(number) for number in range(1, 11)]
ODD = {6: {"grad_norm": None, "loss": None}}


def test_charts_hold_the_values_of_the_log(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    steps = [step(number, loss_scale=64.0, **ODD.get(number, {})) for number in range(1, 11)]
    drawn = [axes for chart in charts(read_run(make_run(tmp_path / "run", steps))) for axes in chart.axes]
    found = {axes.get_title("left"): axes for axes in drawn}
    lines = {
        "Loss": "loss",
        "Speed": "tokens_per_s",
        "Gradient norm": "grad_norm",
        "Loss scale": "loss_scale",
        "Learning rate": "lr",
    }
    for title, key in lines.items():
        values = [math.nan if line[key] is None else line[key] for line in steps]
        assert [*found[title].lines[0].get_ydata(orig=False)] == pytest.approx(values, nan_ok=True)
    labels = {title: [text.get_text() for text in axes.get_legend().texts] for title, axes in found.items()}
    assert labels["Loss"] == ["training: 0.5", "held out: 2.5", "unigram entropy: 3.25"]
    assert labels["Gradient norm"] == ["before clipping: 0.2", "clipped to: 1"]
    for title in ("Loss", "Gradient norm", "Loss scale"):
        (marks,) = found[title].collections
        assert [x for ((x, _), _) in marks.get_segments()] == [6]
    parts = ["the rest: 5", "step: 5", "backward: 20", "data and forward: 10"]
    assert labels["Timeline of a step"] == parts and list(found) == [*lines, "Timeline of a step"]


def test_tables_against_the_plan(tmp_path: Path) -> None:
    memory, traffic, time = tables(read_run(make_run(tmp_path / "run", STEPS)).session)
    rows = {name: cells for table in (memory, traffic, time) for name, *cells in table.rows}
    assert rows["master"] == ["1.000", "1.004", "1.000", "1"]
    assert rows["model state"] == ["5.000", "5.004", "5.000", "5"]
    assert rows["communication"] == ["0.250", "0.250", "0.000", "0"]
    # 10.01 MB in ten steps; what construction moved is of no step.
    assert rows["all_gather"] == ["30", "10.010", "1.001", "1.000", "0.50"]
    assert rows["construction"][2] == "once"
    # 0.75 s blocked, of which 0.25 s before the first step.
    assert rows["exposed communication"] == ["50.0", "50.0"] and rows["backward"] == ["40.0", "40.0"]
    many = make_run(tmp_path / "many", STEPS, {"ranks": [rank(master=1e6 * n) for n in range(1, 7)]})
    memory, *_ = tables(read_run(many).session)
    assert memory.headings[:2] == ["least", "most"] and ["master", "1.000", "6.000", "1.000", "1"] in memory.rows


@pytest.mark.parametrize(
    ("end", "parts"),
    [
        ({}, []),
        ({"ranks": [rank(master=1_051_000.0)]}, ["Model state of rank 0 is 5.051 MB, +1.02", "above the plan"]),
        ({"outcome": "interrupted"}, ["not finished: interrupted"]),
    ],
)
def test_problems(tmp_path: Path, end: dict[str, Any], parts: list[str]) -> None:
    run = make_run(tmp_path / "run", STEPS, end)
    found = problems(read_run(run))
    assert len(found) == bool(parts) and all(part in found[0] for part in parts)
    html = write_page(run).read_text()
    assert ("All losses are finite" in html) is not bool(parts) and all(part in html for part in found)


def test_skipped_steps_are_problems_and_a_cut_off_line_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [step(n, **ODD.get(n, {})) for n in range(1, 11)], ending=None)
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 11, "lo')
    assert problems(read_run(run)) == [
        "The loss of 1 step was not finite, first at step 6.",
        "1 step skipped, as gradients were not finite: first step 6, last step 6.",
        "The run is not finished: running or killed.",
    ]
    assert "<dd>10 of 10, 1 skipped</dd>" in write_page(run).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 20_000])
def test_runs_of_any_length_are_drawn_small(tmp_path: Path, count: int) -> None:
    pytest.importorskip("matplotlib")
    losses = {8_237: 9.0, 5_000: None}
    steps = [step(n, loss=losses.get(n, 2.0 + n % 7 / 10)) for n in range(1, count + 1)]
    run = make_run(tmp_path / "run", steps)
    html = write_page(run).read_text()
    assert html.count("<figure>") == 5 and len(html) < 1_000_000
    assert html == write_page(run).read_text()


def test_without_matplotlib_the_page_has_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = make_run(tmp_path / "run", STEPS)
    html = write_page(run).read_text()
    assert "pip install zero-kernels[train]" in html and "<td>1.004</td>" in html and "<figure>" not in html
    assert not (run / "loss.png").exists()


def test_a_browser_shows_it_without_network(tmp_path: Path, browser: Any) -> None:
    """Charts are drawn, nothing is wider than the window, no script of a file's name runs, and nothing is fetched."""
    pytest.importorskip("matplotlib")
    steps = [step(number, loss_scale=1024.0, **ODD.get(number, {})) for number in range(1, 11)]
    run = make_run(tmp_path / "<b>run&", steps, command=EVIL, facts={EVIL: EVIL}, peak_of=EVIL)
    page = write_page(run)
    assert (run / "loss.png").stat().st_size > 10_000
    assert not re.search(r"https?://|<script|@import|url\(", page.read_text())
    for width in (380, 1400):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get_log("performance")
        browser.get(page.as_uri())
        events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
        sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
        assert [address for address in sent if not address.startswith("data:")] == [page.as_uri()]
        assert browser.get_log("browser") == [] and browser.title == "<b>run&: zero-optim train"
        assert browser.execute_script("return document.body.innerText").count(EVIL) >= 3
        widths = browser.execute_script(WIDTHS)
        assert browser.execute_script(DRAWN) == 6 and len(widths) == 11 and max(widths) <= width, widths
    # What these checks would see: a script and an image that get in are refused by the page's policy.
    injected = f'<body>{EVIL}<img src="http://127.0.0.1:9/x.png">'
    (tmp_path / "evil.html").write_text(page.read_text().replace("<body>", injected))
    browser.get((tmp_path / "evil.html").as_uri())
    assert sum("Content Security Policy" in line["message"] for line in browser.get_log("browser")) == 2
    assert browser.title == "<b>run&: zero-optim train"
