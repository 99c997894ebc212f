"""The page of a run: charts and tables in one HTML file, made from ``log.jsonl`` and ``run.json``.

The tables are also printed at the end of a run. Charts need matplotlib, which brings NumPy. The page has no script and
fetches nothing; everything that comes from files is escaped.
"""

from __future__ import annotations

import base64
import io
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from ..figures import NONE, count, megabytes, row, short, size

LOG, RUN, PAGE, PICTURE = "log.jsonl", "run.json", "report.html", "loss.png"
WHOLE, EXPOSED = "whole", "exposed communication"
NOT_OF_STEPS = "construction"  # collectives made once, before the first step
TOLERANCE = 0.01
"""Fraction of the plan by which model state may exceed it before the page reports a problem."""
_MOST_COLUMNS = 4
_POINTS = 640  # of a line, at most twice as many: about as many as a chart is pixels wide
_APART = 100.0  # largest value over the least, above which an axis is logarithmic
_COLORS, _RED = ("#0072B2", "#009E73", "#E69F00", "#777777"), "#D55E00"  # blue, green, orange, grey of Okabe and Ito

Session = Mapping[str, Any]
"""``run.json``: the last start of ``zero-optim train`` in this folder. See ``loop._describe``."""


@dataclass(frozen=True)
class Run:
    """A run's folder as read: the lines of its log (see ``Trainer.step``), and its last start."""

    steps: Sequence[Mapping[str, Any]]
    session: Session

    @property
    def ending(self) -> Mapping[str, Any]:
        return self.session["ending"] or {}

    def column(self, name: str) -> list[float | None]:
        """Take a value out of every step."""
        return [step[name] for step in self.steps]

    def without(self, name: str) -> list[int]:
        """List the steps at which a value was not finite."""
        return [step["step"] for step in self.steps if step[name] is None]


def read_run(folder: Path) -> Run:
    """Read a run's folder. Raises OSError, and ValueError where a file is damaged."""
    lines = (folder / LOG).read_text().splitlines(keepends=True)
    steps = [json.loads(line) for line in lines if line.endswith("\n")]  # the last line may be cut off
    return Run(steps, json.loads((folder / RUN).read_text()))


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Rows of text; the first cell names the row."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def as_text(self) -> str:
        lines = [self.title, row("", self.headings), *(row(name, cells) for name, *cells in self.rows)]
        return "\n".join([*lines, *([f"  {self.note}"] if self.note else [])])

    def as_html(self) -> str:
        head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in ["", *self.headings])
        body = "".join(
            f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
            for name, *cells in self.rows
        )
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        table = f"<table><caption>{escape(self.title)}</caption><tr>{head}</tr>{body}</table>"
        return f'<div class="wide" tabindex="0">{table}</div>{note}'


def tables(session: Session) -> list[Table]:
    """Memory by kind beside the plan, traffic by collective, the time of a step. Empty until ranks have reported."""
    if not session["ending"] or not session["ending"]["ranks"]:
        return []
    return [_memory(session), _traffic(session), _time(session)]


def state_bytes(session: Session, held: Mapping[str, float]) -> float:
    """Sum the model state: parameters, gradients, and the optimizer's state."""
    return sum(held.get(kind, 0.0) for kind in session["plan"]["state_kinds"])


def _memory(session: Session) -> Table:
    names, columns = _columns([rank["memory"] for rank in session["ending"]["ranks"]])
    rows, held = [], [*columns, session["plan"]["memory"]]
    sums = [{**column, "model state": state_bytes(session, column)} for column in held]
    for kind in dict.fromkeys([*session["plan"]["state_kinds"], "model state", *columns[0]]):
        *measured, plan = (column.get(kind, 0.0) for column in sums)
        name = "unsharded, at most" if kind == "unsharded" else kind
        rows.append([name, *map(megabytes, measured), megabytes(plan), f"{plan / session['parameters']:.4g}"])
    ranks = count(len(session["ending"]["ranks"]), "rank")
    title = f"model state, MB (stage {session['config']['stage']}, {ranks}, {session['parameters']:,} parameters)"
    return Table(title, [*names, "planned", "bytes/param"], rows)


