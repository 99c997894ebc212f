"""``make race-check``: the order of all that the optimizer launches, on simulated GPUs.

Three parts: order programs, one of each kind and those that reveal faults; existing tests; and seeded faults, each of
which must be noticed. ``--only programs tests faults`` chooses. The exit code is 1 where something is found.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from harness import RankFailure, run_ranks  # noqa: E402
from order_programs import few_programs, train_all, wrong  # noqa: E402

from simulated_gpu.build import Unavailable, library  # noqa: E402
from simulated_gpu.faults import FAULTS, check  # noqa: E402
from simulated_gpu.switch import LATE, ON_GPU_1, VARIABLE  # noqa: E402

AT_ONCE = 8  # programs in a call of ranks
CALL_SECONDS = 60
TEST_SECONDS = 150
TESTS_RUN = (
    "step/test_param_gather.py",
    "face/test_many_optimizers.py",
    "units/test_stage3_parity.py",
)
"""Files whose tests, those of ``make test``, run on the simulated GPU."""
DESELECTED = (
    # torch.compile cannot generate code for the simulated device.
    "step/test_param_gather.py::test_a_compiled_model_waits_at_its_door",
    # It counts units in the last place, and the device has the reference kernels.
    "units/test_stage3_parity.py::test_clipped_runs_are_within_two_ulps_of_stage_2",
)


def check_programs() -> list[str]:
    """Runs two of each kind: on one and on two streams, or at another stage."""
    programs = few_programs(each=2)
    calls = [(LATE, programs[first : first + AT_ONCE]) for first in range(0, len(programs), AT_ONCE)]
    calls.append((ON_GPU_1, programs[::8]))
    found: list[str] = []
    for number, (simulated, some) in enumerate(calls, 1):
        begin = time.monotonic()
        try:
            found += wrong(run_ranks(2, train_all, some, simulated=simulated, timeout=CALL_SECONDS), some)
        except RankFailure as failure:
            found.append(str(failure))
        kinds = f"{some[0].what} ... {some[-1].what}"
        _report(f"programs {number} of {len(calls)}: {len(some)} of {simulated}, {kinds}", begin)
    return found


def check_tests() -> list[str]:
    found = []
    for number, name in enumerate(TESTS_RUN, 1):
        begin = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"tests/{name}"]
        command += [f"--deselect=tests/{test}" for test in DESELECTED]
        environment = {**os.environ, VARIABLE: LATE}
        try:
            done = subprocess.run(
                command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS
            )
        except subprocess.TimeoutExpired:
            found.append(f"{name} has not ended within {TEST_SECONDS} s")
        else:
            found += [f"{name}:\n{done.stdout[-8000:]}{done.stderr[-2000:]}"] if done.returncode else []
        _report(f"tests {number} of {len(TESTS_RUN)}: {name}", begin)
    return found


def check_faults() -> list[str]:
    found = []
    for number, fault in enumerate(FAULTS, 1):
        begin = time.monotonic()
        shown = check(fault)
        if not shown:
            found.append(f"a seeded fault is missed: {fault.name} ({fault.program})")
        _report(f"faults {number} of {len(FAULTS)}: {fault.name}: {shown[:100] or 'MISSED'}", begin)
    return found


PARTS: dict[str, Callable[[], list[str]]] = {"programs": check_programs, "tests": check_tests, "faults": check_faults}


def _report(text: str, begin: float) -> None:
    print(f"{time.monotonic() - begin:5.1f} s  {text}", flush=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="race-check", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    chosen = parser.parse_args(given).only
    try:
        library()
    except Unavailable as missing:
        print(f"race-check: {missing}")
        return 1
    found = [text for part in chosen for text in PARTS[part]()]
    print("\n".join([*found, f"race-check: {', '.join(chosen)}: {len(found)} found"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
