"""``zero-optim doctor``: what is installed, what is active, and why the rest is not."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.distributed as dist
from zero_optim_cli import DISTRIBUTION, distribution_version

import zero_kernels
from zero_kernels import compiled, dispatch

from .stores.host_threads import own_cores, threads_of

COMMIT_ENVIRONMENT = "ZERO_KERNELS_COMMIT"  # for sources that were copied without their .git
HERE = Path(__file__).resolve().parent


def version_of(distribution: str) -> str | None:
    """Look up the version of a distribution; None: it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Name the GPU, or the processor with the number of torch's threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def driver_version(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def commit() -> str | None:
    """Find the commit, with ``-dirty`` where files that git tracks differ from it; None outside a checkout."""
    if given := os.environ.get(COMMIT_ENVIRONMENT):
        return given[:10] if re.fullmatch("[0-9a-f]{40}", given) else given
    try:
        _git("ls-files", "--error-unmatch", "__init__.py")  # fails where the checkout is another project's
        head = _git("rev-parse", "--short=10", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    # Without optional locks `git status` does not write the index, which another process may be using.
    command = ["git", "--no-optional-locks", "-C", str(HERE), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def report() -> str:
    """Write the whole report, a fact a line."""
    versions = {
        "python": f"{platform.python_version()}, {platform.platform()}",
        "torch": str(torch.__version__),
        DISTRIBUTION: distribution_version(),
        "triton": version_of("triton") or "not installed",
    }
    sections = {
        "versions": versions.items(),
        "kernel backends": _backends(),
        "compiled CPU library": _library("cpu"),
        "compiled CUDA library": _library("cuda"),
        "devices": _devices(),
        "process groups": _process_groups(),
    }
    lines = []
    for title, facts in sections.items():
        lines += [title, *(f"  {name:<16} {fact}" for name, fact in facts)]
    return "\n".join(lines)


def _backends() -> Iterator[tuple[str, str]]:
    """List for each device type of this machine the backends by preference, then those that can't run and why."""
    for device in ["cpu"] + ["cuda"] * torch.cuda.is_available():
        first, *others = zero_kernels.available_backends(device)
        yield f"on {device} tensors", f"{first}" + (f" (also {', '.join(others)})" if others else "")
        for name, reason in dispatch.unusable_backends(device).items():
            yield "", f"not {name}: {reason}"
    if forced := os.environ.get(dispatch.ENVIRONMENT):
        yield "forced", f"{forced}, by {dispatch.ENVIRONMENT}"


def _library(name: str) -> Iterator[tuple[str, str]]:
    status = compiled.status(name)
    yield "file", status.path or "not there"
    if status.load_error:
        yield "not in use", status.load_error
    if status.isas:
        yield "instruction set", f"{status.isa} in use, of {', '.join(status.isas)}"
    if status.archs:
        yield "architectures", status.archs
    if status.build_error:
        yield "not built", status.build_error.strip().replace("\n", "\n" + " " * 19)


def _devices() -> Iterator[tuple[str, str]]:
    capability = torch.backends.cpu.get_cpu_capability()
    yield "cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads in torch, {capability}"
    own, ranks = own_cores(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # as many ranks as torchrun has started here
    quota = "no limit of its cgroup" if own.quota is None else f"{own.quota:g} granted by its cgroup"
    yield (
        "updates on it",
        f'{threads_of(0, [own] * ranks)} threads a rank, with {ranks} here, for state_offload="cpu": '
        f"{len(own.mask)} cores in the affinity mask, {quota}",
    )
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {capability}"
    if not torch.cuda.is_available():
        yield "cuda", "none" if torch.version.cuda else "none; this torch is built without CUDA"


def _process_groups() -> Iterator[tuple[str, str]]:
    if not dist.is_available():
        yield "", "torch.distributed is not in this torch: one rank alone"
        return
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    for (name, there), tensors in zip(backends.items(), ("CPU", "CUDA"), strict=True):
        yield name, f"{'available' if there else 'not in this torch'} ({tensors} tensors)"
