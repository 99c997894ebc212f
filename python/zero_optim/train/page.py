"""The page of a run: charts and tables in one HTML file, made from ``log.jsonl`` and ``run.json``.

The tables are also printed at the end of a run. Charts need matplotlib. The page has no script and fetches nothing;
everything that comes from files is escaped.
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
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..figures import NONE, count, megabytes, row, short, size

LOG, RUN, PAGE, PICTURE = "log.jsonl", "run.json", "report.html", "loss.png"
WHOLE, EXPOSED = "whole", "exposed communication"
NOT_OF_STEPS = "construction"  # collectives made once, before the first step
TOLERANCE = 0.01
"""Fraction of the plan by which model state may exceed it before the page reports a problem."""
_MOST_COLUMNS = 4
_APART = 100.0  # largest value over the least, above which an axis is logarithmic
_COLORS = "#0072B2", "#009E73", "#E69F00", "#777777"  # blue, green, orange, grey of Okabe and Ito

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def charts(run: Run) -> Iterator[Figure]:
    """Draw each chart of a run, the loss first. Raises ImportError where matplotlib is missing."""
    levels = {"held out": run.ending.get("validation_loss"), "unigram entropy": run.ending.get("entropy")}
    yield _chart(run, "Loss", "nats per byte", {"training": run.column("loss")}, levels, run.without("loss"))
    yield _chart(run, "Speed", "tokens/s, all ranks", {"tokens/s": run.column("tokens_per_s")})
    norms, skipped = {"before clipping": run.column("grad_norm")}, run.without("grad_norm")
    clip = {"clipped to": run.session["config"]["clip"]}
    yield _chart(run, "Gradient norm", "of the averaged gradient", norms, clip, skipped)
    if any(scale != 1 for scale in run.column("loss_scale")):
        yield _chart(run, "Loss scale", "of fp16", {"loss scale": run.column("loss_scale")}, marked=skipped)
    yield _chart(run, "Learning rate", "of the schedule", {"learning rate": run.column("lr")})
    phases = [name for name in run.steps[0]["ms"] if name != WHOLE] if run.steps else []
    parts = {name: [step["ms"][name] for step in run.steps] for name in phases}
    # Zeroing, the schedule, the exchange of the loss. On a GPU the whole is of the host's clock, and phases are of the
    # device's: their difference may be below 0.
    parts["the rest"] = [max(0.0, s["ms"][WHOLE] - sum(s["ms"][name] for name in phases)) for s in run.steps]
    yield _chart(run, "Timeline of a step", "ms, rank 0", parts, stacked=True)


def _chart(
    run: Run,
    title: str,
    unit: str,
    lines: Mapping[str, Sequence[float | None]],
    levels: Mapping[str, float | None] = MappingProxyType({}),
    marked: Sequence[int] = (),
    *,
    stacked: bool = False,
) -> Figure:
    """Draw lines over the steps of a run. The legend has their last values.

    Args:
        lines: by name; None is a gap.
        levels: constant values by name, drawn as dashed lines, but for None.
        marked: steps that get an upright line.
        stacked: lines are parts of a whole, drawn as areas on top of each other.
    """
    from matplotlib.figure import Figure

    figure = Figure((6.3, 3.0), layout="constrained")
    axes: Any = figure.subplots()
    steps = [step["step"] for step in run.steps]
    there = {name: [y for y in of if y is not None] for name, of in lines.items()}
    labels = [f"{name}: {short(of[-1] if of else None, 5)}" for name, of in there.items()]
    if stacked:
        axes.stackplot(steps, [*lines.values()], colors=_COLORS, alpha=0.85, lw=0, labels=labels)
    else:
        for values, label in zip(lines.values(), labels, strict=True):
            axes.plot(steps, values, color=_COLORS[0], lw=1, marker="o" if len(steps) == 1 else "", label=label)
    for color, (name, level) in zip(_COLORS[1:], levels.items(), strict=False):
        if level is not None:
            axes.axhline(level, color=color, lw=1, ls=(0, (5, 2)), label=f"{name}: {short(level, 5)}")
    axes.vlines(marked, 0, 1, transform=axes.get_xaxis_transform(), color="#C4003F", lw=0.9, alpha=0.6)
    every = [y for of in there.values() for y in of]
    if not stacked and every and min(every) > 0 and max(every) > _APART * min(every):
        axes.set_yscale("log")
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set(xlabel="step", ylabel=unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E3E3E3", lw=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8, reverse=stacked)
    return figure


# -- the page ----------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; --edge: light-dark(#dde1e7, #2e343d); }
body { max-width: 80rem; margin: 0 auto; padding: 1.5rem 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.verdict { padding: 0.6rem 1rem; border-radius: 0.5rem; background: light-dark(#e3f4ec, #143026); }
.verdict.off { background: light-dark(#fdeed8, #3a2a10); }
figure, .wide { border: 1px solid var(--edge); border-radius: 0.5rem; padding: 0.5rem 0.8rem; }
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
<h2>What was run</h2><dl>$facts</dl>
<h2>Over the steps</h2><div class="charts">$charts</div>
<h2>Memory, communication, time</h2>$tables
</body></html>
""")


