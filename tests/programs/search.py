"""Random programs of a family until a time is over: what ``python -m fuzz`` and its like do."""

from __future__ import annotations

import argparse
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import close_pool

from programs.family import Failure, Family
from programs.run import run_alone, run_batch
from programs.shrink import SECONDS, shrink

Named = tuple[str, Any]  # a program, and the name that makes it again


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """With the options that every family has."""
    made = argparse.ArgumentParser(prog=name, description=doc)
    made.add_argument("--seconds", type=float, default=600)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--batch", type=int, default=20, help="programs in one process group")
    made.add_argument("--failures", type=int, default=1000, help="stop after so many")
    made.add_argument("--no-shrink", action="store_true")
    made.add_argument("--shrink-seconds", type=float, default=SECONDS, help="for one failure")
    made.add_argument("--out", type=Path, help="a file for the failures")
    made.add_argument("--without", default="$^", help="a regular expression: programs to leave out, by their text")
    made.add_argument("--program", type=Path, help="a file with one program: run it alone, and no other")
    return made


def report(family: Family, failure: Failure, name: str) -> str:
    """What to read of a failure, and what to paste."""
    found = f"{name} {failure.kind}: {failure.message}"
    return f"{found}\n\n{failure.program!r}\n\n{family.script(failure.program, found)}"


def check_all(family: Family, programs: Sequence[Any], name: str, most: int = 1) -> None:
    """Raises AssertionError where a program does other than it should: with what to read of the first, made short."""
    failures = list(itertools.islice(run_batch(family, programs), most))
    if failures:
        close_pool()  # its processes are not needed to make them short
        raise AssertionError("\n\n".join(report(family, shrink(family, failure, 60), name) for failure in failures))


def search(family: Family, drawn: Iterator[Named], options: argparse.Namespace, read: Callable[[str], Any]) -> None:
    """``drawn``: programs without an end. ``read`` makes a program of its text."""
    torch.set_num_threads(1)
    try:
        if options.program:
            failure = run_alone(family, read(options.program.read_text()))
            print(report(family, failure, options.program.name) if failure else "it does what it should")
        else:
            _search(family, drawn, options)
    finally:
        close_pool()


def _search(family: Family, drawn: Iterator[Named], options: argparse.Namespace) -> None:
    shown: set[str] = set()
    end = time.monotonic() + options.seconds
    programs = failures = 0
    for batch in _batches(family, drawn, options.batch, options.without):
        if time.monotonic() >= end or failures >= options.failures:
            break
        names = {repr(made): name for name, made in batch}
        for failure in run_batch(family, [made for _, made in batch]):
            failures += 1
            name = names[repr(failure.program)]
            short = failure if options.no_shrink else shrink(family, failure, options.shrink_seconds)
            if repr(short.program) in shown:
                print(f"{name} {short.kind}: as before\n", flush=True)
                continue
            shown.add(repr(short.program))
            print(f"{name} {short.kind}: {short.message}\n{short.program!r}\n", flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(f"{report(family, short, name)}\n{'#' * 100}\n")
        programs += len(batch)
        if programs % 200 == 0:
            print(f"{family.name}: {programs} programs so far, {failures} failures", flush=True)
    print(f"{family.name}: {programs} programs, {failures} failures")


def _batches(family: Family, drawn: Iterator[Named], size: int, without: str) -> Iterator[list[Named]]:
    """Programs of the same world sizes each."""
    by_world: dict[tuple[int, ...], list[Named]] = {}
    for name, made in drawn:
        if re.search(without, str(made)):
            continue
        waiting = by_world.setdefault(tuple(map(family.world, family.jobs(made))), [])
        waiting.append((name, made))
        if len(waiting) == size:
            yield list(waiting)
            waiting.clear()
