"""The record of a run: rows (of ``rows/``), and the machine and versions. benchmarks/README.md has the keys."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

import zero_kernels

from ..checkpoint.folder import write_atomically
from ..doctor import DISTRIBUTION, version_of
from ..errors import UsageError

SCHEMA = 7
OLDEST = 2  # the oldest schema that is still read; its rows lack some keys
COMMIT_ENVIRONMENT = "ZERO_KERNELS_COMMIT"  # for sources that were copied without their .git

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]


def device_name(device: torch.device) -> str:
    """Name the GPU, or the processor with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def slug(device: str) -> str:
    """Make a folder's name of the device's."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", device.lower())).strip("-")


def driver_version(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def commit() -> str | None:
    """Find the checked-out commit, with ``-dirty`` when files that git tracks differ from it; None outside a checkout.

    An installed package may lie inside another project's checkout, so git is asked whether it tracks this package.
    """
    if given := os.environ.get(COMMIT_ENVIRONMENT):
        return given[:10] if re.fullmatch("[0-9a-f]{40}", given) else given
    try:
        _git("ls-files", "--error-unmatch", "../__init__.py")
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def sources_of(record: Mapping[str, Any]) -> str:
    """Name the measured sources for readers: the commit where it is known, else the version of the package."""
    return f"commit {record['commit']}" if record["commit"] else f"{DISTRIBUTION} {record['version']}"


def _git(*words: str) -> str:
    # Without optional locks `git status` does not write the index, which another process may be using.
    command = ["git", "--no-optional-locks", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def results_folder(device: torch.device, out: Path | None) -> Path:
    """Choose a folder: ``out``; else one below ``benchmarks/results`` in a checkout, or below the working folder."""
    if out is not None:
        return out
    in_checkout = (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "benchmarks").is_dir()
    parent = CHECKOUT / "benchmarks" / "results" if in_checkout else Path("zero-optim-bench")
    return parent / slug(device_name(device))


def make_record(rows: Sequence[Any], device: torch.device, baselines: Mapping[str, str]) -> dict[str, Any]:
    """Make a record of rows (of ``rows/``). ``baselines``: versions of packages, or why one is not in the rows."""
    on_cpu = device.type == "cpu"
    compiled = on_cpu and "cpu" in zero_kernels.available_backends("cpu")
    return {
        "schema": SCHEMA,
        "device": device_name(device),
        "driver": driver_version(device),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": None if on_cpu else version_of("triton"),
        "version": zero_kernels.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads() if on_cpu else None,
        "isa": torch.ops.zero_kernels_C.isa() if compiled else None,
        "baselines": dict(baselines),
        "rows": [asdict(row) for row in rows],
    }


def write(record: Mapping[str, Any], folder: Path, about: str | None = None) -> Path:
    """Write ``<date>-<commit>[-<about>].json``, with a number behind where that exists. Returns its path.

    Without a commit ``v<version>`` stands in its place.
    """
    sources = record["commit"] or f"v{record['version']}"
    stem = "-".join([record["date"], sources, *([about] if about else [])])
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    path = next(path for path in (folder / f"{name}.json" for name in names) if not path.exists())
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def write_anew(record: Mapping[str, Any], path: Path) -> None:
    """Replace a file that ``write`` has made. A reader finds either the old record or the new one, whole."""
    write_atomically(path, json.dumps(record, indent=1) + "\n")


def has_ops(rows: object) -> bool:
    """Tell whether these are rows of a benchmark. Curves of training are written in the same form, without ops."""
    return isinstance(rows, list) and all(isinstance(row, dict) and "op" in row for row in rows)


def read(path: Path, flag: str = "") -> dict[str, Any]:
    """Read a record that ``write`` has written. Raises UsageError; its message begins with ``flag``."""
    named = f"{flag} {path}".lstrip()
    try:
        record = json.loads(path.read_text())
        schema, rows = record["schema"], record["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{named}: is no record of a benchmark") from error
    if not has_ops(rows):
        raise UsageError(f"{named}: is no record of a benchmark: its rows are of something else")
    if not isinstance(schema, int) or not OLDEST <= schema <= SCHEMA:
        raise UsageError(f"{named}: has schema {schema}; this version reads {OLDEST} to {SCHEMA}")
    return {"version": None, **record}
