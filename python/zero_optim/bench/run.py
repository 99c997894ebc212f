"""The run of a request: every case in turn, then the table, the record and the plot."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UsageError, ZeroOptimError
from . import (
    adam_step,
    checkpoints,
    contenders,
    fused_adams,
    grad_stats,
    memory_walkthrough,
    offload,
    offload_contenders,
    pack,
    peak_memory,
    step_overhead,
    train_step,
)
from .case import Case, Setting, choose_backends
from .contest import Say
from .record import make_record, read, results_folder, write, write_anew
from .request import Request
from .rows.op import Row
from .table import table
from .timing import Clock, TimedRounds, interleaved, make_clock

NUMELS = {"cpu": (2**26,), "cuda": tuple(2**k for k in range(20, 31, 2))}
TRAINED_NUMEL = 2**24  # of train_step

# The rows, and for each baseline its version, or why it is not in the rows.
Measured = tuple[Sequence[Any], Mapping[str, str]]
Measure = Callable[[Request, torch.device, Say], Measured]
Keep = Callable[[Sequence[Any], Mapping[str, str]], object]
"""Called with the rows and baselines so far."""


@dataclass(frozen=True)
class Op:
    """An op that is measured one setting after another. A run may have several ops.

    Attributes:
        measure: makes the rows of one setting.
        numels: the default sizes, by the device's type.
        side_by_side: whether by default all backends are measured, or only the first.
    """

    measure: Callable[[Setting, Clock, TimedRounds], list[Row]]
    numels: Mapping[str, Sequence[int]]
    side_by_side: bool = True


def _measure_case(
    make_case: Callable[[Setting], Case], setting: Setting, clock: Clock, rounds: TimedRounds
) -> list[Row]:
    case = make_case(setting)
    times = interleaved(case.jobs, clock, rounds)
    return case.rows({name: [sum(laps) for laps in of_job] for name, of_job in times.items()})


CASES = {"adam_step": adam_step.make_case, "pack": pack.make_case, "grad_stats": grad_stats.make_case}
OPS = {name: Op(functools.partial(_measure_case, make_case), NUMELS) for name, make_case in CASES.items()}


def main(request: Request, ops: Mapping[str, Op] | None = None, alone_runs: Mapping[str, Measure] | None = None) -> int:
    """Measure, print the table, write JSON and plot. Raises UsageError before anything is measured.

    ``ops``: benchmarks by setting; ``alone_runs``: those with a run of their own. Both default to the package's.
    """
    ops, alone_runs = OPS if ops is None else ops, ALONE_RUNS if alone_runs is None else alone_runs
    if request.redraw is not None:
        return _redraw(request.redraw)
    device = find_device(request.device)
    # Raise for impossible requests before a folder is made.
    choose_backends(device, request.backends)
    _check_contenders(request)
    _check_ranks(request, device)
    tokens_of(request, device)
    threads = torch.get_num_threads()
    torch.set_num_threads(request.threads or threads)
    try:
        folder = _make_folder(results_folder(device, request.out)) if request.write else None
        alone = request.ops[0] if request.ops[0] in alone_runs else None
        growing = _Growing(folder, device, alone)
        if alone:
            rows, baselines = alone_runs[alone](request, device, _say)
        else:
            rows, baselines = run_ops(request, ops, device, _say, growing.keep)
        growing.keep(rows, baselines)
    finally:
        torch.set_num_threads(threads)
    print(table(growing.record))
    if growing.path is not None:
        print(f"\n{growing.path}\n{_draw(growing.record, growing.path.with_suffix('.png'))}")
    return 0


class _Growing:
    """The record of a run, written after each case, so that a run that ends early loses one case alone."""

    def __init__(self, folder: Path | None, device: torch.device, about: str | None) -> None:
        self.record: dict[str, Any] = {}
        self.path: Path | None = None
        self._folder, self._device, self._about = folder, device, about

    def keep(self, rows: Sequence[Any], baselines: Mapping[str, str]) -> None:
        self.record = make_record(rows, self._device, baselines)
        if self._folder is None:
            return
        if self.path is None:
            self.path = write(self.record, self._folder, self._about)
        else:
            write_anew(self.record, self.path)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_ops(request: Request, ops: Mapping[str, Op], device: torch.device, say: Say, keep: Keep) -> Measured:
    baselines = fused_adams.describe(device) if "adam_step" in request.ops else {}
    rows = run(request, ops, device, say, lambda so_far: keep(so_far, baselines))
    if not rows:
        raise ZeroOptimError("nothing was measured: no case fits the device's memory; give smaller sizes by --numel")
    return rows, baselines


def run_step_overhead(request: Request, device: torch.device, say: Say) -> Measured:
    numel = request.numel[0] if request.numel else step_overhead.NUMEL
    rounds = TimedRounds.exactly(request.rounds or step_overhead.ROUNDS)
    say(f"step_overhead, {numel:,} elements")
    ranks = request.ranks or step_overhead.RANKS
    return step_overhead.measure(device, numel, request.dtypes, ranks, make_clock(device), rounds), {}


def run_train_step(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else TRAINED_NUMEL
    names = request.contenders or tuple(contenders.MAKERS)
    tokens = tokens_of(request, device)
    return train_step.measure(numel, dtype, names, tokens, request.rounds or train_step.ROUNDS, say)


def run_memory_walkthrough(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    (ranks,) = request.ranks or ((memory_walkthrough.RANKS if device.type == "cpu" else torch.cuda.device_count()),)
    return memory_walkthrough.measure(memory_walkthrough.MODEL, dtype, ranks, device, say), {}


def run_checkpoint(request: Request, device: torch.device, say: Say) -> Measured:
    if not peak_memory.can_measure():
        raise UsageError("checkpoint counts what /proc shows, which is there on Linux alone")
    numel = request.numel[0] if request.numel else checkpoints.NUMEL
    return checkpoints.measure(numel, request.ranks or checkpoints.RANKS, request.rounds or checkpoints.ROUNDS, say), {}


def run_offload(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else offload.NUMELS[device.type]
    names = request.contenders or offload_contenders.NAMES
    (ranks,) = request.ranks or ((offload.RANKS if device.type == "cpu" else torch.cuda.device_count()),)
    return offload.measure(numel, dtype, names, ranks, request.rounds or offload.ROUNDS, device, say)


def _check_ranks(request: Request, device: torch.device) -> None:
    gpus = torch.cuda.device_count() if device.type == "cuda" else None
    if gpus is not None and any(count > gpus for count in request.ranks or ()):
        raise UsageError(f"--ranks {max(request.ranks or ())}: a rank needs a GPU of its own, and there are {gpus}")


def tokens_of(request: Request, device: torch.device) -> tuple[int, ...]:
    """Choose the tokens of a rank: those asked for, or the device's default. Raises UsageError for broken windows."""
    seq = train_step.SEQ[device.type]
    for count in request.tokens or ():
        if count % seq:
            raise UsageError(f"--tokens {count}: a rank trains on whole windows of {seq}; give a multiple of it")
    return request.tokens or train_step.TOKENS[device.type]


