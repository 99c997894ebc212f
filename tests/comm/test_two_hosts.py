"""Two hosts, as network namespaces that a cable joins. The cable is cut in a step: both sides end within the time-out,
also the one that has lost the host of the job's store; and a new job goes on bit for bit. docs/multi-node.md has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("two_hosts_program.py")
ROOT = PROGRAM.parents[2]
ENDLESS = 10**6

pytestmark = pytest.mark.slow


class Hosts:
    """Two namespaces, ``0`` and ``1``, joined by a pair of interfaces."""

    def __init__(self) -> None:
        self.names = [f"zk-{os.getpid()}-{host}" for host in (0, 1)]
        self.jobs: list[subprocess.Popen[str]] = []

    def open(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        ends = [word for name, end in zip(self.names, ("left", "right"), strict=True) for word in (end, "netns", name)]
        _ip("link", "add", *ends[:3], "type", "veth", "peer", "name", *ends[3:])
        for host, end in enumerate(("left", "right")):
            _ip("-n", self.names[host], "addr", "add", f"10.77.0.{host + 1}/24", "dev", end)
            _ip("-n", self.names[host], "link", "set", "lo", "up")
        self.cable("up")

    def cable(self, state: str) -> None:
        for name, end in zip(self.names, ("left", "right"), strict=True):
            _ip("-n", name, "link", "set", end, state)

    def close(self) -> None:
        for job in self.jobs:
            job.kill()
            job.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, host: int, folder: Path, steps: int) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **{"RANK": str(host), "WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29400"},
            "GLOO_SOCKET_IFNAME": ("left", "right")[host],
            "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)]),
        }
        command = ["ip", "netns", "exec", self.names[host], sys.executable, str(PROGRAM), str(folder), str(steps)]
        self.jobs.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True))  # both are pipes
        return self.jobs[-1]

    def train(self, folder: Path, steps: int) -> list[list[str]]:
        """The lines of each host's output, of a job that ends well."""
        jobs = [self.start(host, folder, steps) for host in (0, 1)]
        outputs = [job.communicate(timeout=120) for job in jobs]
        assert [job.returncode for job in jobs] == [0, 0], outputs
        return [out.splitlines() for out, _ in outputs]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("there is no ip command: it makes network namespaces")
    made = Hosts()
    try:
        made.open()
    except subprocess.CalledProcessError as error:
        made.close()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield made
    made.close()


def test_a_cable_that_is_cut(hosts: Hosts, tmp_path: Path) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    jobs = [hosts.start(host, cut, ENDLESS) for host in (0, 1)]
    while (line := jobs[1].stdout.readline()) and line != "step 3\n":
        pass
    hosts.cable("down")
    for job in jobs:
        _, error = job.communicate(timeout=60)
        assert job.returncode == 1
        assert "CollectiveError: " in error and " did not complete: " in error, error
    hosts.cable("up")
    done = max(int(folder.name.removeprefix("step-")) for folder in cut.glob("step-*"))
    assert done >= 3
    resumed = hosts.train(cut, done + 4)
    assert [lines[0] for lines in resumed] == [f"from step {done}"] * 2
    assert [lines[-1] for lines in resumed] == [lines[-1] for lines in hosts.train(whole, done + 4)]
