"""The charts of a run, all over its steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence

from ..drawing.figures import count, short
from ..drawing.sheet import POINTS, Line, Lines, Look, Marks, Scale, points_in_one, thinned
from ..train.report import EXPOSED
from ..train.run_dir import StepRecord
from .charts import Chart
from .run_data import Run

WHOLE = "whole"
REST = "the rest"
_SPREAD = 100.0  # largest norm over the least, above which the axis is logarithmic
_TALL = 4.0  # a peak that is this many times above nearly all values is cut off
_NEARLY_ALL = 0.95
_GRAD_NORM = "grad_norm/"
_MOST_LAYERS = 6


def charts(run: Run) -> Iterator[Chart]:
    """Make all charts of a run, which has at least one step."""
    yield _chart(run, "loss", losses(run))
    yield _chart(run, "speed", _speed(run))
    yield _chart(run, "norm", _norms(run), _clipped(run))
    if layers(run):
        yield _chart(run, "layers", _norms_of_layers(run), _left_out(run))
    if any(step.loss_scale != 1 for step in run.steps):
        yield _chart(run, "scale", _scales(run))
    yield _chart(run, "rate", _rates(run))
    if any(step.ms for step in run.steps):
        yield _chart(run, "timeline", timeline(run), timeline_note(run))


def _chart(run: Run, key: str, lines: Lines, note: str = "") -> Chart:
    return Chart(key, lines, " ".join(filter(None, [note, *_of_drawing(run, lines)])))


def _of_drawing(run: Run, lines: Lines) -> Iterator[str]:
    """Give the notes that the drawing needs, a sentence each."""
    size = points_in_one(len(run.steps))
    if size > 1:
        shade = "" if lines.stacked else "; shaded: from the least to the most"
        yield f"Each point is the mean of {count(size, 'step')}{shade}."
    if lines.top is not None:
        yield f"Values above {short(lines.top)} are cut off."
    if lines.scale in (Scale.TENS, Scale.TWOS):
        yield "Logarithmic axis."


def _line(run: Run, name: str, value: Callable[[StepRecord], float | None]) -> Line:
    """Make a line of a value of every step."""
    y = [value(step) for step in run.steps]
    end = next((short(value, 5) for value in reversed(y) if value is not None), "")
    return thinned(Line(name, [step.step for step in run.steps], y, end))


def _level(run: Run, name: str, value: float) -> Line:
    """Make a level line over all steps."""
    return Line(name, [run.steps[0].step, run.steps[-1].step], [value, value], short(value, 5), look=Look.DASHED)


def _marks(run: Run, steps: Sequence[int], name: str) -> Marks:
    """Mark steps, at most about one a pixel."""
    width = max(1, len(run.steps) // POINTS)
    return Marks(list({step // width: step for step in steps}.values()), name)


def _cut(line: Line, low: float, *beside: float) -> float | None:
    """Choose the top of an axis from ``low`` if a peak is far above nearly all values and ``beside``; None: no peak."""
    ordered = sorted(line.values)
    if not ordered:
        return None
    usual = max(ordered[int(_NEARLY_ALL * (len(ordered) - 1))], *beside, low)
    return low + 2 * (usual - low) if ordered[-1] - low > _TALL * (usual - low) > 0 else None


def losses(run: Run) -> Lines:
    training = _line(run, "training", lambda step: step.loss)
    lines, beside = [training], [0.0]
    if run.validations:
        steps, held_out, entropies = zip(*run.validations, strict=True)
        lines.append(Line("held out", steps, held_out, short(held_out[-1], 5), look=Look.DOTS))
        lines.append(_level(run, "unigram entropy", entropies[-1]))
        beside = [*held_out, entropies[-1]]
    top = _cut(training, min(training.values, default=0.0), *beside)
    marks = _marks(run, run.lost, "not finite")
    return Lines("Loss", "nats per byte", lines, scale=Scale.DATA, top=top, marks=marks)


def _speed(run: Run) -> Lines:
    line = _line(run, "tokens/s", lambda step: step.tokens_per_s)
    return Lines("Speed", "tokens/s, of all ranks", [line], top=_cut(line, 0.0))


def _norms(run: Run) -> Lines:
    norms = _line(run, "before clipping", lambda step: step.grad_norm)
    clip = _clip(run)
    lines = [norms] if clip is None else [norms, _level(run, "clipped to", clip)]
    scale = _scale_of(lines)
    top = None if scale is Scale.TENS else _cut(norms, 0.0, clip or 0.0)
    marks = _marks(run, run.skipped, "skipped step")
    return Lines("Gradient norm", "of the averaged gradient", lines, scale=scale, top=top, marks=marks)


def _scale_of(lines: Sequence[Line]) -> Scale:
    """Choose the axis of norms: logarithmic where they are far apart."""
    there = [norm for line in lines for norm in line.values]
    apart = there and min(there) > 0 and max(there) > _SPREAD * min(there)
    return Scale.TENS if apart else Scale.FROM_ZERO


def layer_of(parameter: str) -> str:
    """Name the layer of a parameter: its name up to the first number, as in ``blocks.3``, else its first part."""
    numbered = re.match(r".*?\.\d+(?=\.)", parameter)
    return numbered[0] if numbered else parameter.split(".")[0]


def layers(run: Run) -> list[str]:
    """List the layers with telemetry, in the order of the log."""
    names = dict.fromkeys(name for step in run.steps for name in step.telemetry or ())
    return list(dict.fromkeys(layer_of(name[len(_GRAD_NORM) :]) for name in names if name.startswith(_GRAD_NORM)))


def _drawn_layers(run: Run) -> list[str]:
    """Choose all layers, or of many ``_MOST_LAYERS`` evenly spaced ones, with the first and the last."""
    found = layers(run)
    if len(found) <= _MOST_LAYERS:
        return found
    return [found[round(number * (len(found) - 1) / (_MOST_LAYERS - 1))] for number in range(_MOST_LAYERS)]


def norm_of_layer(step: StepRecord, layer: str) -> float | None:
    """Compute the norm of all gradients of a layer. None: the step has updated none of its parameters."""
    numbers = (step.telemetry or {}).items()
    norms = [of for name, of in numbers if name.startswith(_GRAD_NORM) and layer_of(name[len(_GRAD_NORM) :]) == layer]
    return math.hypot(*norms) if norms else None


def _norms_of_layers(run: Run) -> Lines:
    lines = [
        _line(run, layer, lambda step, layer=layer: norm_of_layer(step, layer))  # type: ignore[misc]
        for layer in _drawn_layers(run)
    ]
    marks = _marks(run, run.skipped, "skipped step")
    scale = _scale_of(lines)
    return Lines("Gradient norm by layer", "after clipping", lines, scale=scale, in_turn=True, marks=marks)


def _left_out(run: Run) -> str:
    more = len(layers(run)) - len(_drawn_layers(run))
    return f"{count(more, 'layer')} between these are not drawn; log.jsonl has them." if more else ""


def _clip(run: Run) -> float | None:
    return run.sessions[-1].config["clip"] if run.sessions else None


def _clipped(run: Run) -> str:
    clip = _clip(run)
    if clip is None:
        return ""
    clipped = sum(step.grad_norm is not None and step.grad_norm > clip for step in run.steps)
    return f"{clipped:,} of {len(run.steps):,} steps were clipped."


def _scales(run: Run) -> Lines:
    line = _line(run, "loss scale", lambda step: step.loss_scale)
    return Lines("Loss scale", "of fp16", [line], scale=Scale.TWOS, marks=_marks(run, run.skipped, "skipped step"))


def _rates(run: Run) -> Lines:
    return Lines("Learning rate", "of the schedule", [_line(run, "learning rate", lambda step: step.lr)])


def phases(run: Run) -> list[str]:
    """List the phases of a step, in their order, and ``REST``."""
    found = dict.fromkeys(phase for step in run.steps for phase in step.ms or ())
    return [*(phase for phase in found if phase not in (WHOLE, EXPOSED)), REST]


def phase_ms(step: StepRecord, phase: str) -> float | None:
    """Give a phase's milliseconds. ``REST`` is the step's time outside of phases, at least 0: the whole is the host's
    time, and phases can be a GPU's."""
    if step.ms is None:
        return None
    if phase == REST:
        return max(0.0, step.ms[WHOLE] - sum(ms for name, ms in step.ms.items() if name not in (WHOLE, EXPOSED)))
    return step.ms.get(phase)


def timeline(run: Run) -> Lines:
    """Draw the time of each step by phase, stacked."""
    lines = [_line(run, phase, lambda step, phase=phase: phase_ms(step, phase)) for phase in phases(run)]  # type: ignore[misc]
    return Lines("Timeline of a step", "ms, rank 0", lines, stacked=True)


def timeline_note(run: Run) -> str:
    rest = f"{REST.capitalize()}: zeroing, the schedule, and agreeing on loss and norm."
    if any(EXPOSED in (step.ms or ()) for step in run.steps):
        return f"Of the host's clock; the host computes, too. {rest}"
    return f"Phases are between events of the GPU's compute stream, {REST} is of the host's clock. {rest}"
