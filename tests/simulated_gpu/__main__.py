"""``make race-check``: the order of all that the optimizer launches, on simulated GPUs.

Three parts: order programs, two of each kind; seeded faults, each of which must be noticed; and existing tests.
``--only programs faults tests`` chooses. It ends within SECONDS: what is left by then is listed as not run. The exit
code is 1 where something is found, or not run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from harness import RankFailure, run_ranks  # noqa: E402
from order_programs import OrderProgram, few_programs, train_all, wrong  # noqa: E402

from simulated_gpu.build import Unavailable, library  # noqa: E402
from simulated_gpu.faults import FAULTS, PROGRAM_SECONDS, Fault, check  # noqa: E402
from simulated_gpu.switch import LATE, ON_GPU_1, VARIABLE  # noqa: E402

AT_ONCE = 8  # programs in a call of ranks
SECONDS = 570
CALL_SECONDS, FILE_SECONDS = 120, 200
_BEGIN = time.monotonic()
BITS = "face/test_bits_of_topologies.py::test_every_cell_equals_the_oracle_bit_for_bit"
TESTS_RUN = (
    "face/test_many_optimizers.py",
    "units/test_stage3_parity.py",
    "face/test_grids.py",  # replicas of shards
    *(f"{BITS}[{name}-0]" for name in ("tensor parallel", "plain slices", "experts beside replicas of shards")),
    "rules/test_muon_stage3.py::test_it_has_the_bits_of_stage_2",  # the only one here with an all-to-all
    "rules/test_muon_replicas.py",
)
"""Tests that run on the simulated GPU, too: of these files, those of ``make test``."""


def check_programs(call: tuple[str, Sequence[OrderProgram]], seconds: float) -> str:
    simulated, programs = call
    by_rank = run_ranks(2, train_all, programs, simulated=simulated, timeout=min(seconds, CALL_SECONDS))
    return "\n".join(wrong(by_rank, programs))


def check_fault(fault: Fault, seconds: float) -> str:
    return "" if check(fault, min(seconds, PROGRAM_SECONDS)) else f"missed: {fault.name} ({fault.program})"


def check_tests(name: str, seconds: float) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", f"tests/{name}"]
    environment, limit = {**os.environ, VARIABLE: LATE}, min(seconds, FILE_SECONDS)
    done = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=limit)
    return done.stdout[-8000:] + done.stderr[-2000:] if done.returncode else ""


PROGRAMS = few_programs(each=2)  # of each kind on one and on two streams, or at another stage
CALLS = [(LATE, PROGRAMS[first : first + AT_ONCE]) for first in range(0, len(PROGRAMS), AT_ONCE)]
CALLS += [(ON_GPU_1, PROGRAMS[:: 2 * AT_ONCE])]
PARTS: Mapping[str, tuple[Callable[[Any, float], str], Mapping[str, Any]]] = {
    "programs": (check_programs, {f"{some[0].what} to {some[-1].what}, {name}": (name, some) for name, some in CALLS}),
    "faults": (check_fault, {fault.name: fault for fault in FAULTS}),
    "tests": (check_tests, {name: name for name in TESTS_RUN}),
}
"""By name: a function that returns what is wrong, given a thing to check and the seconds that are left; all things."""


def run_part(part: str) -> list[str]:
    """Print a line for each check; return what is found, or not run."""
    check_one, things = PARTS[part]
    found = []
    for number, (name, thing) in enumerate(things.items(), 1):
        begin = time.monotonic()
        left = SECONDS - (begin - _BEGIN)
        try:
            text = check_one(thing, left) if left > 0 else "not run"
        except (RankFailure, subprocess.TimeoutExpired) as failure:
            text = str(failure)
        found += [f"{part}: {name}: {text}"] if text else []
        result = "FOUND" if text else "ok"
        print(f"{time.monotonic() - begin:5.1f} s  {part} {number} of {len(things)}: {result}: {name}", flush=True)
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
