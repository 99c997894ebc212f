"""Interleaved timing and result files. A figure is a ratio of medians measured in one run on the same tensors."""

import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
HERE = Path(__file__).parent
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Row:
    """One op on one backend and dtype. benchmarks/README.md says what each key means."""

    op: str
    backend: str
    dtype: str
    numel: int
    ms: float
    p20: float
    p80: float
    gbps: float
    copy_gbps: float
    fraction: float
    vs_torch: float
    vs_deepspeed: float | None


def interleaved(jobs: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Milliseconds of each job in each round. Every round runs them all, each round starting at the next one,
    so that a slow spell of the machine, or a neighbour's leftovers in the cache, meets all of them alike."""
    names = list(jobs)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warmup + rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            begin = time.perf_counter()
            jobs[name]()
            if turn >= warmup:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def spread(times: list[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return statistics.median(times), fifths[0], fifths[3]


def cpu_name() -> str:
    """The processor's name and the threads in use, as the record calls the device."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def slug(device: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", device.lower())).strip("-")


def commit() -> str:
    """The checked-out commit, with `-dirty` when files that git tracks differ from it; `nogit` outside a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(HERE), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "--short=10", "HEAD")
        return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "nogit"


def write(rows: list[Row], **more: Any) -> Path:
    """Write the rows to results/<device>/<date>-<commit>.json, with what is needed to judge them; returns the path."""
    device = cpu_name()
    record = {
        "schema": SCHEMA,
        "device": device,
        "driver": None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": None,
        "commit": commit(),
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0],
        **more,
        "rows": [asdict(row) for row in rows],
    }
    path = RESULTS / slug(device) / f"{record['date']}-{record['commit']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
