"""The page of a run of ``zero-optim train``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..drawing.figures import NONE, count, duration, short, size
from ..train.run_dir import PAGE
from . import run_tables
from .charts import cards, data, missing
from .html import Html, join, tag
from .page import footer, page
from .run_charts import charts
from .run_data import Run, problems, ranks_of, read_run


def write_run_page(folder: Path, out: Path | None = None) -> Path:
    """Write ``report.html`` into a run's folder, or ``out``. Returns its path. Raises UsageError and OSError."""
    run = read_run(folder)
    path = out or folder / PAGE
    path.write_text(run_page(run), encoding="utf-8")
    return path


def run_page(run: Run) -> str:
    """Make the HTML. Its ``<script id="data">`` has the path, the figures on top, problems, and all charts' points."""
    drawn = list(charts(run)) if run.steps else []
    found = problems(run)
    body = [_header(run), _verdict(found), _tiles(run), *_what_ran(run)]
    if drawn:
        body += [tag("h2", "Along the steps"), missing() or cards(drawn)]
    body += [*_measured(run), *_tables(run), footer(_sources(run))]
    said = {"run": str(run.path), "summary": summary(run), "problems": found, "charts": data(drawn)}
    return page(f"{run.path.resolve().name}: zero-optim train", join(body), said)


def summary(run: Run) -> dict[str, Any]:
    """Collect the figures on top of the page."""
    measured = run.measured
    return {
        "steps": len(run.steps),
        "loss": run.steps[-1].loss if run.steps else None,
        "held_out_loss": run.validations[-1][1] if run.validations else None,
        "tokens_per_s": run.median_speed,
        "skipped_steps": len(run.skipped),
        "peak_bytes": max(rank.peak_bytes for rank in ranks_of(measured)) if measured else None,
        "seconds": run.seconds,
    }


def _header(run: Run) -> Html:
    session = run.last_session
    about = session.facts["model"] if session else "a run of zero-optim train"
    return tag("header", tag("h1", run.path.resolve().name), tag("p", about, class_="faint"))


def _verdict(found: list[str]) -> Html:
    if not found:
        well = "Nothing was off: all losses are finite, no step was skipped, memory is as planned."
        return tag("p", well, class_="verdict")
    listed = tag("ul", *(tag("li", problem) for problem in found))
    return tag("div", tag("strong", "Worth a look"), listed, class_="verdict off")


def _tiles(run: Run) -> Html:
    tiles = (
        tag("div", tag("dt", name), tag("dd", value, tag("small", note) if note else None))
        for name, value, note in _figures(run)
    )
    return tag("dl", *tiles, class_="tiles")


def _figures(run: Run) -> Iterator[tuple[str, str, str]]:
    top, session = summary(run), run.last_session
    planned = f"of {session.config['steps']:,}" if session else ""
    yield "steps", f"{top['steps']:,}", f"{planned}, {run_tables.outcome_name(session)}".lstrip(", ")
    yield "final loss", short(top["loss"], 5), "nats per byte, training"
    yield "held-out loss", short(top["held_out_loss"], 5), _against_entropy(run)
    yield "median speed", short(top["tokens_per_s"]), "tokens/s, all ranks"
    yield "skipped steps", f"{top['skipped_steps']:,}", ""
    peak, measured = top["peak_bytes"], run.measured
    yield "peak memory", NONE if peak is None else size(peak), f"{measured.peak_of}, largest rank" if measured else ""
    seconds = top["seconds"]
    starts = count(len(run.sessions), "start") if len(run.sessions) > 1 else ""
    yield "duration", NONE if seconds is None else duration(seconds), starts


def _against_entropy(run: Run) -> str:
    return f"byte entropy {short(run.validations[-1][2])}" if run.validations else "not measured"


def _what_ran(run: Run) -> Iterator[Html]:
    session = run.last_session
    if session is None:
        return
    pairs: list[tuple[str, str | Html]] = [*session.facts.items()]
    pairs.append(("stage, dtype", f"{session.config['stage']}, {session.config['dtype']}"))
    pairs.append(("started", session.started[:19].replace("T", " ")))
    if session.resumed_from:
        pairs.append(("resumed from", f"{session.resumed_from}, after step {session.after_step:,}"))
    yield tag("h2", "What was run")
    yield run_tables.facts([*pairs, ("command", tag("code", session.command))])


def _measured(run: Run) -> Iterator[Html]:
    session = run.measured
    if session is None:
        yield tag("h2", "Memory and traffic")
        yield tag("p", "Not on record: ranks report when a run finishes, or is interrupted.", class_="note")
        return
    yield tag("h2", "Memory by kind, against plan")
    yield run_tables.memory(session)
    yield tag("h2", "Traffic by collective")
    yield run_tables.traffic(session)
    yield tag("h2", "Time by rank")
    yield run_tables.time_of_ranks(session)


def _tables(run: Run) -> Iterator[Html]:
    if len(run.sessions) > 1:
        yield tag("h2", "Starts")
        yield run_tables.sessions(run)
    if run.steps:
        yield tag("h2", "Figures")
        yield run_tables.steps(run)


def _sources(run: Run) -> str:
    files = "log.jsonl and run.json" if run.sessions else "log.jsonl"
    return f"Made by zero-optim report from {files} in {run.path}. The page is one file, and fetches nothing."
