"""``python -m random_programs --seconds 600``: random programs until the time is over, others each time."""

from __future__ import annotations

import argparse
import itertools
import random
import time
from functools import partial
from typing import Any

import torch
from harness import close_pool

from random_programs import checkpoints, draw_checkpoints, draw_models, draw_optimizers, models, run
from random_programs.draw import check_drawn, programs

KINDS = {  # what draws programs, and what checks one
    "models": (programs(draw_models.program), partial(run.check, judge=models.verdict)),
    "checkpoints": (programs(draw_checkpoints.program), checkpoints.check),
    **{name: (programs(draw_optimizers.program, of), run.check) for name, of in draw_optimizers.FLAVOURS.items()},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_programs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, help="of the first programs; default: another one each time")
    parser.add_argument("--kind", choices=KINDS, action="append", help="several times for several; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = random.randrange(10**6) if options.seed is None else options.seed
    end, count, failures = time.monotonic() + options.seconds, 0, 0

    def timely(check: Any, made: Any) -> None:
        nonlocal count
        if time.monotonic() < end:
            count += 1
            check(made)

    for seed, kind in enumerate(itertools.cycle(options.kind or KINDS), first):
        if time.monotonic() >= end:
            break
        drawn, check = KINDS[kind]
        try:
            check_drawn(drawn, partial(timely, check), seed)
        except AssertionError as failure:
            failures += 1
            print(f"{kind}, seed {seed}, after {count} programs:\n{failure}\n", flush=True)
        if seed % 20 == 0:
            print(f"{count} programs, {failures} failures; seed {seed} was the last", flush=True)
    print(f"{count} programs, {failures} failures")
    close_pool()
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
