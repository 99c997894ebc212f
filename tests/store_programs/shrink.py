"""Makes a failing program small: drops what it can do without, as long as it still fails."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

from store_programs.generate import Program

NEEDED = ("op", "data", "micros", "name", "value", "max_norm", "stage", "how", "width", "dtypes", "lr", "state_offload")


def candidates(program: Program) -> Iterator[Program]:
    """Smaller programs: the largest steps first."""
    runs, ops = program["runs"], program["ops"]
    if len(runs) > 1:
        yield from (program | {"runs": [run]} for run in runs)
    half = max(len(ops) // 2, 1)
    while half:
        yield from (program | {"ops": ops[:at] + ops[at + half :]} for at in range(0, len(ops), half))
        half //= 2
    for number in range(len(runs)):
        if len(runs[number]) > 1:
            yield from (program | {"runs": [[store]]} for store in runs[number])
    yield from _without_a_key(program, [])
    if len(program["config"]["dtypes"]) > 3:
        smaller = copy.deepcopy(program)
        smaller["config"]["dtypes"] = smaller["config"]["dtypes"][:-2] + smaller["config"]["dtypes"][-1:]
        yield smaller


def _without_a_key(program: Program, path: list[str | int]) -> Iterator[Program]:
    """Of the configuration, the stores and the operations: without one key, or without one entry of a list of these."""
    at = program
    for key in path:
        at = at[key]
    for key in list(at if isinstance(at, dict) else range(len(at))):
        if path == [] and key not in ("config", "runs", "ops"):
            continue
        smaller = copy.deepcopy(program)
        within = smaller
        for step in path:
            within = within[step]
        drops = path and path != ["runs"] and path != ["ops"] and key not in NEEDED and len(at) > (type(at) is list)
        if drops and not (isinstance(at, list) and not isinstance(at[key], dict)):
            del within[key]
            yield smaller
        if isinstance(at[key], (dict, list)):
            yield from _without_a_key(program, [*path, key])


def shrink(program: Program, still_fails: Callable[[Program], bool], seconds: float) -> Program:
    deadline = time.monotonic() + seconds
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            if time.monotonic() > deadline:
                return program
            if still_fails(candidate):
                program, smaller = candidate, True
                break
    return program