def _check_contenders(request: Request) -> None:
    known = offload_contenders.NAMES if "offload" in request.ops else tuple(contenders.MAKERS)
    for name in request.contenders or ():
        if name not in known:
            raise UsageError(f"--contenders {name}: there are {', '.join(known)}")


ALONE_RUNS: dict[str, Measure] = {
    "step_overhead": run_step_overhead,
    "train_step": run_train_step,
    "memory_walkthrough": run_memory_walkthrough,
    "checkpoint": run_checkpoint,
    "offload": run_offload,
}


def run(
    request: Request,
    ops: Mapping[str, Op],
    device: torch.device,
    say: Say = lambda line: None,
    keep: Callable[[Sequence[Row]], object] = lambda rows: None,
) -> list[Row]:
    """Measure all cases of the request. A case that the GPU's memory cannot hold is left out, which ``say`` reports.
    ``keep`` is called after each case, with the rows so far."""
    settings = [(op, setting) for op in request.ops for setting in _settings(request, device, ops[op])]
    clock = make_clock(device)
    rounds = TimedRounds.exactly(request.rounds) if request.rounds else TimedRounds()
    rows: list[Row] = []
    for op, setting in settings:
        say(f"{op}, {setting.dtype}, {setting.numel:,} elements")
        new = _measure(op, ops[op], setting, clock, rounds, say)
        for row in new:
            say(f"    {_in_a_line(row)}")
        rows += new
        keep(rows)
        _free(device)
    return rows


def _in_a_line(row: Row) -> str:
    """Write the row in one line, as progress."""
    ratios = [(row.fraction, f"of {row.yardstick}"), (row.vs_torch, "times torch's speed")]
    told = [f"{figure:.2f} {what}" for figure, what in ratios if figure is not None]
    return ", ".join([f"{row.backend} {row.ms:.3f} ms", *told])


def _settings(request: Request, device: torch.device, op: Op) -> Iterator[Setting]:
    backends = choose_backends(device, request.backends)
    if not op.side_by_side and not request.backends:
        backends = backends[:1]
    for dtype in request.dtypes:
        for numel in request.numel or op.numels[device.type]:
            yield Setting(device, dtype, numel, backends)


def find_device(asked: str | None) -> torch.device:
    """Choose the device to measure on. Raises UsageError where it does not exist."""
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        why = "torch sees no GPU here" if torch.version.cuda else "this torch is built without CUDA"
        raise UsageError(f"--device cuda: {why}")
    return torch.device(name)


def _measure(name: str, op: Op, setting: Setting, clock: Clock, rounds: TimedRounds, say: Say) -> list[Row]:
    try:
        return op.measure(setting, clock, rounds)
    except torch.OutOfMemoryError:
        say(f"left out: {name} {setting.dtype}, {setting.numel:,} elements do not fit the device's memory")
        return []


def _free(device: torch.device) -> None:
    """Free the memory of the last case, also in reference cycles, so that the next case has all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _make_folder(folder: Path) -> Path:
    """Make the folder before anything is measured, so that no long run fails at its end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error
    return folder


def _redraw(path: Path) -> int:
    record = read(path, "--redraw")
    print(table(record))
    print(f"\n{_draw(record, path.with_suffix('.png'))}")
    return 0


def _draw(record: dict[str, Any], path: Path) -> str:
    """Draw the plots. Returns their paths, or one line that says why there is none."""
    try:
        from .plot import draw
    except ImportError as error:
        return f"no plot: {error}; pip install matplotlib draws it, with --redraw {path.with_suffix('.json')}"
    return "\n".join(map(str, draw(record, path))) or "no plot: there is nothing to draw"