def write_page(folder: Path) -> Path:
    """Write ``report.html`` into a run's folder, and ``loss.png`` where matplotlib is installed.

    Returns the page's path. Raises OSError, and ValueError of a damaged file.
    """
    run = read_run(folder)
    session, found, ending = run.session, problems(run), run.ending
    speeds = [step["tokens_per_s"] for step in run.steps]
    peaks = [rank["peak_bytes"] for rank in ending.get("ranks", ())]
    facts = {**session["facts"], "started": session["started"][:19].replace("T", " ")}
    if session["resumed_from"]:
        facts["resumed from"] = f"{session['resumed_from']}, after step {session['after_step']:,}"
    facts |= {
        "command": session["command"],
        "folder": str(folder),
        "steps": f"{len(run.steps):,} of {session['config']['steps']:,}, {len(run.without('grad_norm')):,} skipped",
        "held-out loss": short(ending.get("validation_loss"), 5),
        "median tokens/s": short(statistics.median(speeds) if speeds else None),
        f"peak, {session['peak_of']}": size(max(peaks)) if peaks else NONE,
        "duration": str(timedelta(seconds=round(ending["seconds"]))) if ending else NONE,
    }
    listed = "".join(f"<li>{escape(problem)}</li>" for problem in found)
    good = "All losses are finite, no step was skipped, memory is as planned."
    whole = _TEMPLATE.substitute(
        name=escape(folder.resolve().name),
        style=_STYLE,
        verdict=f'<ul class="verdict off">{listed}</ul>' if found else f'<p class="verdict">{good}</p>',
        facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items()),
        charts=_drawn(run, folder / PICTURE),
        tables="".join(table.as_html() for table in tables(session)) or "<p>No rank has reported.</p>",
    )
    path = folder / PAGE
    path.write_text(whole, encoding="utf-8")
    return path


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


def _drawn(run: Run, first: Path) -> str:
    """Draw all charts as images of the page, and the first also into a file."""
    first.unlink(missing_ok=True)
    drawn: list[str] = []
    try:
        for chart in charts(run):
            file = io.BytesIO()
            chart.savefig(file, dpi=140)
            if not drawn:
                first.write_bytes(file.getvalue())
            axes: Any = chart.axes[0]
            words = [axes.get_title("left"), axes.get_ylabel(), *(text.get_text() for text in axes.get_legend().texts)]
            source = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
            drawn.append(f'<figure><img src="{source}" alt="{escape("; ".join(words))}"></figure>')
    except ImportError:
        return "<p>No charts: matplotlib is not installed. pip install zero-kernels[train]</p>"
    return "".join(drawn)