def _columns(figures: Sequence[Mapping[str, float]]) -> tuple[list[str], list[Mapping[str, float]]]:
    """Make a column for each rank; of more than ``_MOST_COLUMNS``, one of the least and one of the most by kind."""
    if len(figures) <= _MOST_COLUMNS:
        return [f"rank {rank}" for rank in range(len(figures))], list(figures)
    return ["least", "most"], [{kind: pick(of[kind] for of in figures) for kind in figures[0]} for pick in (min, max)]


def _traffic(session: Session) -> Table:
    """Tabulate what rank 0 has communicated. Bytes are of whole tensors."""
    report, planned = session["ending"]["ranks"][0], session["plan"]["traffic"]
    if not report["collectives"]:
        return Table("communication, rank 0", [], [], "none: one rank")
    rows = []
    for kind, traffic in sorted(report["collectives"].items()):
        a_step = "once" if kind == NOT_OF_STEPS else megabytes(traffic["bytes"] / report["steps"])
        plan = megabytes(planned[kind]) if kind in planned else NONE
        blocked = f"{traffic['wait_seconds']:.2f}"
        rows.append([kind, f"{traffic['calls']:,.0f}", megabytes(traffic["bytes"]), a_step, plan, blocked])
    note = "bytes of whole tensors: a rank puts (N-1)/N of them on the wire, of an all-reduce twice that"
    return Table("communication, rank 0", ["calls", "MB", "MB/step", "planned", "blocked, s"], rows, note)


def _time(session: Session) -> Table:
    on_gpu, times = session["config"]["device"] == "cuda", []
    for rank in session["ending"]["ranks"]:
        seconds = dict(rank["seconds"])
        if not on_gpu:
            kinds = rank["collectives"].items()
            seconds[EXPOSED] = sum(traffic["wait_seconds"] for kind, traffic in kinds if kind != NOT_OF_STEPS)
        times.append({phase: 1000 * of_phase / max(1, rank["steps"]) for phase, of_phase in seconds.items()})
    names, columns = _columns(times)
    rows = [[phase, *(f"{column[phase]:.1f}" for column in columns)] for phase in columns[0]]
    where = "forward, backward and step" if session["config"]["stage"] >= 3 else "backward and step"
    note = f"{EXPOSED}: host time blocked on collectives, inside {where}"
    if on_gpu:
        note = f"between events of the compute stream; waits for communication are inside {where}"
    return Table("time a step, ms", names, rows, note)


# -- charts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chart:
    """Lines over the steps of a run."""

    title: str
    unit: str
    lines: Mapping[str, Sequence[float | None]]  # by name; None is a gap
    levels: Mapping[str, float]  # constant values by name, drawn as dashed lines
    end: tuple[str, float] | None = None  # a name and a value, drawn as a dot at the last step
    marked: Sequence[int] = ()  # steps that get an upright line
    stacked: bool = False  # lines are parts of a whole, drawn as areas on top of each other

    @property
    def legend(self) -> dict[str, str]:
        """By name, the name with the last value."""
        last = {name: next((y for y in reversed(of) if y is not None), None) for name, of in self.lines.items()}
        values = {**last, **self.levels, **dict([self.end] if self.end else [])}
        return {name: f"{name}: {short(value, 5)}" for name, value in values.items()}


def charts(run: Run) -> Iterator[Chart]:
    """Make all charts of a run, which has at least one step."""
    yield loss_chart(run)
    yield Chart("Speed", "tokens/s, all ranks", {"tokens/s": run.column("tokens_per_s")}, {})
    norms, clip = {"before clipping": run.column("grad_norm")}, {"clipped to": run.session["config"]["clip"]}
    yield Chart("Gradient norm", "of the averaged gradient", norms, clip, marked=run.without("grad_norm"))
    if any(scale != 1 for scale in run.column("loss_scale")):
        scales = {"loss scale": run.column("loss_scale")}
        yield Chart("Loss scale", "of fp16", scales, {}, marked=run.without("grad_norm"))
    yield Chart("Learning rate", "of the schedule", {"learning rate": run.column("lr")}, {})
    phases = [name for name in run.steps[0]["ms"] if name != WHOLE]
    lines = {name: [step["ms"][name] for step in run.steps] for name in phases}
    # Zeroing, the schedule, the exchange of the loss. On a GPU the whole is of the host's clock, and phases are of the
    # device's: their difference may be below 0.
    lines["the rest"] = [max(0.0, s["ms"][WHOLE] - sum(s["ms"][name] for name in phases)) for s in run.steps]
    yield Chart("Timeline of a step", "ms, rank 0", lines, {}, stacked=True)


