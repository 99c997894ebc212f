"""What is kept of a run: rows, and what is needed to judge them. benchmarks/README.md says what each key means."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import zero_kernels

from ..doctor import DISTRIBUTION
from ..train.config import UsageError
from .timing import Spread

SCHEMA = 7
COMPLETED = 2  # the oldest schema that is still read: what its rows lack is null
COMMIT_ENVIRONMENT = "ZERO_KERNELS_COMMIT"  # for sources that were copied without their .git

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]


@dataclass(frozen=True)
class Row:
    """One op on one backend, dtype and size."""

    op: str
    backend: str
    dtype: str
    numel: int
    rounds: int
    ms: float
    p20: float
    p80: float
    bytes: int | None  # an element: the fewest that the op must move, read plus written
    gbps: float | None
    yardstick: str | None  # the backend whose speed is copy_gbps
    copy_gbps: float | None
    fraction: float | None
    vs_torch: float
    vs: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] | None = None
    launches: dict[str, int] | None = None
    parameters: int | None = None  # tensors that the elements are in
    ranks: int | None = None
    tokens_per_s: float | None = None  # of all ranks
    memory: dict[str, int] | None = None  # bytes of a rank
    loss: float | None = None  # of the last step
    baseline: str | None = None  # the backend whose time vs_torch is over this one's
    communicated: int | None = None  # bytes a step, of whole tensors
    keeps: str | None = None  # bytes a parameter of a rank of N
    tokens: int | None = None  # of a rank in a step

    @classmethod
    def of_whole(
        cls, op: str, backend: str, dtype: str, numel: int, spread: Spread, vs_torch: float, **more: Any
    ) -> Row:
        """A row of what has no fewest bytes to be held to, such as a training step."""
        unmeasured = dict.fromkeys(("bytes", "gbps", "yardstick", "copy_gbps", "fraction"))
        times = {"rounds": spread.rounds, "ms": spread.ms, "p20": spread.p20, "p80": spread.p80}
        return cls(op, backend, dtype, numel, **times, **unmeasured, vs_torch=round(vs_torch, 4), **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PhaseRow:
    """What a rank has allocated, after a phase of a training and at most within it."""

    op: str
    backend: str
    dtype: str
    numel: int
    ranks: int
    phase: str
    after: int
    peak: int


@dataclass(frozen=True)
class ScaleRow:
    """What the host does at so many ranks. ``timed`` and ``timed_buckets`` are of small tensors, all else of true
    shapes. ``of_bucket``: see ``bucket_parts``."""

    op: str
    backend: str
    dtype: str
    numel: int
    ranks: int
    parameters: int
    buckets: int
    largest: int  # elements of a bucket
    padding: float  # over numel
    exchange: int  # bytes
    collectives: dict[str, dict[str, int]]  # calls by kind; by when
    object_bytes: dict[str, int]  # that a rank receives of gathered objects; by when
    rounds: int
    timed_buckets: int
    timed: dict[str, float]  # ms
    of_bucket: dict[str, float] | None = None  # microseconds, by part


@dataclass(frozen=True)
class EnduranceRow:
    """What a rank has along a training of very many steps.

    Attributes:
        samples: by counter, a figure for each of its ``step``.
        growth: by counter, a step, over the second half.
    """

    op: str
    backend: str
    dtype: str
    numel: int
    ranks: int
    steps: int
    samples: dict[str, list[float]]
    growth: dict[str, float]


@dataclass(frozen=True)
class CheckpointRow:
    """What saving and loading takes. Times are of the slower rank: median, 20th and 80th percentile, in ms."""

    op: str
    backend: str
    dtype: str
    numel: int
    ranks: int
    rounds: int
    written: int  # bytes, of all ranks
    save: list[float]  # until it is on the disk
    load: list[float]
    blocked: list[float]  # of saving, until training may go on
    of_disk: dict[str, float]  # the disk's time over this one's: of save, of load
    extra: dict[str, int]  # bytes of a rank beside what was there, at most: in save, in load


@dataclass(frozen=True)
class OffloadRow:
    """A step with one store, or a way of the pages of a file. Times in ms, memory in bytes of a rank.

    Attributes:
        part: "step" is the update alone, "train" a whole step, "pages" the file against the disk.
        time: median, 20th and 80th percentile.
        versus: None's time over this one's.
        moved: in a step: to_device, to_host, read, written.
        held: of the state, by where it is: device, host, disk.
        peak: the most in a step beside what was there before: resident; on a GPU, allocated there.
        beside: what the store adds to a step, each by itself: copies, disk, on a GPU the update on the host.
        hidden: the part of that which does not make the step longer than None's.
        bound: what a step cannot be shorter than: the longest of what it is made of.
        fraction: that one's time over this one's.
        speculated: updates of shards before the norm was known, since the start: right, redone.
    """

    op: str
    backend: str
    dtype: str
    numel: int
    ranks: int
    rounds: int
    part: str
    time: list[float]
    versus: float | None
    moved: dict[str, int] | None
    held: dict[str, int] | None
    peak: int | None
    beside: dict[str, float]
    hidden: float | None
    bound: str | None
    fraction: float | None
    speculated: dict[str, int] | None


AnyRows = (
    Sequence[Row]
    | Sequence[PhaseRow]
    | Sequence[ScaleRow]
    | Sequence[EnduranceRow]
    | Sequence[CheckpointRow]
    | Sequence[OffloadRow]
)


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def slug(device: str) -> str:
    """The device's name as a folder's."""
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
    """The checked-out commit, with ``-dirty`` when files that git tracks differ from it; None outside a checkout.

    An installed package may lie inside the checkout of another project: git must know this file.
    """
    if os.environ.get(COMMIT_ENVIRONMENT):
        return os.environ[COMMIT_ENVIRONMENT]
    try:
        _git("ls-files", "--error-unmatch", "../__init__.py")
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def sources_of(record: Mapping[str, Any]) -> str:
    """What was measured, for people: the commit where it is known, else the version of the package."""
    return f"commit {record['commit']}" if record["commit"] else f"{DISTRIBUTION} {record['version']}"


def _git(*words: str) -> str:
    # Without optional locks `git status` leaves the index alone, whoever else works in the checkout.
    command = ["git", "--no-optional-locks", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def results_folder(device: torch.device, out: Path | None) -> Path:
    """Where the record goes: ``out``; else below ``benchmarks/results`` in a checkout, or below the working folder."""
    if out is not None:
        return out
    in_checkout = (CHECKOUT / "pyproject.toml").is_file() and (CHECKOUT / "benchmarks").is_dir()
    parent = CHECKOUT / "benchmarks" / "results" if in_checkout else Path("zero-optim-bench")
    return parent / slug(device_name(device))


def make_record(
    rows: AnyRows,
    device: torch.device,
    baselines: Mapping[str, str],
) -> dict[str, Any]:
    """``baselines``: their versions, or why they are not in the rows."""
    on_cpu = device.type == "cpu"
    return {
        "schema": SCHEMA,
        "device": device_name(device),
        "driver": driver_version(device),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": None if on_cpu else _version("triton"),
        "version": zero_kernels.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
        "threads": torch.get_num_threads() if on_cpu else None,
        "isa": _isa() if on_cpu else None,
        "baselines": dict(baselines),
        "rows": [asdict(row) for row in rows],
    }


def write(record: Mapping[str, Any], folder: Path, about: str | None = None) -> Path:
    """Writes ``<date>-<commit>[-<about>].json``, numbered where that is taken; returns its path.

    Where there is no commit, ``v<version>`` stands in its place.
    """
    sources = record["commit"] or f"v{record['version']}"
    stem = "-".join([record["date"], sources, *([about] if about else [])])
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    path = next(path for path in (folder / f"{name}.json" for name in names) if not path.exists())
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def write_anew(record: Mapping[str, Any], path: Path) -> None:
    """Over a file that ``write`` has made. Whoever reads it meanwhile finds it whole, as it was or as it is."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n")
    unfinished.replace(path)


def read(path: Path, flag: str = "") -> dict[str, Any]:
    """A record that ``write`` has written. Raises UsageError, which begins with ``flag``."""
    named = f"{flag} {path}".lstrip()
    try:
        record = json.loads(path.read_text())
        schema, rows = record["schema"], record["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{named}: is no record of a benchmark") from error
    if not isinstance(schema, int) or not COMPLETED <= schema <= SCHEMA:
        raise UsageError(f"{named}: has schema {schema}; this version reads {COMPLETED} to {SCHEMA}")
    kinds = (Row, PhaseRow, ScaleRow, EnduranceRow, CheckpointRow, OffloadRow)
    nothing = {key.name: None for kind in kinds for key in fields(kind)}
    return {"version": None, **record, "rows": [{**nothing, **row} for row in rows]}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _isa() -> str | None:
    """Instruction set of the CPU library."""
    return torch.ops.zero_kernels_C.isa() if "cpu" in zero_kernels.available_backends("cpu") else None
