"""``python -m fuzz --seconds 600 --seed 0``: random programs until the time is over."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from harness import close_pool

from fuzz import law, oracle
from fuzz.execute import Failure, run_batch
from fuzz.generate import FLAVOURS, program
from fuzz.program import Program
from fuzz.script import stand_alone
from fuzz.shrink import SECONDS, shrink


def report(failure: Failure, name: str) -> str:
    """What to read of a failure, and what to paste."""
    found = f"{name} {failure.kind}: {failure.message}"
    return f"{found}\n\n{failure.program!r}\n\n{stand_alone(failure.program, found)}"


def batches(seed: int, flavours: list[str], size: int) -> Iterator[list[tuple[str, Program]]]:
    """Programs of one world size each, by the names that make them again."""
    by_world: dict[int, list[tuple[str, Program]]] = {2: [], 3: []}
    for number in itertools.count():
        flavour = flavours[number % len(flavours)]
        made = program(seed * 1_000_000 + number, FLAVOURS[flavour])
        waiting = by_world[made.world]
        waiting.append((f"{flavour} {seed * 1_000_000 + number}", made))
        if len(waiting) == size:
            yield list(waiting)
            waiting.clear()


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--flavour", choices=FLAVOURS, action="append", help="several times for several; else all but straight"
    )
    parser.add_argument("--batch", type=int, default=20, help="programs in one process group")
    parser.add_argument("--failures", type=int, default=1000, help="stop after so many")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--no-kinds", action="store_true", help="do not check what .grad is")
    parser.add_argument("--narrow", action="append", default=[], help="a switch of fuzz.law to turn off")
    parser.add_argument("--shrink-seconds", type=float, default=SECONDS, help="for one failure")
    parser.add_argument("--out", type=Path, help="a file for the failures")
    options = parser.parse_args()

    torch.set_num_threads(1)
    oracle.KINDS = not options.no_kinds
    for switch in options.narrow:
        if not getattr(law, switch):
            parser.error(f"{switch} is off")
        setattr(law, switch, False)
    shown: set[Program] = set()
    end = time.monotonic() + options.seconds
    programs = failures = 0
    for batch in batches(
        options.seed, options.flavour or [name for name in FLAVOURS if name != "straight"], options.batch
    ):
        if time.monotonic() >= end or failures >= options.failures:
            break
        names = {made: name for name, made in batch}
        for failure in run_batch([made for _, made in batch]):
            failures += 1
            name = names[failure.program]
            short = failure if options.no_shrink else shrink(failure, options.shrink_seconds)
            if short.program in shown:
                print(f"{name} {short.kind}: as before\n", flush=True)
                continue
            shown.add(short.program)
            text = report(short, name)
            print(f"{name} {short.kind}: {short.message}\n{short.program!r}\n", flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(f"{text}\n{'#' * 100}\n")
        programs += len(batch)
        if programs % 200 == 0:
            print(f"fuzz: {programs} programs so far, {failures} failures", flush=True)
    print(f"fuzz: {programs} programs, {failures} failures")
    close_pool()


if __name__ == "__main__":
    main()
