"""What plots show of what was declared: lines with gaps, areas, marks, axes, ends; and of very many points."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from zero_optim.drawing.sheet import POINTS, Bar, Bars, Line, Lines, Look, Marks, Scale, Sheet, points_in_one, thinned

plot = pytest.importorskip("zero_optim.drawing.plot", exc_type=ImportError)
from matplotlib.figure import Figure  # noqa: E402

THREE = Line("training", [1, 2, 3], [4.0, None, 2.0], "2")


def panel_of(*lines: Line, **more: Any) -> Any:
    axes = Figure().subplots()
    plot.draw_panel(Lines("title", "unit", lines, **more), axes)
    return axes


def names_in(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_missing_value_is_a_gap() -> None:
    (line,) = panel_of(THREE).lines
    assert line.get_xdata().tolist() == [1, 2, 3]
    low, gap, high = line.get_ydata().tolist()
    assert (low, high) == (4.0, 2.0) and math.isnan(gap)


def test_lines_are_named_in_their_colours_those_that_end_highest_first() -> None:
    axes = panel_of(Line("lost", [1, 2], [None, None], ""), THREE, Line("step", [1, 2], [1.0, 3.0], "3 ms"))
    assert names_in(axes) == ["step: 3 ms", "training: 2", "lost"]
    assert [text.get_color() for text in axes.get_legend().get_texts()] == [plot.ORANGE, plot.BLUE, plot.FAINT]


@pytest.mark.parametrize("steps", [[1], [1, 2, 3]])
def test_steps_are_whole(steps: list[int]) -> None:
    axes = panel_of(Line("training", steps, [2.0 for _ in steps], "2"))
    ticks = axes.get_xticks()
    assert len(ticks) >= 3 and all(tick == int(tick) for tick in ticks)
    assert (axes.lines[0].get_marker() == "o") == (len(steps) == 1), "a line of one point would be nothing"


def test_dots_dashes_and_bands() -> None:
    band = Line("tokens/s", [1, 2], [2.0, 3.0], "3", band=[(1.0, 4.0), (2.0, 5.0)])
    axes = panel_of(
        band, Line("held out", [2], [1.0], "1", look=Look.DOTS), Line("c", [1, 2], [1, 1], "1", look=Look.DASHED)
    )
    shade, (whole, dots, dashes) = axes.collections[0], axes.lines
    assert {(x, y) for x, y in shade.get_paths()[0].vertices.tolist()} == {(1, 1), (1, 4), (2, 2), (2, 5)}
    assert (dots.get_linestyle(), dots.get_marker()) == ("None", "o")
    assert dashes.get_linestyle() == "--" and whole.get_linestyle() == "-"
    assert axes.get_ylim()[1] > 5, "the band is in sight"


def test_stacked_lines_are_areas_on_each_other() -> None:
    parts = [Line("data and forward", [1, 2], [1.0, 2.0], "2"), Line("step", [1, 2], [10.0, None], "")]
    axes = panel_of(*parts, stacked=True)
    first, second = axes.collections
    assert names_in(axes) == ["step", "data and forward: 2"], "as they lie"
    assert {(x, y) for x, y in first.get_paths()[0].vertices.tolist()} == {(1, 0), (2, 0), (1, 1), (2, 2)}
    assert {(x, y) for x, y in second.get_paths()[0].vertices.tolist()} == {(1, 1), (2, 2), (1, 11)}
    alone = panel_of(Line("step", [5], [3.0], "3"), stacked=True).collections[0]
    assert {(x, y) for x, y in alone.get_paths()[0].vertices.tolist()} == {(4.6, 0), (5.4, 0), (4.6, 3), (5.4, 3)}


def test_marks_are_upright_lines_over_the_whole_height() -> None:
    axes = panel_of(THREE, marks=Marks([2, 3], "skipped step"))
    (marks,) = axes.collections
    assert [segment.tolist() for segment in marks.get_segments()] == [[[2, 0], [2, 1]], [[3, 0], [3, 1]]]
    assert names_in(axes) == ["training: 2", "skipped step"]


@pytest.mark.parametrize(
    ("scale", "top", "limits", "kind"),
    [
        (Scale.FROM_ZERO, None, (0, 448), "linear"),
        (Scale.FROM_ZERO, 8.0, (0, 8), "linear"),
        (Scale.DATA, 22.0, (1, 22), "linear"),
        (Scale.TWOS, None, (1, 800), "log"),
    ],
)
def test_where_axes_begin_and_end(scale: Scale, top: float | None, limits: tuple[float, float], kind: str) -> None:
    axes = panel_of(Line("a", [1, 2, 3], [2.0, 4.0, 400.0], "400"), scale=scale, top=top)
    assert axes.get_ylim() == pytest.approx(limits) and axes.get_yscale() == kind


def test_an_svg_is_the_same_each_time_small_and_its_words_are_text() -> None:
    bars = Bars("<title>", "GB/s", [Bar("ours", 3.0, (2.0, 4.0), ["3.0"])], ["GB/s"])
    drawn = plot.svg(bars)
    assert drawn == plot.svg(bars) and "<date" not in drawn and "dc:" not in drawn
    assert "&lt;title&gt;</text>" in drawn and ">ours</text>" in drawn
    steps = range(1, 1001)
    long = plot.svg(
        Lines("a", "b", [Line("training", steps, [math.sin(step) for step in steps], "1")], scale=Scale.DATA)
    )
    assert len(long) < 60_000 and not re.search(r" d=\"[^\"]*\.\d{3}", long)


def test_a_sheet_has_its_words_around_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    panel = Lines("title", "unit", [THREE])
    plot.png(Sheet([[panel, None]], "note", title="device", details="torch"), tmp_path / "a.png")
    assert [text.get_text() for text in saved[0].texts] == ["device", "torch", "note"]
    assert [bool(axes.axison) for axes in saved[0].axes] == [True, False]


# -- very many points --------------------------------------------------------------------------------------------------


def test_few_points_are_as_they_are() -> None:
    steps = list(range(2 * POINTS))
    line = Line("a", steps, [1.0] * len(steps), "1")
    assert thinned(line) is line and points_in_one(len(steps)) == 1


def test_many_points_become_means_with_a_band() -> None:
    steps = list(range(2 * POINTS + 3))  # three in one, of the last two
    values: list[float | None] = [float(step % 3) for step in steps]
    values[:3], values[3:6] = [None, 1.0, 4.0], [None, None, None]
    found = thinned(Line("a", steps, values, "1"))
    assert points_in_one(len(steps)) == 3 and len(found.x) == 428
    assert (found.x[:3], found.x[-1]) == ([1, 4, 7], 1282)
    assert found.y[:3] == [2.5, None, 1.0] and found.y[-1] == 0.5
    assert found.band is not None
    assert found.band[:3] == [(1.0, 4.0), (None, None), (0.0, 2.0)] and found.band[-1] == (0.0, 1.0)