def loss_chart(run: Run) -> Chart:
    held_out, entropy = run.ending.get("validation_loss"), run.ending.get("entropy")
    levels = {"unigram entropy": entropy} if entropy is not None else {}
    end = ("held out", held_out) if held_out is not None else None
    return Chart("Loss", "nats per byte", {"training": run.column("loss")}, levels, end, run.without("loss"))


def draw(chart: Chart, steps: Sequence[int], file: Any, **more: Any) -> None:
    """Draw a chart into a file as matplotlib's ``savefig`` does. Raises ImportError where matplotlib is missing."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure((6.3, 3.0), layout="constrained")
    axes = figure.subplots()
    legend, lines = chart.legend, {name: _thinned(steps, values) for name, values in chart.lines.items()}
    if chart.stacked:
        (x, _, _, _), *_ = lines.values()
        labels = [legend[name] for name in lines]
        axes.stackplot(x, [mean for _, _, mean, _ in lines.values()], colors=_COLORS, alpha=0.85, lw=0, labels=labels)
    else:
        for color, (name, (x, low, mean, high)) in zip(_COLORS, lines.items(), strict=False):
            if len(x) < len(steps):
                axes.fill_between(x, low, high, color=color, alpha=0.2, lw=0.6)
            axes.plot(x, mean, color=color, lw=1.2, marker="o" if len(x) == 1 else "", label=legend[name])
    for name, level in chart.levels.items():
        axes.axhline(level, color=_RED, lw=1, ls=(0, (5, 2)), label=legend[name])
    if chart.end:
        axes.plot(steps[-1:], [chart.end[1]], "o", color=_RED, label=legend[chart.end[0]])
    for step in chart.marked[:: 1 + len(chart.marked) // _POINTS]:
        axes.axvline(step, color="#C4003F", lw=0.9, alpha=0.6)
    there = [y for line in chart.lines.values() for y in line if y is not None]
    if not chart.stacked and there and min(there) > 0 and max(there) > _APART * min(there):
        axes.set_yscale("log")
    axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
    axes.set(xlabel="step", ylabel=chart.unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E3E3", lw=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, reverse=chart.stacked)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "zero-optim"}):  # text as text; the same bytes every time
        figure.savefig(file, **more)


def _thinned(steps: Sequence[int], values: Sequence[float | None]) -> tuple[Any, Any, Any, Any]:
    """Average neighbours of a long line. Returns its steps, and the least, mean and most at each; a gap is NaN."""
    import numpy as np

    width = 1 if len(steps) <= 2 * _POINTS else -(-len(steps) // _POINTS)
    pad = [np.nan] * (-len(steps) % width)
    parts = np.ma.masked_invalid(np.array([*values, *pad], dtype=float).reshape(-1, width))
    low, mean, high = (getattr(parts, name)(axis=1).filled(np.nan) for name in ("min", "mean", "max"))
    return np.array(steps)[::width], low, mean, high


# -- the page ----------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; --edge: light-dark(#dde1e7, #2e343d); }
body { max-width: 80rem; margin: 0 auto; padding: 1.5rem 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.verdict { padding: 0.6rem 1rem; border-radius: 0.5rem; background: light-dark(#e3f4ec, #143026); }
.verdict.off { background: light-dark(#fdeed8, #3a2a10); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 0.75rem; }
.tiles div, figure, .wide { border: 1px solid var(--edge); border-radius: 0.5rem; padding: 0.5rem 0.8rem; }
.tiles b { display: block; font-size: 1.25rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 0.75rem; }
figure, .wide { margin: 0.6rem 0; min-width: 0; overflow-x: auto; } figure img { width: 100%; min-width: 28rem; }
@media (prefers-color-scheme: dark) { figure img { filter: invert(1) hue-rotate(180deg); } }
dl { display: grid; grid-template-columns: fit-content(10rem) minmax(0, 1fr); gap: 0 1rem; } dd { margin: 0; }
table { width: 100%; border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; }
th, td { text-align: right; white-space: nowrap; padding: 0.2rem 0.6rem; font-weight: 400; }
th[scope="row"] { text-align: left; }
"""
_TEMPLATE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$name: zero-optim train</title><style>$style</style></head>
<body><h1>$name</h1>
$verdict
<div class="tiles">$tiles</div>
<h2>What was run</h2><dl>$facts</dl>
<h2>Over the steps</h2><div class="charts">$charts</div>
<h2>Memory, communication, time</h2>$tables
</body></html>
""")


def write_page(folder: Path) -> Path:
    """Write ``report.html`` into a run's folder. Returns its path. Raises OSError, and ValueError of a damaged file."""
    run = read_run(folder)
    session, found, ending = run.session, problems(run), run.ending
    speeds = [step["tokens_per_s"] for step in run.steps]
    peaks = [rank["peak_bytes"] for rank in ending.get("ranks", ())]
    tiles = {
        "steps": f"{len(run.steps):,} of {session['config']['steps']:,}",
        "final loss": short(run.steps[-1]["loss"] if run.steps else None, 5),
        "held-out loss": short(ending.get("validation_loss"), 5),
        "unigram entropy": short(ending.get("entropy"), 5),
        "median tokens/s": short(statistics.median(speeds) if speeds else None),
        "skipped steps": f"{len(run.without('grad_norm')):,}",
        f"peak, {session['peak_of']}": size(max(peaks)) if peaks else NONE,
        "duration": str(timedelta(seconds=round(ending["seconds"]))) if ending else NONE,
    }
    listed = "".join(f"<li>{escape(problem)}</li>" for problem in found)
    good = "All losses are finite, no step was skipped, memory is as planned."
    facts = {**session["facts"], "started": session["started"][:19].replace("T", " ")}
    if session["resumed_from"]:
        facts["resumed from"] = f"{session['resumed_from']}, after step {session['after_step']:,}"
    facts |= {"command": session["command"], "folder": str(folder)}
    whole = _TEMPLATE.substitute(
        name=escape(folder.resolve().name),
        style=_STYLE,
        verdict=f'<ul class="verdict off">{listed}</ul>' if found else f'<p class="verdict">{good}</p>',
        tiles="".join(f"<div>{escape(name)}<b>{escape(value)}</b></div>" for name, value in tiles.items()),
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items()),
        charts=_drawn(run),
        tables="".join(table.as_html() for table in tables(session)) or "<p>No rank has reported.</p>",
    )
    path = folder / PAGE
    path.write_text(whole, encoding="utf-8")
    return path


