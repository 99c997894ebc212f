"""The text output of a run: progress lines, and a table at the end."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import memory
from ..drawing.figures import count, megabytes, row
from ..stats import PAGES, TELEMETRY
from .output import say
from .run_dir import StepRecord
from .session import Forecast, RankReport

_NOT_STATE = ("communication", "padding", "unsharded", TELEMETRY, PAGES)
# Collectives outside of steps, and when they are made.
NOT_OF_STEPS = {"construction": "once"}
EXPOSED = "exposed communication"
_MOST_COLUMNS = 4
_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """A bar in a terminal that has tqdm, else plain lines: the first step, the last, and one every ten seconds."""

    def __init__(self, first: int, steps: int, *, scaled: bool) -> None:
        self._first, self._steps, self._scaled = first, steps, scaled
        self._begun: float | None = None  # when the first step was over: it is slower than the others
        self._last_line = float("-inf")
        self._bar: Any = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                self._bar = tqdm(initial=first, total=steps, unit="step", dynamic_ncols=True)

    def show(self, record: StepRecord) -> None:
        norm = "overflow" if record.grad_norm is None else f"{record.grad_norm:.3f}"
        loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
        scale = [f"scale {record.loss_scale:g}"] if self._scaled else []
        if self._bar is not None:
            self._bar.update(1)
            figures = [f"loss {loss}", f"{record.tokens_per_s:,.0f} tokens/s", f"norm {norm}", *scale]
            self._bar.set_postfix_str(", ".join(figures))
            return
        now = time.monotonic()
        to_go = self._to_go(record.step, now)
        if now - self._last_line >= _SECONDS_BETWEEN_LINES or record.step == self._steps:
            self._last_line = now
            figures = [f"loss {loss}", f"{record.tokens_per_s:8,.0f} tokens/s", f"norm {norm}", *scale, *to_go]
            say("  ".join([f"step {record.step:>5}/{self._steps}", *figures]))

    def _to_go(self, step: int, now: float) -> list[str]:
        """Say how long the steps that are left take, by the mean of those since the first."""
        if self._begun is None:
            self._begun = now
        done, left = step - self._first - 1, self._steps - step
        if not done or not left:
            return []
        seconds = round((now - self._begun) / done * left)
        return [f"{seconds // 60}:{seconds % 60:02} to go"]

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class PhaseClock:
    """Seconds spent in each phase: on the host for a CPU, between events of the current stream for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.seconds: dict[str, float] = {}
        self._of_step: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        end = self._mark()
        if self._on_gpu:
            self._open.append((name, start, end))
        else:
            self._add(name, end - start)

    def collect(self) -> dict[str, float]:
        """Give the seconds of each phase since the last call. On a GPU, call it after a wait for the device."""
        for name, start, end in self._open:
            self._add(name, start.elapsed_time(end) / 1000)
        self._open.clear()
        of_step, self._of_step = self._of_step, {}
        return of_step

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, name: str, seconds: float) -> None:
        for total in (self.seconds, self._of_step):
            total[name] = total.get(name, 0.0) + seconds


def state_kinds(memory: Mapping[str, float]) -> list[str]:
    """List the kinds of ``memory`` that are model state: parameters, gradients, and the state of the update rule."""
    return [kind for kind in memory if kind not in _NOT_STATE]


def forecast(planned: memory.Plan) -> Forecast:
    """Take from the plan of the mean rank the kinds of memory that are measured, and the traffic of a step."""
    kinds = [*planned.state_kinds, *_NOT_STATE]
    held = {kind: float(planned.memory[kind]) for kind in kinds if kind in planned.memory}
    return Forecast(held, {kind: float(nbytes) for kind, nbytes in planned.traffic.items()})


def final_table(reports: Sequence[RankReport], planned: memory.Plan, *, on_gpu: bool) -> str:
    """Memory by kind beside the plan of the mean rank, traffic by collective, and the time of a step."""
    lines = _memory_lines(reports, planned)
    lines += ["", *_traffic_lines(reports[0]), ""]
    return "\n".join(lines + _time_lines(reports, planned.job.stage, on_gpu))


