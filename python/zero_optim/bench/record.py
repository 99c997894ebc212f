"""The result file: rows, and the machine and versions they were measured on. benchmarks/README.md has the keys."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import zero_kernels

from ..checkpoint.folder import write_atomically
from ..doctor import DISTRIBUTION, commit, device_name, driver_version, version_of
from ..errors import UsageError

SCHEMA = 8  # rows have the keys that their op has, and no others

CHECKOUT = Path(__file__).resolve().parents[3]


def slug(device: str) -> str:
    """Make a folder's name of the device's."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", device.lower())).strip("-")


def title(record: Mapping[str, Any]) -> str:
    """Name device, torch and the measured sources: the commit where it is known, else the version of the package."""
    sources = f"commit {record['commit']}" if record["commit"] else f"{DISTRIBUTION} {record['version']}"
    return f"{record['device']}; torch {record['torch']}; {sources}"


def results_folder(device: torch.device, out: Path | None) -> Path:
    """Choose a folder: ``out``; else one below ``benchmarks/results`` in a checkout, or below the working folder."""
    in_checkout = (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "benchmarks").is_dir()
    parent = CHECKOUT / "benchmarks" / "results" if in_checkout else Path("zero-optim-bench")
    return out or parent / slug(device_name(device))


def facts_of(device: torch.device) -> dict[str, Any]:
    """Make what a record has besides its rows."""
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
        "threads": torch.get_num_threads() if on_cpu else None,
        "isa": torch.ops.zero_kernels_C.isa() if compiled else None,
    }


class Result:
    """The result file of a run: ``path``, None before there is one. It is written after each case, so that a run that
    ends early loses one case alone.

    Args:
        out: its folder; None: that of ``results_folder``.
        write: whether there is a file at all.
        about: the end of its name.
        more: further keys of the record, as ``baselines``: versions of packages, or why one is not in the rows.

    Raises UsageError where the folder cannot be made.
    """

    def __init__(self, device: torch.device, out: Path | None, write: bool = True, about: str = "", **more: Any):
        self.rows: list[Mapping[str, Any]] = []
        self._facts, self._about = {**facts_of(device), **more}, f"-{about}" if about else ""
        self.path: Path | None = None
        self._folder = results_folder(device, out) if write else None
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {self._folder}: {error.strerror}") from error

    def record(self) -> dict[str, Any]:
        return {**self._facts, "load": round(os.getloadavg()[0], 2), "rows": self.rows}

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, and write the file: a reader finds the old record or the new one, whole."""
        self.rows += rows
        record = self.record()
        if self._folder is None or not self.rows:
            return
        if self.path is None:  # <date>-<commit>[-<about>].json, with a number behind where that exists
            stem = f"{record['date']}-{record['commit'] or 'v' + record['version']}{self._about}"
            names = (stem, *(f"{stem}-{number}" for number in range(2, 1000)))
            self.path = next(path for name in names if not (path := self._folder / f"{name}.json").exists())
        write_atomically(self.path, json.dumps(record, indent=1) + "\n")
