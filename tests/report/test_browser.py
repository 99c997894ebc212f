"""The pages as a browser shows them: from a file, without network, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, browser
from run_cases import make_run, session, step
from zero_optim.report.bench_page import write_bench_page
from zero_optim.report.run_page import write_run_page

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
WIDTHS = (380, 1400)

SIZES = """
return [...document.querySelectorAll(arguments[0])].map((one) => {
  const box = one.getBoundingClientRect();
  return [box.width, box.height, box.left, box.right];
});
"""
COLORS = """
const shown = (selector, property) => getComputedStyle(document.querySelector(selector))[property];
return [shown("body", "backgroundColor"), shown("body", "color"), shown(".plot .line", "stroke"),
        shown(".fill", "fill"), shown(".verdict", "backgroundColor")];
"""
CENTRE = """
const plot = document.querySelector(arguments[0] + " .plot");
plot.scrollIntoView({block: "center"});
const box = plot.getBoundingClientRect();
return [box.left, box.top, box.width, box.height];
"""
OUTPUTS = 'return [...document.querySelectorAll(arguments[0] + " output")].map((one) => one.textContent);'


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def run_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven steps, one of them skipped, of fp16: every chart is there."""
    odd = {6: {"grad_norm": None, "loss": None}}
    steps = [step(number, **{"loss_scale": 1024.0, **odd.get(number, {})}) for number in range(1, 12)]
    return write_run_page(make_run(tmp_path_factory.mktemp("browser") / "run", steps, [session()]))


