"""``make race-check``: the order of all that the optimizer launches, on simulated GPUs.

Three parts:

- the order programs, ``order_programs.all_programs``;
- tests that exist, ``FILES``, as far as ``make test`` runs them: parity, gathers, stage 3, several optimizers, stores
  of state, random programs;
- seeded faults, each in the simulation that it names: copies of the package in which a wait is missing. Each must be
  noticed.

All programs and tests run in ``streams:never`` and in ``held``. ``streams:random`` and ``streams:always`` differ from
``streams:never`` in what a query of an event answers, and nothing else. So each of them has half.

``--only programs tests faults`` chooses; ``--simulations held`` does, too. The last line is the verdict, and the exit
code is 1 where something was found.
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
from simulated_gpu.switch import SIMULATIONS, VARIABLE  # noqa: E402

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

PYTEST = (sys.executable, "-m", "pytest", "-q")
PARTS = ("programs", "tests", "faults")
FILES = (
    "face/test_parity.py",
    "step/test_param_gather.py",
    "units/test_stage3_parity.py",
    "face/test_many_optimizers.py",
    "grads/test_grad_semantics.py",
    "face/test_between_calls.py",
    "stores/test_trajectories.py",
    "step/test_sleep.py",
    "fuzz",
)
SHARE = {"streams:random": slice(0, None, 2), "streams:always": slice(1, None, 2)}
_KNOWN = "fuzz/test_random_programs_of_the_face.py::test_what_once_went_wrong"
_DRAWN = "fuzz/test_random_programs_of_the_face.py::test_programs_do_what_the_model_says"
LEFT_OUT = {
    "step/test_param_gather.py::test_a_compiled_model_waits_at_its_door": "torch.compile cannot generate code "
    "for the simulated device",
    "units/test_stage3_parity.py::test_clipped_runs_are_within_two_ulps_of_stage_2": "it counts units in the "
    "last place, and the device has the reference kernels",
    f"{_KNOWN}[a raise before the first gradient, zero_grad]": "zero_grad asks another rank's host. In a simulation "
    "that waits in its backward, and on a GPU it does not",
    f"{_KNOWN}[stage 3 over a grid, a raise before the first unit on all ranks but one, zeroed in place]": "zero_grad "
    "asks another rank's host, which waits in its backward for the first leg of a reduction: see above",
    f"{_KNOWN}[two optimizers of stage 0, a raise in one, then a backward of the other on one rank]": "it reads what a "
    "raised backward has left in .grad at stage 0 before that is there, which the docs forbid on a GPU",
    **{
        f"{_KNOWN}[stage 3, {before}, then a step with a closure]": "one rank's gathers and reductions take turns, and "
        "another's do not, as it has no gradients or has come to the units in another order"
        for before in (
            "a raise in units of another order",
            "a raise before any unit of a backward without gradients",
            "gradients on one rank",
        )
    },
    "fuzz/test_random_programs_of_the_face.py::test_a_failure_is_made_short": "it forks ranks",
    f"{_DRAWN}[steps on three ranks, the others]": "one program raises before the first gradient, and then zeroes: "
    "see above",
    **{
        f"{_DRAWN}[stores on {ranks} ranks, the others]": "in one program a rank without gradients of a sharded model "
        "gathers before the others reduce, without a store as well"
        for ranks in ("two", "three")
    },
}
"""Tests of FILES that do not run here, and why."""


def check_programs(simulation: str) -> Iterator[tuple[int, list[str]]]:
    """How many programs have run, and what was found."""
    from harness import RankFailure, run_ranks
    from order_programs import WHAT, all_programs, programs_on_one_stream, wrong

    from simulated_gpu.programs import train_all

    chosen = programs_on_one_stream() if simulation == "held" else all_programs()
    for what in WHAT:
        programs = [program for program in chosen if program.what == what][SHARE.get(simulation, slice(None))]
        if not programs:
            continue
        try:
            by_rank = run_ranks(2, train_all, programs, simulated=simulation, timeout=300)
        except RankFailure as failure:
            yield len(programs), [f"{what}: {failure}"]
        else:
            yield len(programs), wrong(by_rank, programs)


def check_tests(simulation: str) -> Iterator[tuple[int, list[str]]]:
    """The same of tests that exist."""
    collect = [*PYTEST, "-m", "", "--collect-only", *(f"tests/{test}" for test in LEFT_OUT)]
    collected = subprocess.run(collect, cwd=TESTS.parent, capture_output=True, text=True)
    if collected.returncode:
        yield 0, [f"LEFT_OUT names a test that is not there:\n{collected.stdout}{collected.stderr}"]
        return
    command = [*PYTEST, "-n", "2", "--dist", "loadfile", "--tb=short"]
    command += ["-p", "no:cacheprovider", *(f"--deselect=tests/{test}" for test in LEFT_OUT)]
    done = subprocess.run(
        command + [f"tests/{name}" for name in FILES[SHARE.get(simulation, slice(None))]],
        cwd=TESTS.parent,
        env={**os.environ, VARIABLE: simulation},
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
