"""Count the threads of an update on the host: the cores of this rank, split with the ranks of its machine.

torchrun sets OMP_NUM_THREADS=1, so torch computes with one thread a rank unless that is set. An update of
gigabytes on one core of a large machine takes many times longer than it need (seen elsewhere: 80 times).
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_MEMBERSHIP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cores:
    """The processors that a process may use: the machine that it is on, the cores of its affinity mask, and the cores'
    worth of time that its cgroup grants (None: no limit)."""

    machine: str
    mask: frozenset[int]
    quota: float | None


def own_cores() -> Cores:
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return Cores(socket.gethostname(), frozenset(mask), min(_quotas(), default=None))


def _quotas() -> Iterator[float]:
    """Read the quotas of this process's own cgroup and of all that contain it."""
    try:
        lines = _MEMBERSHIP.read_text(errors="replace").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:  # "0::/a/b" of version 2, "4:cpu,cpuacct:/a/b" of version 1
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        # A folder of version 1 is named by its controllers, in any order, and each has a link to it. In a container the
        # path may be the host's: the container's own group is then the root.
        root, inner = _CGROUPS / ("" if number == "0" else "cpu"), Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # of version 2: "max 100000", or "150000 100000"
                granted, period = (root / group / "cpu.max").read_text().split()
                yield int(granted) / int(period)
            with suppress(OSError, ValueError):
                granted, period = ((root / group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                if int(granted) > 0:  # -1: no limit
                    yield int(granted) / int(period)


def threads_of(rank: int, world: Sequence[Cores]) -> int:
    """Count this rank's threads, at least 1. A core in the masks of several ranks, and the quota of a machine, are
    split evenly over these ranks.

    ``world``: what each rank may use, by rank.
    """
    own = world[rank]
    beside = [cores for cores in world if cores.machine == own.machine]
    threads = sum(1 / sum(core in cores.mask for cores in beside) for core in own.mask)
    if own.quota is not None:
        threads = min(threads, own.quota / len(beside))
    return max(1, int(threads + 1e-6))


def warn_of_one_thread(threads: int, cores: Cores) -> None:
    """Warn where the machine has many more cores than this rank may use."""
    there = os.cpu_count() or 1
    if threads == 1 and there >= 8:
        why = f"its affinity mask has {len(cores.mask)} of them"
        why += f" and its cgroup grants {cores.quota:g}" if cores.quota is not None else ""
        warnings.warn(
            f"state_offload='cpu' updates on 1 thread, on a machine of {there} cores: {why}, for all ranks of "
            "the machine. Give the ranks more cores (taskset, --cpus-per-task, --cpu-bind, docker --cpus)",
            stacklevel=2,
        )


@contextmanager
def host_threads(count: int) -> Iterator[None]:
    """Let torch's ops use ``count`` threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
