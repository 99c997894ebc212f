"""``make race-check``: the order of all that the optimizer launches, on simulated GPUs.

Three parts, under each simulation and with each answer to "has it arrived?":

- the order programs, ``order_programs.all_programs``;
- tests that exist: parity, gathers, stage 3, several optimizers, random programs;
- seeded faults: copies of the package in which one wait is missing. Each must be noticed.

``--only programs tests faults`` chooses; ``--simulations held:never`` does, too. The last line is the verdict, and the
exit code is 1 where something was found.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

PARTS = ("programs", "tests", "faults")
SIMULATIONS = tuple(f"{kind}:{arrival}" for kind in ("streams", "held") for arrival in ("never", "random", "always"))

FILES = (
    "distributed/test_parity.py",
    "distributed/test_param_gather.py",
    "distributed/test_stage3_parity.py",
    "distributed/test_many_optimizers.py",
    "distributed/test_grad_semantics.py",
    "distributed/test_between_calls.py",
    "distributed/test_random_programs.py",
    "fuzz",
)
LEFT_OUT = {
    "compiled": "torch.compile cannot generate code for the simulated device",
    "clipped_runs": "it counts units in the last place, and the device has the reference kernels",
    "in_vain": "ranks that wait for each other are found under gloo alone, where the host waits",
    "zero_grad]": "random program: zero_grad asks another rank's host, which waits in a simulation, and not on a GPU",
    "made_short": "it forks ranks",
    "alone]": "random program: it reads what a raised backward has left in .grad at stage 0 before that is there",
}
"""Tests of FILES, by a part of their names, and why they do not run here."""


def check_programs(simulation: str) -> Iterator[tuple[int, list[str]]]:
    """How many programs have run, and what was found."""
    from harness import RankFailure, run_ranks
    from order_programs import WHAT, all_programs, check

    from simulated_gpu.test_order_programs import train_all

    chosen = all_programs()
    if simulation.startswith("held"):
        chosen = list(dict.fromkeys(program.on_one_stream for program in chosen))
    for what in WHAT:
        programs = [program for program in chosen if program.what == what]
        try:
            by_rank = run_ranks(2, train_all, programs, simulated=simulation, timeout=300)
        except RankFailure as failure:
            yield len(programs), [f"{what}: {failure}"]
        else:
            found = [check(of, program) for program, of in zip(programs, zip(*by_rank, strict=True), strict=True)]
            yield len(programs), [text for text in found if text]


def check_tests(simulation: str) -> Iterator[tuple[int, list[str]]]:
    """The same of tests that exist."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-k", " and ".join(f"not {part}" for part in LEFT_OUT)]
    done = subprocess.run(
        command + [str(TESTS / name) for name in FILES],
        cwd=TESTS.parent,
        env={**os.environ, "SIMULATED_GPU": simulation},
        capture_output=True,
        text=True,
    )
    ran = sum(int(number) for number in re.findall(r"(\d+) (?:passed|failed|error)", done.stdout))
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode:
        found.append(done.stdout[-8000:] + done.stderr[-2000:])
    yield ran, found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="race-check", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--simulations", nargs="+", choices=SIMULATIONS, default=SIMULATIONS)
    options = parser.parse_args(given)
    ran, found = 0, []
    for simulation in options.simulations:
        for part, check in (("programs", check_programs), ("tests", check_tests)):
            if part in options.only:
                begin, count, wrong = time.monotonic(), 0, []
                for number, texts in check(simulation):
                    count, wrong = count + number, wrong + texts
                ran, found = ran + count, found + wrong
                took = time.monotonic() - begin
                print(f"{simulation:<15} {part}: {count} ran, {len(wrong)} found, {took:.0f} s", flush=True)
                print("".join(f"    {text}\n" for text in wrong), end="", flush=True)
    caught, seeded = 0, 0
    if "faults" in options.only:
        from simulated_gpu.fault_check import check_faults

        caught, seeded, wrong = check_faults(())
        found += wrong
    print(f"race-check: {ran} programs, {len(found)} races; {caught} of {seeded} seeded faults caught")
    return 1 if found or caught < seeded else 0


if __name__ == "__main__":
    sys.exit(main())
