"""Runs a request: every case in turn, then the table, the record and the plot."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import ZeroOptimError
from ..train.config import UsageError
from . import adam_step, fused_adams, gpt_step, grad_stats, pack
from .case import Case, Setting, choose_backends
from .record import SCHEMA, Row, make_record, results_folder, write
from .request import Request
from .table import table
from .timing import Clock, Rounds, interleaved, make_clock

CASES: dict[str, Callable[[Setting], Case]] = {
    "adam_step": adam_step.make_case,
    "pack": pack.make_case,
    "grad_stats": grad_stats.make_case,
}
NUMELS = {"cpu": (2**26,), "cuda": tuple(2**k for k in range(20, 31, 2))}
STEP_NUMELS = {"cpu": (2**24,), "cuda": (10**9,)}

Say = Callable[[str], object]


def main(request: Request) -> int:
    """Measures, prints the table, writes JSON and plot. Raises UsageError before anything is measured."""
    if request.redraw is not None:
        return _redraw(request.redraw)
    device = find_device(request.device)
    choose_backends(device, request.backends)  # what can't be had is said before a folder is made
    threads = torch.get_num_threads()
    torch.set_num_threads(request.threads or threads)
    try:
        folder = _make_folder(results_folder(device, request.out)) if request.write else None
        rows = run(request, device, lambda line: print(line, file=sys.stderr, flush=True))
        if not rows:
            raise ZeroOptimError(
                "nothing was measured: no case fits the device's memory; give smaller sizes by --numel"
            )
        record = make_record(rows, device, fused_adams.describe(device) if "adam_step" in request.ops else {})
    finally:
        torch.set_num_threads(threads)
    print(table(record))
    if folder is not None:
        path = write(record, folder)
        print(f"\n{path}\n{_draw(record, path.with_suffix('.png'))}")
    return 0


def run(request: Request, device: torch.device, say: Say = lambda line: None) -> list[Row]:
    """All rows of the request. A case that the GPU's memory cannot hold is left out, and said."""
    settings = [(op, setting) for op in request.ops for setting in _settings(request, device, op)]
    clock = make_clock(device)
    rounds = Rounds.exactly(request.rounds) if request.rounds else Rounds()
    rows: list[Row] = []
    for op, setting in settings:
        say(f"{op}, {setting.dtype}, {setting.numel:,} elements")
        rows += _measure(op, setting, clock, rounds, say)
        _free(device)
    return rows


def _settings(request: Request, device: torch.device, op: str) -> Iterator[Setting]:
    backends = choose_backends(device, request.backends)
    if op == "step" and not request.backends:
        backends = backends[:1]  # each trains a model of its own, beside the others in memory
    for dtype in request.dtypes:
        for numel in request.numels or (STEP_NUMELS if op == "step" else NUMELS)[device.type]:
            yield Setting(device, dtype, numel, backends)


def find_device(asked: str | None) -> torch.device:
    """The device to measure on. Raises UsageError where there is no such."""
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        why = "torch sees no GPU here" if torch.version.cuda else "this torch is built without CUDA"
        raise UsageError(f"--device cuda: {why}")
    return torch.device(name)


def _measure(op: str, setting: Setting, clock: Clock, rounds: Rounds, say: Say) -> list[Row]:
    try:
        if op == "step":
            return gpt_step.measure(setting, clock, rounds)
        case = CASES[op](setting)
        times = interleaved(case.jobs, clock, rounds)
        return case.rows({name: [sum(laps) for laps in of_job] for name, of_job in times.items()})
    except torch.OutOfMemoryError:
        say(f"left out: {op} {setting.dtype}, {setting.numel:,} elements do not fit the device's memory")
        return []


def _free(device: torch.device) -> None:
    """Give back what the last case held, in cycles too, so that the next finds the memory whole."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _make_folder(folder: Path) -> Path:
    """Made before anything is measured: a long run must not fail at its end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: {error.strerror}") from error
    return folder


def _redraw(path: Path) -> int:
    try:
        record = json.loads(path.read_text())
        schema = record["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--redraw {path}: is no record of a benchmark") from error
    if schema != SCHEMA:
        raise UsageError(f"--redraw {path}: has schema {schema}; this version reads {SCHEMA}")
    print(table(record))
    print(f"\n{_draw(record, path.with_suffix('.png'))}")
    return 0


def _draw(record: dict[str, Any], path: Path) -> str:
    """The plot's path, or one line that says why there is none."""
    try:
        from .roofline import draw
    except ImportError as error:
        return f"no plot: {error}; pip install matplotlib draws it, with --redraw {path.with_suffix('.json')}"
    draw(record, path)
    return str(path)
