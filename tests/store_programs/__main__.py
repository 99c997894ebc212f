"""``python -m store_programs --seconds 600``: random programs until the time is over; ``--program FILE``: one again."""

from __future__ import annotations

import argparse
import contextlib
import json
import pprint
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from harness import RankFailure, close_pool, run_ranks

from store_programs.generate import Program, generate
from store_programs.law import BROKEN, Verdict, judge_all
from store_programs.shrink import shrink

KNOWN: Counter[str] = Counter()  # failures by kind: one that has been made small often enough is only counted


def run(programs: list[Program], plain: bool = False, timeout: float = 400) -> tuple[list[list[Verdict]], str]:
    """Verdicts by program and rank, of those that ran; and, where ranks died or hung, what the harness says."""
    world = programs[0]["world"]
    with tempfile.TemporaryDirectory(prefix="stores-") as folder:
        try:
            by_rank = run_ranks(world, judge_all, programs, folder, plain, timeout=timeout, one_order=False)
            return list(zip(*by_rank, strict=False)), ""
        except RankFailure as failure:
            reached = 0
            with contextlib.suppress(OSError, ValueError):
                reached = int(Path(folder, "at-0").read_text())
            return [[]] * reached, str(failure)


def failure_of(program: Program, plain: bool = False) -> str:
    """What is wrong with a program; empty where nothing is, or where it is as wrong without a store."""
    verdicts, broken = run([program], plain, timeout=60)
    said = f"{BROKEN}: {broken}" if broken else told(verdicts[0])
    if BROKEN in said and program["runs"]:
        alone, broken = run([program | {"runs": []}], timeout=60)
        return "" if broken or told(alone[0]) else said
    return said


def kind(failure: str) -> str:
    """By which two failures are one: shrinking keeps to it."""
    if BROKEN in failure:
        return "hung"
    if raised := re.search(r"it raised: \S+(?: \w+)?: (.{0,60})", failure):
        return f"raised {raised[1]}"
    return f"differs {'parameter' if 'parameters/' in failure else 'otherwise'}" if failure else ""


def told(ranks: list[Verdict]) -> str:
    return "\n".join(f"rank {rank}: {verdict.difference}" for rank, verdict in enumerate(ranks) if verdict.difference)


def report(name: str, program: Program, first: str, seconds: float, plain: bool) -> str:
    failure = failure_of(program, plain)
    if not failure:
        return f"{name}: failed once, and not again:\n{first[:6000]}\n{json.dumps(program)}\n"
    KNOWN[kind(failure)] += 1
    if KNOWN[kind(failure)] > 3 and kind(failure).startswith("raised"):
        return f"{name}: once more: {kind(failure)}\n"
    small = shrink(program, lambda p: kind(failure_of(p, plain)) == kind(failure), seconds)
    text = failure_of(small, plain)
    return f"{name}\n{text[:4000]}\n{pprint.pformat(small, width=110, sort_dicts=False)}\nJSON: {json.dumps(small)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="store_programs", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, action="append")
    parser.add_argument("--batch", type=int, default=20, help="programs in one process group")
    parser.add_argument("--plain", action="store_true", help="against torch.optim.AdamW, on one rank")
    parser.add_argument("--shrink-seconds", type=float, default=60)
    parser.add_argument("--out", type=Path, default=Path("store-failures.md"))
    parser.add_argument("--without", default="$^", help="a regular expression: programs to leave out, by their JSON")
    parser.add_argument("--program", type=Path, help="a file with the JSON of one program")
    options = parser.parse_args()
    try:
        if options.program:
            print(failure_of(json.loads(options.program.read_text()), options.plain) or "the law holds")
        else:
            search(options)
    finally:
        close_pool()


def search(options: Any) -> None:
    end, seed, counts = time.monotonic() + options.seconds, options.seed, Counter()
    worlds = [1] if options.plain else options.world or [2, 1, 2, 3]
    ended: Counter[str] = Counter()
    number = 0
    while time.monotonic() < end:
        world = worlds[number % len(worlds)]
        number += 1
        todo = [(s, generate(s, world, options.plain)) for s in range(seed, seed + options.batch)]
        todo = [(s, program) for s, program in todo if not re.search(options.without, json.dumps(program))]
        seed += options.batch
        while todo:
            verdicts, broken = run([program for _, program in todo], options.plain)
            for (name, _), ranks in zip(todo, verdicts, strict=False):
                counts["programs"] += 1
                counts.update({f"speculated {k}": n for v in ranks for k, n in v.speculated.items()})
                counts["ended early"] += any(v.ended for v in ranks)
                ended.update({f"seed {name} world {world}: {v.ended[:90]}" for v in ranks if v.ended})
            failed = bool(broken) or any(v.difference for v in verdicts[-1])
            at = len(verdicts) - (not broken)
            if failed and at < len(todo):
                name = f"seed {todo[at][0]} world {world}"
                first = broken or told(verdicts[-1])
                text = report(name, todo[at][1], first, options.shrink_seconds, options.plain)
                counts["failures"] += 1
                print(text, flush=True)
                with options.out.open("a") as out:
                    out.write(text + "\n")
            todo = todo[at + 1 :] if failed else []
        print(f"seed {seed}: {dict(counts)}", flush=True)
    for said, times in ended.most_common(40):
        print(times, said)


if __name__ == "__main__":
    main()
