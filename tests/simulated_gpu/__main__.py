"""``make race-check``: the order of all that the optimizer launches, on simulated GPUs.

Three parts: order programs, two of each kind; seeded faults, each of which must be noticed; and existing tests.
``--only programs faults tests`` chooses. It ends within SECONDS: what is left by then is listed
as not run. The exit code is 1 where something is found, or not run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from harness import RankFailure, run_ranks  # noqa: E402
from order_programs import OrderProgram, few_programs, train_all, wrong  # noqa: E402

from simulated_gpu.build import Unavailable, library  # noqa: E402
from simulated_gpu.faults import FAULTS, PROGRAM_SECONDS, Fault, check  # noqa: E402
from simulated_gpu.switch import LATE, ON_GPU_1, VARIABLE  # noqa: E402

Check = Callable[[float], str]
"""Given the seconds that are left, returns what is wrong. Empty: nothing."""

AT_ONCE = 8  # programs in a call of ranks
SECONDS = 570
CALL_SECONDS, FILE_SECONDS = 120, 200
_BEGIN = time.monotonic()
TESTS_RUN = (
    "step/test_param_gather.py",
    "face/test_many_optimizers.py",
    "units/test_stage3_parity.py",
)
"""Files whose tests, those of ``make test``, run on the simulated GPU."""
DESELECTED = (
    # torch.compile cannot generate code for the simulated device.
    "step/test_param_gather.py::test_a_compiled_model_waits_at_its_door",
    # It asks for NumPy arrays.
    "step/test_param_gather.py::test_whoever_reads_waits",
    # It knows that its tensors are on the CPU.
    "step/test_param_gather.py::test_what_reads_no_value_leaves_gathers_under_way",
    # Threads read while another one launches gathers, and the simulation has no order between threads.
    "step/test_param_gather.py::test_other_threads_may_read",
)


def check_programs() -> Iterator[tuple[str, Check]]:
    """Two programs of each kind: on one and on two streams, or at another stage."""
    programs = few_programs(each=2)
    calls = [(LATE, programs[first : first + AT_ONCE]) for first in range(0, len(programs), AT_ONCE)]
    for simulated, some in [*calls, (ON_GPU_1, programs[:: 2 * AT_ONCE])]:
        yield f"{some[0].what} to {some[-1].what}, {simulated}", partial(_check_call, simulated, some)


def _check_call(simulated: str, programs: Sequence[OrderProgram], seconds: float) -> str:
    try:
        by_rank = run_ranks(2, train_all, programs, simulated=simulated, timeout=min(seconds, CALL_SECONDS))
        return "\n".join(wrong(by_rank, programs))
    except RankFailure as failure:
        return str(failure)


def check_tests() -> Iterator[tuple[str, Check]]:
    for name in TESTS_RUN:
        yield name, partial(_check_file, name)


def _check_file(name: str, seconds: float) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"tests/{name}"]
    command += [f"--deselect=tests/{test}" for test in DESELECTED]
    environment, limit = {**os.environ, VARIABLE: LATE}, min(seconds, FILE_SECONDS)
    try:
        done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"{name} has not ended within {limit:.0f} s"
    return done.stdout[-8000:] + done.stderr[-2000:] if done.returncode else ""


def check_faults() -> Iterator[tuple[str, Check]]:
    for fault in FAULTS:
        yield fault.name, partial(_check_fault, fault)


def _check_fault(fault: Fault, seconds: float) -> str:
    try:
        return "" if check(fault, min(seconds, PROGRAM_SECONDS)) else f"missed: {fault.name} ({fault.program})"
    except RankFailure as failure:
        return f"not shown as expected: {fault.name} ({fault.program}): {failure}"


PARTS = {"programs": check_programs, "faults": check_faults, "tests": check_tests}


def run_part(part: str) -> list[str]:
    """Print a line for each check; return what is found, or not run."""
    found, checks = [], [*PARTS[part]()]
    for number, (name, run) in enumerate(checks, 1):
        begin = time.monotonic()
        left = SECONDS - (begin - _BEGIN)
        text = run(left) if left > 0 else f"{part}: {name}: not run"
        found += [text] if text else []
        result = "FOUND" if text else "ok"
        print(f"{time.monotonic() - begin:5.1f} s  {part} {number} of {len(checks)}: {result}: {name}", flush=True)
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="race-check", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    chosen = parser.parse_args(given).only
    try:
        library()
    except Unavailable as missing:
        print(f"race-check: {missing}")
        return 1
    found = [text for part in chosen for text in run_part(part)]
    print("\n".join([*found, f"race-check: {', '.join(chosen)}: {len(found)} found"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
