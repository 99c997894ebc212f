"""``python -m random_programs --seconds 600``: random programs until the time is over, others each time."""

from __future__ import annotations

import argparse
import itertools
import random
import time

import torch
from harness import close_pool

from random_programs.draw import check_drawn, programs
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

    flavours = itertools.cycle(options.flavour or FLAVOURS)

    def timely(made: Program) -> None:
        nonlocal count
        if time.monotonic() < end:
            count += 1
            check(made)

    for seed, flavour in enumerate(flavours, first):
        if time.monotonic() >= end:
            break
        try:
            check_drawn(programs(program, FLAVOURS[flavour]), timely, seed)
        except AssertionError as failure:
            failures += 1
            print(f"{flavour}, seed {seed}:\n{failure}\n", flush=True)
        if seed % 20 == 0:
            print(f"{count} programs, {failures} failures; seed {seed} was the last", flush=True)
    print(f"{count} programs, {failures} failures")
    close_pool()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
