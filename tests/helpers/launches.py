"""Counts of a piece of work's launches on a GPU, from the profiler's trace."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_KINDS = {"kernel": "kernels", "gpu_memcpy": "memcpys", "gpu_memset": "memsets"}


def count_launches(
    device: torch.device, prepare: Callable[[], object], work: Callable[[], object]
) -> dict[str, int] | None:
    """Count kernels, memcpys and memsets of ``work``; None off a GPU. ``prepare`` runs before and is not counted."""
    if device.type != "cuda":
        return None
    for _ in range(2):  # the first time the profiler sets itself up, and may miss the first launches
        prepare()
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        return tally(json.loads(trace.read_text())["traceEvents"])


def tally(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Count launches by kind. Annotations in the GPU's rows of the trace have other categories, and do not count."""
    categories = Counter(event.get("cat") for event in events)
    return {name: categories[category] for category, name in _KINDS.items()}