def draw_loss(folder: Path) -> Path:
    """Write ``loss.png``. Returns its path. Raises as ``write_page``, and ImportError where matplotlib is missing."""
    run = read_run(folder)
    draw(loss_chart(run), [step["step"] for step in run.steps], folder / PICTURE, dpi=140)
    return folder / PICTURE


def problems(run: Run) -> list[str]:
    """Describe each problem of the run in a sentence; empty where all was well."""
    found, skipped, lost = [], run.without("grad_norm"), run.without("loss")
    if lost:
        found.append(f"The loss of {count(len(lost), 'step')} was not finite, first at step {lost[0]:,}.")
    if skipped:
        where = f"first step {skipped[0]:,}, last step {skipped[-1]:,}"
        found.append(f"{count(len(skipped), 'step')} skipped, as gradients were not finite: {where}.")
    if run.ending.get("outcome") != "finished":
        found.append(f"The run is not finished: {run.ending.get('outcome', 'running or killed')}.")
    planned = state_bytes(run.session, run.session["plan"]["memory"])
    for rank, report in enumerate(run.ending.get("ranks", ())):
        held = state_bytes(run.session, report["memory"])
        if held > (1 + TOLERANCE) * planned:
            above = f"{100 * (held / planned - 1):+.2f}\N{NO-BREAK SPACE}% above the plan"
            found.append(f"Model state of rank {rank} is {megabytes(held)} MB, {above} of {megabytes(planned)} MB.")
    return found


def _drawn(run: Run) -> str:
    """Draw all charts as images that are SVG, so that ids and styles of charts cannot clash."""
    steps, drawn = [step["step"] for step in run.steps], []
    for chart in charts(run) if steps else ():
        file = io.BytesIO()
        try:
            draw(chart, steps, file, format="svg", transparent=True, metadata={"Date": None})
        except ImportError:
            return "<p>No charts: matplotlib is not installed. pip install zero-kernels[train]</p>"
        source = "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
        values = "; ".join(chart.legend.values())
        drawn.append(f'<figure><img src="{source}" alt="{escape(f"{chart.title}, {chart.unit}. {values}.")}"></figure>')
    return "".join(drawn)
