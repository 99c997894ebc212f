"""``python -m random_programs --seconds 600``: random programs until the time is over, others each time."""

from __future__ import annotations

import argparse
import random
import time

import torch
from harness import close_pool
from hypothesis import HealthCheck, given, seed, settings

from random_programs.draw import AT_ONCE, programs
from random_programs.draw_optimizers import FLAVOURS, program
from random_programs.run import Program, check


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_programs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, help="of the first programs; default: another one each time")
    parser.add_argument("--flavour", choices=FLAVOURS, action="append", help="several times for several; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = random.randrange(10**6) if options.seed is None else options.seed
    end, count, failures = time.monotonic() + options.seconds, 0, 0

    for turn in range(10**6):
        flavour = (options.flavour or [*FLAVOURS])[turn % len(options.flavour or FLAVOURS)]

        @seed(first + turn)
        @settings(
            max_examples=AT_ONCE,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(programs(program, FLAVOURS[flavour]))
        def some(made: Program) -> None:
            nonlocal count
            if time.monotonic() < end:
                count += 1
                check(made)

        try:
            some()
        except AssertionError as failure:
            failures += 1
            print(f"{flavour}, seed {first + turn}:\n{failure}\n", flush=True)
        if time.monotonic() >= end:
            break
        print(f"{count} programs, {failures} failures (seed {first + turn}: {flavour})", flush=True)
    print(f"{count} programs, {failures} failures")
    close_pool()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
