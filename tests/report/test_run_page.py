"""The page of a run: its figures are those of the run's files, and every odd run has a sensible page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cells import slow
from run_cases import Page, ending, make_run, rank_report, session, step
from zero_optim.cli import main
from zero_optim.drawing.sheet import Marks, Scale
from zero_optim.errors import UsageError
from zero_optim.report.run_charts import charts, losses
from zero_optim.report.run_data import problems, read_run
from zero_optim.report.run_page import write_run_page
from zero_optim.train.account import draw_losses
from zero_optim.train.run_dir import RunDir
from zero_optim.train.session import Outcome, sessions_from_text, sessions_to_text, taken_back

STEPS = [step(number) for number in range(1, 11)]


def page_of(run: Path) -> Page:
    return Page(write_run_page(run).read_text())


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page that is not drawn, all figures are there: ``test_without_matplotlib...`` says so."""
    monkeypatch.delitem(sys.modules, "zero_optim.drawing.plot", raising=False)
    monkeypatch.delattr("zero_optim.drawing.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


UNDRAWN = pytest.mark.usefixtures("undrawn")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", STEPS, [session()])


# -- figures -----------------------------------------------------------------------------------------------------------


def test_charts_hold_the_values_of_the_log(run: Path) -> None:
    page = page_of(run)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    for chart, name, key in (
        ("loss", "training", "loss"),
        ("speed", "tokens/s", "tokens_per_s"),
        ("norm", "before clipping", "grad_norm"),
        ("rate", "learning rate", "lr"),
    ):
        assert page.line(chart, name) == [(line["step"], line[key]) for line in log]
    for phase in ("data and forward", "backward", "step"):
        assert page.line("timeline", phase) == [(line["step"], line["ms"][phase]) for line in log]
    rest = [(line["step"], 40 + line["step"] - (10 + line["step"] + 20 + 5)) for line in log]
    assert page.line("timeline", "the rest") == rest
    assert page.line("loss", "held out") == [(10, 2.5)]
    assert {value for _, value in page.line("loss", "unigram entropy")} == {3.25}
    assert {value for _, value in page.line("norm", "clipped to")} == {1.0}
    assert "1 of 10 steps were clipped" in page.text  # norms are 2, 1, 2/3, ...


def test_norms_are_drawn_by_layer(tmp_path: Path) -> None:
    """Of eight layers six, in colours of their own; a step that was skipped leaves a gap."""
    numbers = {
        f"grad_norm/blocks.{n}.{name}": (n + 1) * of for n in range(7) for name, of in (("up", 3.0), ("down", 4.0))
    }
    numbers |= {"grad_norm/norm.weight": 0.5, "update_norm/norm.weight": 9.0}
    steps = [step(1, telemetry=numbers), step(2, telemetry={}, grad_norm=None), step(3, telemetry=numbers)]
    page = page_of(make_run(tmp_path / "measured", steps, [session()]))
    for layer, norm in (("blocks.0", 5.0), ("blocks.6", 35.0), ("norm", 0.5)):
        if layer != "blocks.6":
            assert page.line("layers", layer) == [(1, norm), (2, None), (3, norm)]
    (chart,) = (chart for chart in page.data["charts"] if chart["key"] == "layers")
    assert [line["name"] for line in chart["lines"]] == [*(f"blocks.{n}" for n in (0, 1, 3, 4, 6)), "norm"]
    assert "2 layers between these are not drawn" in page.text
    assert not any(
        chart["key"] == "layers" for chart in page_of(make_run(tmp_path / "run", STEPS, [session()])).data["charts"]
    )


@UNDRAWN
def test_the_figures_on_top(run: Path) -> None:
    page = page_of(run)
    assert page.data["summary"] == {
        "steps": 10,
        "loss": 0.5,
        "held_out_loss": 2.5,
        "tokens_per_s": 1005.5,
        "skipped_steps": 0,
        "peak_bytes": 123_000_000,
        "seconds": 90.0,
    }
    for text in ("123 MB", "1 min 30 s", "Nothing was off", "zero-optim train --ranks 2", "12 parameters in bf16"):
        assert text in page.text


@UNDRAWN
def test_memory_and_traffic_beside_what_was_planned(run: Path) -> None:
    page = page_of(run)
    assert "Memory of rank 1, which holds most" in page.text
    assert page.row("master") == ["1.004", "1.000", "+0.40\N{NO-BREAK SPACE}%"]
    assert page.row("model state") == ["5.004", "5.000", "+0.08\N{NO-BREAK SPACE}%"]
    assert page.row("communication") == ["0.250", "\N{EN DASH}", "\N{EN DASH}"]
    # 10.01 MB in ten steps; what construction moved is of no step.
    assert page.row("all_gather") == ["1.001", "1.000", "+0.10\N{NO-BREAK SPACE}%", "30", "0.50"]
    assert page.row("construction")[:2] == ["2.000 once", "\N{EN DASH}"]
    # 0.75 s blocked, of which 0.25 s before the first step.
    assert page.row("exposed communication") == ["50.0", "50.0"]
    assert page.row("backward") == ["40.0", "40.0"]


def test_what_is_drawn(run: Path) -> None:
    """Title, unit, names of lines and their last values: as words of the drawing, and for those who hear the page."""
    pytest.importorskip("matplotlib")
    page = page_of(run)
    titles = ["Loss", "Speed", "Gradient norm", "Learning rate", "Timeline of a step"]
    assert [title for title, words in zip(titles, page.drawings, strict=True) if title not in words] == []
    assert {"nats per byte", "training: 0.5", "held out: 2.5", "unigram entropy: 3.25"} <= {*page.drawings[0]}
    assert 'alt="Loss, nats per byte. training: 0.5; held out: 2.5; unigram entropy: 3.25."' in page.html
    assert {"data and forward: 20", "backward: 20", "step: 5", "the rest: 5"} <= {*page.drawings[-1]}


def test_the_same_run_has_the_same_page(run: Path) -> None:
    assert write_run_page(run).read_bytes() == write_run_page(run).read_bytes()


def test_without_matplotlib_the_page_has_all_but_its_charts(run: Path, request: pytest.FixtureRequest) -> None:
    with_charts = page_of(run)
    request.getfixturevalue("undrawn")
    page = page_of(run)
    assert "pip install zero-kernels[train]" in page.text and page.drawings == []
    assert page.data == with_charts.data and page.tables == with_charts.tables


def test_losses_are_a_picture_too(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = pytest.importorskip("zero_optim.drawing.plot", exc_type=ImportError)
    asked = []
    monkeypatch.setattr(plot, "png", lambda sheet, path: asked.append((sheet.drawings, path)))
    assert draw_losses(RunDir(run)) is None
    assert asked == [([losses(read_run(run))], run / "loss.png")]
    monkeypatch.delitem(sys.modules, "zero_optim.drawing.plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = draw_losses(RunDir(run))
    assert said.startswith("loss.png was not drawn: ") and said.endswith("pip install matplotlib")


def test_the_help_needs_no_matplotlib() -> None:
    script = "import sys; from zero_optim.cli import main; main(sys.argv[1:])"
    watched = f"import atexit, sys; atexit.register(lambda: print('matplotlib' in sys.modules)); {script}"
    command = [sys.executable, "-c", watched, "report", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    assert "report" in said and said.splitlines()[-1] == "False"


@UNDRAWN
def test_the_table_of_steps_has_every_step(run: Path) -> None:
    page = page_of(run)
    assert page.row("4") == ["1.2500", "0.5", "0.004", "1", "1,004", "14.0", "20.0", "5.0"]
    assert len([row for row in page.tables if row and row[0].isdigit()]) == 10


# -- what was off ------------------------------------------------------------------------------------------------------


def test_skipped_steps_and_lost_losses_are_named_and_drawn(tmp_path: Path) -> None:
    odd = {2: {"grad_norm": None}, 4: {"grad_norm": None, "loss": None}}
    steps = [step(number, loss_scale=1024.0, **odd.get(number, {})) for number in range(1, 6)]
    page = page_of(make_run(tmp_path / "run", steps, [session()]))
    said = " ".join(page.data["problems"])
    assert "The loss of 1 step was not finite, first at step 4." in said
    assert "2 steps of 5 were skipped" in said and "first step 2, last step 4" in said and "In fp16" in said
    assert page.line("loss", "training")[3] == (4, None)
    assert page.row("4")[:2] == ["not finite", "not finite: skipped"]
    of_loss, _, of_norm, of_scale, *_ = (chart.drawing for chart in charts(read_run(tmp_path / "run")))
    assert of_loss.marks == Marks([4], "not finite") and of_norm.marks == of_scale.marks == Marks(
        [2, 4], "skipped step"
    )
    assert page.line("scale", "loss scale") == [(number, 1024.0) for number in range(1, 6)]


@pytest.mark.parametrize(("master", "told"), [(1_049_000.0, False), (1_051_000.0, True)])
def test_memory_above_plan_is_told_from_one_percent_on(tmp_path: Path, master: float, told: bool) -> None:
    end = ending(ranks=(rank_report(), rank_report(master=master)))
    found = problems(read_run(make_run(tmp_path / "run", STEPS, [session(ending=end)])))
    assert bool(found) == told
    assert not told or "Model state of rank 1 is 5.051 MB where 5.000 MB were planned: +1.02" in found[0]


@UNDRAWN
@pytest.mark.parametrize(
    ("last", "said"),
    [
        (session(ending=None), "No end is on record"),
        (session(ending=ending(outcome=Outcome.INTERRUPTED, step=7)), "interrupted after step 7 of 10"),
        (
            session(ending=ending(outcome=Outcome.FAILED, step=7, why="CollectiveError: rank 1 died", ranks=())),
            "failed after step 7: CollectiveError: rank 1 died",
        ),
        (session(ending=ending(validation_loss=None)), "held-out loss was not finite"),
    ],
    ids=["running", "interrupted", "failed", "validation"],
)
def test_how_it_ended(tmp_path: Path, last: object, said: str) -> None:
    page = page_of(make_run(tmp_path / "run", STEPS, [last]))
    assert said in page.text and said in " ".join(page.data["problems"])


# -- odd runs ----------------------------------------------------------------------------------------------------------


def test_a_run_of_one_step(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", STEPS[:1], [session()]))
    assert page.line("loss", "training") == [(1, 5.0)]


def test_a_run_without_a_step(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", [], [session(ending=None)]))
    assert page.data["charts"] == [] and "The log holds no step yet" in page.text


@UNDRAWN
def test_a_run_of_an_earlier_version_has_a_log_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [], [])
    line = {"step": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0, "loss_scale": 1.0, "tokens_per_s": 5.0}
    (run / "log.jsonl").write_text(json.dumps(line) + "\n")
    page = page_of(run)
    assert page.line("loss", "training") == [(1, 2.0)] and "There is no run.json" in page.text
    assert "timeline" not in [chart["key"] for chart in page.data["charts"]]
    assert page.row("1") == ["2.0000", "1", "0.1", "1", "5"]


def test_only_losses_that_are_not_finite(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", [step(n, loss=None, grad_norm=None) for n in (1, 2)], [session()]))
    assert page.line("loss", "training") == [(1, None), (2, None)]


@UNDRAWN
def test_a_resumed_run_shows_every_start(tmp_path: Path) -> None:
    first = session(ending=ending(outcome=Outcome.INTERRUPTED, step=6, validation_loss=None, entropy=None))
    first = replace(first, taken_back_to=4)
    page = page_of(make_run(tmp_path / "run", STEPS, [first, session(after_step=4, resumed_from="/runs/a")]))
    assert page.row("2026-01-02 03:00:05")[:3] == ["1", "6, taken back to 4", "interrupted"]
    assert page.row("2026-01-02 03:01:05")[:3] == ["5", "10", "finished"]
    assert page.data["summary"]["seconds"] == 180.0
    assert "/runs/a, after step 4" in page.text and "Nothing was off" in page.text


@pytest.mark.parametrize(("count", "size"), [(20_000, 32), pytest.param(100_000, 157, marks=slow)])
def test_a_very_long_run_keeps_its_peaks(tmp_path: Path, count: int, size: int) -> None:
    spike, dip = 8_237, 17_603
    values = {spike: 9.0, dip: 0.25}
    odd = {"grad_norm": None}
    steps = [
        step(n, loss=values.get(n, 2.0 + (n % 7) / 10), ms=None, **(odd if n % 10 == 1 else {}))
        for n in range(1, count + 1)
    ]
    page = page_of(make_run(tmp_path / "run", steps, [session()]))
    points, band = page.line("loss", "training"), page.band("loss", "training")
    firsts = range(1, count + 1, size)
    assert len(points) == len(band) == len(firsts) <= 640
    for number, first in enumerate(firsts):
        there = [one.loss for one in steps[first - 1 : first - 1 + size]]
        assert points[number] == (steps[first - 1 + len(there) // 2].step, pytest.approx(sum(there) / len(there)))
        assert band[number] == [min(there), max(there)]
    assert band[(spike - 1) // size][1] == 9.0 and band[(dip - 1) // size][0] == 0.25
    assert f"Each point is the mean of {size} steps; shaded: from the least to the most." in page.text
    assert len(page.html) < 1_500_000
    norms = next(chart.drawing for chart in charts(read_run(tmp_path / "run")) if chart.key == "norm")
    assert len(norms.marks.x) <= 700  # of a tenth of all steps, which were skipped


def test_a_rare_peak_does_not_press_all_else_to_the_floor(tmp_path: Path) -> None:
    steps = [
        step(n, loss=1000.0 if n == 30 else 2.0 + n / 100, grad_norm=1000.0 if n < 3 else 1.0) for n in range(1, 101)
    ]
    run = make_run(tmp_path / "run", steps, [session()])
    of_loss, _, of_norm, *_ = charts(read_run(run))
    assert 3.25 < of_loss.drawing.top < 10, "the entropy of 3.25 stays in sight"
    assert of_loss.note == "Values above 4.49 are cut off."
    assert (of_norm.drawing.scale, of_norm.drawing.top) == (Scale.TENS, None)
    assert of_norm.note == "2 of 100 steps were clipped. Logarithmic axis."
    assert of_loss.note in page_of(run).text


@UNDRAWN
def test_a_line_that_is_being_written_is_left_out(run: Path) -> None:
    with (run / "log.jsonl").open("a") as log:
        log.write('{"step": 11, "lo')
    assert page_of(run).data["summary"]["steps"] == 10


@UNDRAWN
def test_names_from_files_never_become_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b>&\"'"
    odd = session(command=evil, facts={"model": evil, evil: "x"}, peak_of=evil)
    run = make_run(tmp_path / "<b>run&", STEPS, [odd])
    page = page_of(run)
    assert "<b>" not in page.html and "alert(1)</script>" not in page.html
    assert page.text.count(evil) >= 3 and page.data["run"] == str(run)


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_policy_forbids_the_network_and_all_scripts(run: Path) -> None:
    html = page_of(run).html
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', html)[1].replace("&#x27;", "'")
    assert "default-src 'none'" in policy and "script-src" not in policy and "img-src data:;" in policy
    assert re.findall(r"<script[^>]*>", html) == ['<script type="application/json" id="data">']
    assert not re.search(r"https?://|src=\"(?!data:)|@import|url\(", html)


# -- the command -------------------------------------------------------------------------------------------------------


@UNDRAWN
def test_the_command_writes_into_the_folder_or_where_it_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert main(["report", str(run), "--out", str(tmp_path / "a.html")]) == 0
    assert (tmp_path / "a.html").read_text() == (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda folder: None, ["no such file or folder"]),
        (lambda folder: folder.mkdir(), ["holds no log.jsonl", "zero-optim bench"]),
        (lambda folder: _damaged(folder, "log.jsonl", "{}\n"), ["log.jsonl: line 1 is no step"]),
        (lambda folder: _damaged(folder, "run.json", "[]"), ["run.json: is not as zero-optim train writes it"]),
        (lambda folder: _damaged(folder, "run.json", '{"schema": 99}'), ["run.json: has schema 99"]),
    ],
    ids=["absent", "empty", "log", "run", "schema"],
)
def test_what_is_no_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: object, parts: list[str]
) -> None:
    make(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(tmp_path / "run") in said
    assert all(part in said for part in parts), said


def _damaged(folder: Path, name: str, content: str) -> None:
    make_run(folder, STEPS, [session()])
    (folder / name).write_text(content)


def test_a_folder_without_a_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no log.jsonl"):
        read_run(tmp_path)


def test_a_page_that_cannot_be_written_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--out", str(run / "nowhere" / "a.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


# -- run.json ----------------------------------------------------------------------------------------------------------


def test_sessions_come_back_as_they_were_written() -> None:
    whole = [session(), session(ending=None), session(ending=ending(outcome=Outcome.FAILED, why="x"), taken_back_to=3)]
    assert sessions_from_text(sessions_to_text(whole)) == whole


def test_what_is_left_of_sessions_when_a_run_goes_back() -> None:
    early = session(ending=ending(step=4))
    late = session(after_step=4, ending=ending(step=9))
    killed = session(after_step=4, ending=None)
    last = session(after_step=9)
    assert taken_back([early, late, last], 6) == [early, replace(late, taken_back_to=6)]
    assert taken_back([early, killed], 6) == [early, replace(killed, taken_back_to=6)]
    assert taken_back([early, late, last], 4) == [early]
    assert taken_back([replace(late, taken_back_to=6)], 8) == [replace(late, taken_back_to=6)]
    assert taken_back([early, late], 0) == []


def test_a_session_takes_the_place_of_its_beginning(run: Path) -> None:
    (begun,) = RunDir(run).sessions()
    RunDir(run).write_session(replace(begun, ending=None))
    assert RunDir(run).sessions() == [replace(begun, ending=None)]
    RunDir(run).write_session(session(started="later"))
    assert [one.started for one in RunDir(run).sessions()] == [begun.started, "later"]
