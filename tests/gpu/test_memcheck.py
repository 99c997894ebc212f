"""No op reads or writes outside its tensors, and the threads of `grad_stats` do not race, as compute-sanitizer sees it.

The checker takes long to start, so all its runs start together, with the first test. On a CPU the script runs alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from places import KERNELS, ON_GPU

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("memcheck_ops.py")
SECONDS = 150
REFUSAL = re.compile(r"not supported|unable to|failed to (initialize|attach)|no attachable process", re.IGNORECASE)

PARTS = {"triton": 6}  # else two, that run at the same time: Triton compiles all of its kernels under the checker

# A run's name: the checker's tool, the backend, and which ops.
RUNS: dict[str, tuple[str, str, Sequence[str]]] = {
    **{
        f"memcheck {place.backend} {part}/{parts}": ("memcheck", place.backend, (f"{part}/{parts}",))
        for place in KERNELS
        for parts in (PARTS.get(place.backend, 2),)
        for part in range(1, parts + 1)
    },
    f"racecheck {KERNELS[0].backend}": ("racecheck", KERNELS[0].backend, ("grad_stats",)),
}
PLANTED = "memcheck out_of_bounds"
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}


@dataclass(frozen=True)
class Run:
    tool: str
    process: subprocess.Popen[bytes]
    log: Path

    def finish(self) -> tuple[int, str]:
        """Exit code and output. Skips the test where the checker refuses this machine, in its words."""
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not done after {SECONDS} s:\n{self.log.read_text()[-4000:]}")
        said = self.log.read_text()
        refusal = next((line for line in said.splitlines() if REFUSAL.search(line)), None)
        if ON_GPU and refusal and " calls" not in said:
            pytest.skip(f"compute-sanitizer --tool {self.tool}: {refusal.strip('= ')}")
        return code, said


def command(tool: str, backend: str, ops: Sequence[str]) -> list[str]:
    script = [sys.executable, str(SCRIPT), backend, "cuda" if ON_GPU else "cpu", *ops]
    # torch asks CUDA about host pointers and the like, and expects to be refused: that is no error of a kernel.
    checker = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no"]
    checker += ["--print-limit", "4"]
    return [*checker, *script] if ON_GPU else script


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    if ON_GPU and shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    folder = tmp_path_factory.mktemp("memcheck")
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = {}
    wanted = {**RUNS, PLANTED: ("memcheck", "triton", ("out_of_bounds",))} if ON_GPU else RUNS
    for number, (name, (tool, backend, ops)) in enumerate(wanted.items()):
        log = folder / f"{number}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command(tool, backend, ops), env=environment, stdout=out, stderr=subprocess.STDOUT
            )
        started[name] = Run(tool, process, log)
    yield started
    for run in started.values():
        run.process.kill()
        run.process.wait()


@pytest.mark.parametrize("name", RUNS)
def test_the_checker_finds_nothing(name: str, runs: dict[str, Run]) -> None:
    code, said = runs[name].finish()
    assert code == 0 and "\ndone\n" in said, said[:6000]
    assert not ON_GPU or CLEAN[runs[name].tool] in said, said[:6000]


@pytest.mark.skipif(not ON_GPU, reason="compute-sanitizer checks CUDA kernels")
def test_the_checker_finds_a_write_past_the_end(runs: dict[str, Run]) -> None:
    code, said = runs[PLANTED].finish()
    assert code != 0 and "Invalid __global__ write" in said, said[-6000:]
