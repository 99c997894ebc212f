"""The run of ``zero-optim bench``: every case in turn, then the table and the result file."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..doctor import version_of
from ..errors import UsageError, ZeroOptimError
from . import cases
from .cases import PEERS, TORCHS, Row, Setting, choose_backends
from .record import Result, title
from .timing import Clock, interleaved, make_clock

CASES = {"adam_step": cases.adam_step, "pack": cases.pack, "grad_stats": cases.grad_stats}
NUMELS = {"cpu": (2**26,), "cuda": tuple(2**k for k in range(20, 31, 2))}
COLUMNS = {
    "backend": "{}",
    **dict.fromkeys(("ms", "p20", "p80"), "{:.3f}"),
    "bytes": "{:.4g}",
    "gbps": "{:,.1f}",
    "fraction": "{:.3f}",
    "vs_torch": "{:.2f}",
}
"""Keys of a row that the table shows, with their form. ``fraction``: of the yardstick's bandwidth."""


def main(parsed: argparse.Namespace) -> int:
    """Measure, print the table, write JSON. Raises UsageError before anything is measured."""
    device = find_device(parsed.device)
    backends = choose_backends(device, parsed.backends)
    torch.set_num_threads(parsed.threads or torch.get_num_threads())
    about, baselines = parsed.ops[0] if len(parsed.ops) == 1 else "", dict[str, str]()
    result = Result(device, parsed.out, parsed.write, about, baselines=baselines)
    clock, peers = make_clock(device), PEERS | TORCHS if device.type == "cuda" else {}  # the last needs most memory
    for op in dict.fromkeys(parsed.ops or CASES):
        for dtype in parsed.dtypes:
            for numel in parsed.numel or NUMELS[device.type]:
                setting = Setting(device, dtype, numel, backends, peers)
                result.add(measure(op, setting, clock, parsed.rounds, baselines))
    if not result.rows:
        raise ZeroOptimError("nothing was measured: no case fits the device's memory; give smaller sizes by --numel")
    print(table(result.record()))
    if result.path is not None:
        print(f"\n{result.path}")
    return 0


def find_device(asked: str | None) -> torch.device:
    """Choose the device to measure on. Raises UsageError where it does not exist."""
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        why = "torch sees no GPU here" if torch.version.cuda else "this torch is built without CUDA"
        raise UsageError(f"--device cuda: {why}")
    return torch.device(name)


def measure(op: str, setting: Setting, clock: Clock, rounds: int | None, baselines: dict[str, str]) -> list[Row]:
    """Measure one case. What the GPU's memory cannot hold, or a peer that fails, is left out, and a line is printed."""
    progress(f"{op}, {setting.dtype}, {setting.numel:,} elements")
    try:
        case = CASES[op](setting)
        for name, why in sorted(case.left_out.items() - baselines.items()):
            progress(f"left out: {name}: {why}")
        versions = {name: version_of(PEERS[name].module.split(".")[0]) or "" for name in case.jobs if name in PEERS}
        baselines |= {**case.left_out, **baselines, **versions}
        times = interleaved(case.jobs, clock, rounds)
        return case.rows({name: [sum(laps) for laps in of_job] for name, of_job in times.items()})
    except torch.OutOfMemoryError:
        progress(f"left out: {op} {setting.dtype}, {setting.numel:,} elements do not fit the device's memory")
        return []
    finally:
        gc.collect()  # the case's tensors, so that the next one has all memory
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(record: Mapping[str, Any], columns: Mapping[str, str] = COLUMNS) -> str:
    """Write a block of lines for each op, dtype and size. ``columns``: keys of a row, with their form."""
    lines = [title(record)]
    blocks: dict[tuple[Any, ...], list[Row]] = {}
    for row in record["rows"]:
        size = f"{row['numel']:,} elements" if "numel" in row else None
        rounds = f"medians of {row['rounds']} rounds" if row.get("rounds") else None
        blocks.setdefault((row["op"], row.get("dtype"), size, rounds), []).append(row)
    for block, rows in blocks.items():
        shown = [key for key in columns if any(row.get(key) is not None for row in rows)]
        lines += ["", ", ".join(filter(None, block))]
        cells = [["-" if row.get(key) is None else columns[key].format(row[key]) for key in shown] for row in rows]
        widths = [max(map(len, column)) for column in zip(shown, *cells, strict=True)]
        for first, *numbers in (shown, *cells):
            padded = (cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True))
            lines.append("  ".join([first.ljust(widths[0]), *padded]))
        for row in rows:
            if row.get("phases"):
                phases = "  ".join(f"{name} {ms:.3f}" for name, ms in row["phases"].items())
                lines.append(f"  {row['backend']}, ms: {phases}")
    return "\n".join([*lines, *(f"{name}: {state}" for name, state in record.get("baselines", {}).items())])
