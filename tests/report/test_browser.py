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
return [shown("body", "backgroundColor"), shown("figure", "backgroundColor"), shown("body", "color"),
        shown("figure img", "filter"), shown(".verdict", "backgroundColor")];
"""
PIXELS = """
const image = document.querySelector(arguments[0] + " img");
const canvas = document.createElement("canvas");
[canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
const context = canvas.getContext("2d");
context.drawImage(image, 0, 0);
const seen = new Set();
const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
for (let at = 0; at < data.length; at += 4) if (data[at + 3] === 255) seen.add(data.slice(at, at + 3).join(","));
return [...seen];
"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    pytest.importorskip("matplotlib")
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
    return write_bench_page(RESULTS / "amd-epyc-2-threads", tmp_path_factory.mktemp("browser") / "bench.html")


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
    sizes = chrome.run(SIZES, "figure img")
    assert len(sizes) >= 5 and all(wide > 440 and high > 100 for wide, high, _, _ in sizes), "words can be read"
    # What may be wider than the window scrolls in a box of its own. All else ends within.
    assert all(left >= 0 and right <= width for _, _, left, right in chrome.run(SIZES, "figure, .scroll, h1, dl"))


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


def test_images_are_shown_under_the_policy(chrome: Browser, run_page: Path) -> None:
    """They are drawn, in the colours of lines and marks: blue, red, and the red of skipped steps."""
    chrome.open(run_page, width=1400)
    assert {"0,114,178", "213,94,0"} <= set(chrome.run(PIXELS, "#loss"))
    assert {"0,158,115"} <= set(chrome.run(PIXELS, "#rate"))
    assert chrome.said() == []


def test_light_and_dark_follow_the_system(chrome: Browser, run_page: Path) -> None:
    chrome.open(run_page, width=1400, theme="light")
    light = chrome.run(COLORS)
    chrome.open(run_page, width=1400, theme="dark")
    dark = chrome.run(COLORS)
    assert all(one != other for one, other in zip(light, dark, strict=True))
    assert (light[3], dark[3]) == ("none", "invert(1) hue-rotate(180deg)")