def _memory_lines(reports: Sequence[RankReport], planned: memory.Plan) -> list[str]:
    names, columns = _columns([report.memory for report in reports])
    wanted, parameters = forecast(planned).memory, planned.model.numel
    ranks = count(len(reports), "rank")
    lines = [
        f"model state, MB (stage {planned.job.stage}, {ranks}, {parameters:,} parameters)",
        row("", [*names, "planned", "bytes/param"]),
    ]

    def line(name: str, measured: Sequence[float], plan: float) -> str:
        return row(name, [*(megabytes(size) for size in measured), megabytes(plan), f"{plan / parameters:.4g}"])

    for kind in planned.state_kinds:
        lines.append(line(kind, [column.get(kind, 0) for column in columns], wanted[kind]))
    sums = [sum(column.get(kind, 0) for kind in planned.state_kinds) for column in columns]
    lines.append(line("model state", sums, planned.model_state))
    for kind in (kind for kind in reports[0].memory if kind not in planned.state_kinds):
        name = "unsharded, at most" if kind == "unsharded" else kind
        lines.append(line(name, [column.get(kind, 0) for column in columns], wanted.get(kind, 0.0)))
    return lines


def _columns(figures: Sequence[dict[str, float]]) -> tuple[list[str], list[dict[str, float]]]:
    """Make a column for each rank; of more than ``_MOST_COLUMNS``, one of the least and one of the most by kind."""
    if len(figures) <= _MOST_COLUMNS:
        return [f"rank {rank}" for rank in range(len(figures))], list(figures)
    extremes = [{kind: pick(of_rank[kind] for of_rank in figures) for kind in figures[0]} for pick in (min, max)]
    return ["least", "most"], extremes


def _traffic_lines(report: RankReport) -> list[str]:
    """Bytes are of whole tensors; a rank puts (N-1)/N of them on the wire, an all-reduce twice that."""
    lines = ["communication, rank 0", row("", ["calls", "MB", "MB/step", "blocked, s"])]
    for kind, traffic in sorted(report.collectives.items()):
        nbytes = traffic["bytes"]
        a_step = NOT_OF_STEPS.get(kind) or megabytes(nbytes / report.steps)
        calls, blocked = f"{traffic['calls']:,.0f}", f"{traffic['wait_seconds']:.2f}"
        lines.append(row(kind, [calls, megabytes(nbytes), a_step, blocked]))
    return lines if report.collectives else [*lines[:1], "  none: one rank"]


def _time_lines(reports: Sequence[RankReport], stage: int, on_gpu: bool) -> list[str]:
    names, columns = _columns([phase_milliseconds(report, on_gpu) for report in reports])
    lines = ["time a step, ms", row("", names)]
    for phase in columns[0]:
        lines.append(row(phase, [f"{column[phase]:.1f}" for column in columns]))
    phases = "forward, backward and step" if stage >= 3 else "backward and step"
    if on_gpu:
        return [*lines, f"  between events of the compute stream; waits for communication are inside {phases}"]
    return [*lines, f"  exposed communication: host time blocked on collectives, inside {phases}"]


def phase_milliseconds(report: RankReport, on_gpu: bool) -> dict[str, float]:
    """Mean milliseconds of each phase in a step; on a CPU also those that the host was blocked on collectives."""
    times = {phase: 1000 * seconds / max(1, report.steps) for phase, seconds in report.seconds.items()}
    if not on_gpu:
        times[EXPOSED] = 1000 * blocked_seconds(report.collectives) / max(1, report.steps)
    return times


def blocked_seconds(collectives: Mapping[str, Mapping[str, float]]) -> float:
    """Sum the seconds that the host was blocked on the collectives of steps."""
    return sum(traffic["wait_seconds"] for kind, traffic in collectives.items() if kind not in NOT_OF_STEPS)


def peak_bytes(device: torch.device) -> int:
    """Peak bytes: allocated by torch on the GPU; on a CPU, resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