@pytest.fixture(scope="module")
def bench_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bench_page(RESULTS, tmp_path_factory.mktemp("browser") / "bench.html")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["run_page", "bench_page"])
def test_it_opens_without_a_complaint_and_fits(
    chrome: Browser, name: str, width: int, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    chrome.requested()
    chrome.open(path, width=width)
    assert chrome.run("return document.readyState") == "complete"
    assert chrome.said() == []
    assert chrome.requested() == [path.as_uri()]
    assert chrome.run("return document.documentElement.scrollWidth") == width
    for what, least in ((".plot svg", 3), (".bars svg", 5)):
        sizes = chrome.run(SIZES, what)
        assert len(sizes) >= least
        assert all(wide > 40 and high > 10 for wide, high, _, _ in sizes), what
    # What may be wider than the window scrolls in a box of its own. All else ends within.
    assert all(
        left >= 0 and right <= width for _, _, left, right in chrome.run(SIZES, ".chart, .plot, .scroll, h1, dl")
    )


def test_a_page_that_fetches_is_found_out(chrome: Browser, tmp_path: Path) -> None:
    """The check can fail: of an image from elsewhere it sees the request, of a script's error the line."""
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>throw new Error("seen")</script>')
    chrome.requested()
    chrome.open(page, width=400)
    assert any("seen" in line for line in chrome.said())
    assert "http://127.0.0.1:9/x.png" in chrome.requested()


def test_the_policy_holds(chrome: Browser, run_page: Path, tmp_path: Path) -> None:
    """A script that a file's name might bring does not run, and nothing it asks for is fetched."""
    evil = '<script>document.title = "taken"</script><img src="http://127.0.0.1:9/x.png">'
    (tmp_path / "a.html").write_text(run_page.read_text().replace("<main>", f"<main>{evil}"))
    chrome.open(tmp_path / "a.html", width=1400)
    assert chrome.run("return document.title") == "run: zero-optim train"
    assert sum("Content Security Policy" in line for line in chrome.said()) == 2


def test_light_and_dark_follow_the_system_and_the_button(chrome: Browser, run_page: Path) -> None:
    chrome.open(run_page, width=1400, theme="light")
    light, name = chrome.run(COLORS), chrome.run('return document.getElementById("theme").textContent')
    chrome.run('document.getElementById("theme").click()')
    switched = chrome.run(COLORS)
    chrome.open(run_page, width=1400, theme="dark")
    dark = chrome.run(COLORS)
    assert name == "Dark" and switched == dark
    assert all(one != other for one, other in zip(light, dark, strict=True))
    chrome.run('document.getElementById("theme").click()')
    assert chrome.run(COLORS) == light
    assert chrome.run("try { return localStorage.length } catch { return 0 }") == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_and_lines_stand_out(chrome: Browser, run_page: Path, theme: str) -> None:
    """Contrast by WCAG 2: 4.5 for words, 3 for what is drawn."""
    chrome.open(run_page, width=1400, theme=theme)
    card = chrome.run("return getComputedStyle(document.querySelector('.chart')).backgroundColor")
    for selector, name, least in (
        (".chart h3", "color", 4.5),
        (".plot > .x", "color", 4.5),
        (".unit", "color", 4.5),
        *((f".plot .line.{color}", "stroke", 3.0) for color in ("one", "two", "three", "four")),
        *((f".plot .area.{color}", "fill", 3.0) for color in ("five", "four")),
        (".plot .mark", "stroke", 3.0),
    ):
        color = chrome.run(f"return getComputedStyle(document.querySelector('{selector}'))['{name}']")
        assert contrast(color, card) >= least, (selector, color, card)


def contrast(one: str, other: str) -> float:
    high, low = sorted(map(luminance, (one, other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    """Of ``rgb(1, 2, 3)``: relative, by WCAG 2."""
    parts = [int(part) / 255 for part in color[4:-1].split(", ")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_the_pointer_shows_step_and_values_on_all_charts(chrome: Browser, run_page: Path) -> None:
    chrome.open(run_page, width=1400)
    at_rest = chrome.run(OUTPUTS, "#speed")
    left, top, width, height = chrome.run(CENTRE, "#speed")
    chrome.point_at(left + 0.31 * width, top + height / 2)  # of steps 1 to 11, nearest to step 4
    assert chrome.run(OUTPUTS, "#speed") == ["1,004", "step 4"]
    assert chrome.run(OUTPUTS, "#loss") == ["1.25", "2.5 (10)", "3.25 (1)", "step 4"]
    assert chrome.run(OUTPUTS, "#timeline") == ["14", "20", "5", "5", "step 4"]
    places = chrome.run("return [...document.querySelectorAll('.cursor')].map((one) => one.style.left)")
    assert len(places) == 6 and set(places) == {"30%"}
    chrome.point_at(left + 0.5 * width, top + height / 2)
    assert chrome.run(OUTPUTS, "#norm")[0] == "not finite"
    chrome.point_at(1, 1)
    assert chrome.run(OUTPUTS, "#speed") == at_rest
    assert chrome.run("return document.querySelectorAll('.cursor, .at').length") == 0
    assert chrome.said() == []


def test_dots_are_where_lines_are(chrome: Browser, run_page: Path) -> None:
    """The script and the drawing place a value alike: the dot of the speed at step 4 is on the line."""
    chrome.open(run_page, width=1400)
    left, top, width, height = chrome.run(CENTRE, "#speed")
    chrome.point_at(left + 0.3 * width, top + height / 2)
    dot = chrome.run("const at = document.querySelector('#speed .at'); return [at.style.left, at.style.top];")
    drawn = chrome.run("return document.querySelector('#speed .line').getAttribute('d')").split("L")[3].split()
    assert float(dot[0][:-1]) == pytest.approx(float(drawn[0]) / 10, abs=0.1)
    assert float(dot[1][:-1]) == pytest.approx(float(drawn[1]) / 4, abs=0.1)


def test_the_keyboard_moves_along_and_is_heard(chrome: Browser, run_page: Path) -> None:
    chrome.open(run_page, width=1400)
    chrome.run("document.querySelector('#speed .plot').focus()")
    chrome.press("Home")
    chrome.press("ArrowRight", times=2)
    assert chrome.run(OUTPUTS, "#speed") == ["1,003", "step 3"]
    assert chrome.run("return document.querySelector('[aria-live=polite]').textContent") == "step 3: tokens/s 1,003"
    label = chrome.run("return document.querySelector('#speed .plot').getAttribute('aria-label')")
    assert label.startswith("Speed, tokens/s, of all ranks. tokens/s, last 1,011")


def test_without_a_script_the_page_is_whole(chrome: Browser, run_page: Path) -> None:
    chrome.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        chrome.open(run_page, width=1400)
        sizes = chrome.run(SIZES, ".plot svg")
        hidden = chrome.run("return getComputedStyle(document.getElementById('theme')).display")
        values = chrome.run(OUTPUTS, "#speed")
    finally:
        chrome.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert len(sizes) == 6 and all(wide > 100 and high > 100 for wide, high, _, _ in sizes)
    assert hidden == "none" and values == ["1,011", ""]
