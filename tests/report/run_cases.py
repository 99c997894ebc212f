"""Run folders made by hand, and what a page says, taken out of its HTML."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from zero_optim.train.config import TrainConfig
from zero_optim.train.run_dir import LOG, RunDir, StepRecord
from zero_optim.train.session import Ending, Forecast, Outcome, RankReport, Session

KINDS = ("parameters", "gradients", "master", "exp_avg", "exp_avg_sq")
PLANNED = dict.fromkeys(KINDS, 1_000_000.0)


def step(number: int, **more: Any) -> StepRecord:
    values = {"loss": 5.0 / number, "lr": 1e-3 * number, "grad_norm": 2.0 / number, "tokens_per_s": 1000.0 + number}
    ms = {"data and forward": 10.0 + number, "backward": 20.0, "step": 5.0, "whole": 40.0 + number}
    ms["exposed communication"] = 3.0
    return StepRecord(**{"step": number, "loss_scale": 1.0, "ms": ms, **values, **more})


def rank_report(**memory: float) -> RankReport:
    return RankReport(
        memory={**PLANNED, "communication": 250_000, "padding": 1_000, **memory},
        collectives={
            "all_gather": {"calls": 30, "bytes": 10_010_000, "wait_seconds": 0.5},
            "construction": {"calls": 4, "bytes": 2_000_000, "wait_seconds": 0.25},
        },
        seconds={"data and forward": 0.2, "backward": 0.4, "step": 0.1},
        steps=10,
        peak_bytes=123_000_000,
        skipped_steps=0,
    )


def ending(**more: Any) -> Ending:
    values = {"step": 10, "seconds": 90.0, "ranks": (rank_report(), rank_report(master=1_004_000.0))}
    return Ending(**{"outcome": Outcome.FINISHED, "validation_loss": 2.5, "entropy": 3.25, **values, **more})


def session(**more: Any) -> Session:
    values = {
        "started": "2026-01-02T03:04:05.000006+00:00",
        "after_step": 0,
        "resumed_from": None,
        "command": "zero-optim train --ranks 2",
        "facts": {"model": "12 parameters in bf16", "torch": "2.13.0"},
        "config": TrainConfig(steps=10).to_dict(),
        "peak_of": "resident memory of the process",
        "forecast": Forecast(PLANNED, {"all_gather": 1_000_000.0}),
        "ending": ending(),
    }
    return Session(**{**values, **more})


def make_run(folder: Path, steps: list[StepRecord], sessions: list[Session]) -> Path:
    folder.mkdir()
    (folder / LOG).write_text("")
    for record in steps:
        RunDir(folder).write_step(record)
    for number, one in enumerate(sessions):
        RunDir(folder).write_session(replace(one, started=one.started.replace("03:04", f"03:{number:02}")))
    return folder


class _Tables(HTMLParser):
    """Rows of cells, of every table; and the text outside of style and script."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.text: list[str] = []
        self._inside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "img"):
            self._inside.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._inside and self._inside.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._inside):
            self.text.append(data)
        if {"td", "th"} & set(self._inside):
            self.rows[-1][-1] += data


def _words(svg: bytes) -> list[str]:
    """Every text of a drawing, in its order."""
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


class Page:
    """What is on a page: its ``data``, the words of each of its ``drawings``, rows of all ``tables``, its ``text``."""

    def __init__(self, html: str) -> None:
        block = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
        self.html, self.data = html, json.loads(block[1])
        parser = _Tables()
        parser.feed(html)
        assert parser._inside == [], "every tag is closed"
        self.tables = parser.rows
        images = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]+)"', html)
        self.drawings = [_words(base64.b64decode(image)) for image in images]
        self.text = "".join(parser.text)

    def row(self, name: str) -> list[str]:
        """The first row that begins with ``name``, without that."""
        return next(cells[1:] for cells in self.tables if cells[0] == name)

    def line(self, chart: str, name: str) -> list[tuple[float, float | None]]:
        line = self._line(chart, name)
        return list(zip(line["x"], line["y"], strict=True))

    def band(self, chart: str, name: str) -> list[list[float | None]]:
        return self._line(chart, name)["band"]

    def _line(self, chart: str, name: str) -> dict[str, Any]:
        (found,) = (one for one in self.data["charts"] if one["key"] == chart)
        (line,) = (one for one in found["lines"] if one["name"] == name)
        return line
