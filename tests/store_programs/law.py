"""The law: a program with its stores gives what it gives with none, bit for bit."""

from __future__ import annotations

import json
import os
import pprint
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from guards import open_files_in
from programs.compare import bits, first_difference, short
from programs.family import Entries, Failure, Family, See
from programs.run import run_alone
from programs.shrink import cuts, put, simpler

from store_programs.execute import Machine, Trace
from store_programs.generate import Program

NONE: dict[str, Any] = {"state_offload": None}
NEEDED = (  # in any program that has them
    *("world", "op", "data", "micros", "name", "value", "max_norm"),
    *("stage", "how", "width", "dtypes", "lr", "state_offload"),
)


@dataclass
class Verdict:
    """What one rank found in one program: ``difference`` is empty where the law holds."""

    difference: str = ""
    ended: str = ""  # what the run without a store raised, if it raised
    speculated: Counter[str] = field(default_factory=Counter)


class Stores(Family):
    name = "store_programs"
    seconds = 20.0

    def world(self, program: Program) -> int:
        return program["world"]

    def run(self, program: Program, rank: int, folder: str, see: See) -> None:
        see(_judge(program, rank, folder, see))

    def verdict(self, program: Program, seen: Sequence[Entries]) -> str | None:
        found = [entries[-1][0].difference for entries in seen]
        return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(found) if text) or None

    def kind(self, outcome: str, message: str) -> str:
        if raised := re.search(r"it raised: \S+(?: \w+)?: (.{0,60})", message):
            return f"raised {raised[1]}"
        return (
            outcome if outcome != "differs" else f"differs {'parameter' if ': parameters' in message else 'otherwise'}"
        )

    def excused(self, failure: Failure) -> bool:
        """Where ranks hang or part, and it is as wrong without a store."""
        apart = failure.kind in ("raises", "hangs") and bool(failure.program["runs"])
        return apart and run_alone(self, failure.program | {"runs": []}) is not None

    def smaller(self, program: Program) -> Iterator[Program]:
        yield from (program | {"runs": [run]} for run in program["runs"] if len(program["runs"]) > 1)
        yield from (program | {"ops": ops} for ops in cuts(program["ops"]))
        for number, run in enumerate(program["runs"]):
            yield from (program | {"runs": put(program["runs"], number, [store])} for store in run if len(run) > 1)
        config = program["config"]
        if len(config["dtypes"]) > 3:
            yield program | {"config": config | {"dtypes": config["dtypes"][:-2] + config["dtypes"][-1:]}}
        yield from (program | {"config": less} for less in simpler(config, NEEDED))
        for number, op in enumerate(program["ops"]):
            yield from (program | {"ops": put(program["ops"], number, less)} for less in simpler(op, NEEDED))

    def script(self, program: Program, title: str) -> str:
        return f"{pprint.pformat(program, width=110, sort_dicts=False)}\nJSON: {json.dumps(program)}"


def compare(expected: Trace, got: Trace) -> str:
    for (label, value), (other_label, other) in zip(expected, got, strict=False):
        if label != other_label:
            return f"expected {label!r} ({short(value)}), got {other_label!r} ({short(other)})"
        if difference := first_difference(value, other, bits):
            return f"{label}: {difference}"
    if len(expected) != len(got):
        longer = expected if len(expected) > len(got) else got
        return f"one run has more to show: {longer[min(len(expected), len(got))][0]!r}"
    return ""


def _judge(program: Program, rank: int, folder: str, tick: Callable[[], None]) -> Verdict:
    """Collective, on the ranks of the program."""
    reference, expected = _run(program, rank, [NONE], folder, tick)
    verdict = Verdict(ended=getattr(reference, "message", ""))
    for number, stores in enumerate(program["runs"]):
        machine, got = _run(program, rank, stores, folder, tick)
        verdict.speculated.update(machine.speculated)
        difference = compare(expected, got) or _files_left(folder)
        if difference and not verdict.difference:
            said = getattr(machine, "message", "")
            verdict.difference = f"run {number} {stores}: {difference}" + (f"\n  it raised: {said}" if said else "")
        if _any(bool(difference)):
            break
    return verdict


def _run(
    program: Program, rank: int, stores: list[dict[str, Any]], folder: str, tick: Callable[[], None]
) -> tuple[Machine, Trace]:
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(f"{folder}/pages")
    _any(False)
    machine = Machine(program, rank, stores, folder, tick)
    trace = machine.run()
    _any(False)
    return machine, trace


def _files_left(folder: str) -> str:
    left = [str(path) for path in Path(folder, "pages").rglob("*") if path.is_file()] + open_files_in(f"{folder}/pages")
    return f"files are left after close: {left}" if left else ""


def _any(value: bool) -> bool:
    flag = torch.tensor([float(value)])
    if dist.is_initialized():
        dist.all_reduce(flag)
    return bool(flag.item())
