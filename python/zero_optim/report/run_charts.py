"""The charts of a run, all over its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..train.report import EXPOSED
from ..train.run_dir import StepRecord
from . import axis
from .axis import Axis
from .line_chart import Line, LineChart
from .run_data import Run
from .thinning import Point

WHOLE = "whole"
REST = "the rest"
_COLORS = ("one", "three", "five", "four", "six")
_SPREAD = 100.0  # between the least and the largest norm: more calls for a logarithmic axis


def charts(run: Run) -> Iterator[LineChart]:
    x = axis.of_steps(run.steps[0].step, run.steps[-1].step)
    yield _losses(run, x)
    yield _speed(run, x)
    yield _norms(run, x)
    if any(step.loss_scale != 1 for step in run.steps):
        yield _scales(run, x)
    yield _rates(run, x)
    if any(step.ms for step in run.steps):
        yield timeline(run, x)


def _points(run: Run, value: Callable[[StepRecord], float | None]) -> list[Point]:
    return [(step.step, value(step)) for step in run.steps]


def _losses(run: Run, x: Axis) -> LineChart:
    lines = [Line("training", _points(run, lambda step: step.loss), "one")]
    if run.validations:
        entropy = run.validations[-1][2]
        lines.append(Line("held out", [(step, loss) for step, loss, _ in run.validations], "two", dots=True))
        lines.append(Line("unigram entropy", [(step, entropy) for step in (x.low, x.high)], "six", dashed=True))
    return LineChart("loss", "Loss", "nats per byte", lines, x, marks=(run.lost, "not finite"), wide=True)


def _speed(run: Run, x: Axis) -> LineChart:
    points = _points(run, lambda step: step.tokens_per_s)
    y = axis.linear([value for _, value in points if value is not None], from_zero=True)
    return LineChart("speed", "Speed", "tokens/s, of all ranks", [Line("tokens/s", points, "one")], x, y)


def _norms(run: Run, x: Axis) -> LineChart:
    points = _points(run, lambda step: step.grad_norm)
    lines = [Line("before clipping", points, "one")]
    there = [norm for _, norm in points if norm is not None]
    clip = run.sessions[-1].config["clip"] if run.sessions else None
    note = ""
    if clip is not None:
        lines.append(Line("clipped to", [(step, clip) for step in (x.low, x.high)], "two", dashed=True))
        clipped = sum(norm > clip for norm in there)
        note = f"{clipped:,} of {len(run.steps):,} steps were clipped."
    values = [norm for norm in (*there, clip) if norm is not None]
    wide = bool(values) and min(values) > 0 and max(values) > _SPREAD * min(values)
    y = axis.logarithmic(values) if wide else axis.linear(values, from_zero=True)
    return LineChart(
        "norm", "Gradient norm", "of the averaged gradient", lines, x, y, marks=(run.skipped, "skipped step"), note=note
    )


def _scales(run: Run, x: Axis) -> LineChart:
    points = _points(run, lambda step: step.loss_scale)
    y = axis.logarithmic([value for _, value in points if value], base=2)
    lines = [Line("loss scale", points, "four")]
    return LineChart("scale", "Loss scale", "of fp16", lines, x, y, marks=(run.skipped, "skipped step"))


def _rates(run: Run, x: Axis) -> LineChart:
    points = _points(run, lambda step: step.lr)
    y = axis.linear([value for _, value in points if value is not None], from_zero=True)
    return LineChart("rate", "Learning rate", "of the schedule", [Line("learning rate", points, "three")], x, y)


def phases(run: Run) -> list[str]:
    """Those of a step, in their order, and what is left of it."""
    found = dict.fromkeys(phase for step in run.steps for phase in step.ms or ())
    return [*(phase for phase in found if phase not in (WHOLE, EXPOSED)), REST]


def phase_ms(step: StepRecord, phase: str) -> float | None:
    """``REST``: of the whole step what no phase has. The whole is the host's time, and phases can be a GPU's."""
    if step.ms is None:
        return None
    if phase == REST:
        return max(0.0, step.ms[WHOLE] - sum(ms for name, ms in step.ms.items() if name not in (WHOLE, EXPOSED)))
    return step.ms.get(phase)


def timeline(run: Run, x: Axis) -> LineChart:
    """Where each step's time went, one phase on the other."""
    colors = dict(zip(phases(run), _COLORS, strict=False))
    lines = [
        Line(phase, _points(run, lambda step, phase=phase: phase_ms(step, phase)), colors.get(phase, "six"))  # type: ignore[misc]
        for phase in phases(run)
    ]
    return LineChart(
        "timeline", "Timeline of a step", "ms, rank 0", lines, x, stacked=True, note=timeline_note(run), wide=True
    )


def timeline_note(run: Run) -> str:
    rest = f"{REST.capitalize()}: zeroing, the schedule, and agreeing on loss and norm."
    if any(EXPOSED in (step.ms or ()) for step in run.steps):
        return f"Of the host's clock; the host computes, too. {rest}"
    return f"Phases are between events of the GPU's compute stream, {REST} is of the host's clock. {rest}"
