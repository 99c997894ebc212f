"""Makes a failing program short: what can be left out is, as long as it is legal and fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from programs.family import Failure, Family
from programs.run import run_alone

SECONDS = 150.0  # for one failure: a program that hangs costs its time-out at each attempt
HANGS_AFTER = 2.0
STANDSTILL = 15.0  # until the optimizer has noticed itself that ranks wait for each other
ATTEMPTS = 3  # to see it again


def shrink(family: Family, failure: Failure, seconds: float = SECONDS) -> Failure:
    """The shortest program found that fails in the same way (alone: else the failure as it was)."""
    end = time.monotonic() + seconds
    again = (run_alone(family, failure.program) for _ in range(ATTEMPTS))
    best = next((found for found in again if found), None)
    if best is None:
        return failure if failure.kind == "in company" else replace(failure, kind=f"{failure.kind}, not alone")

    best = _shortest(best, family, end)
    if best.kind == "hangs" and (patient := run_alone(family, best.program, STANDSTILL)):
        best = replace(best, message=f"{best.message}\nlater: {patient.kind}: {patient.message}")
    return best


def _shortest(best: Failure, family: Family, end: float) -> Failure:
    """Go on to a smaller program that fails in the same way, until there is none, or until the time ``end``."""
    tried = {repr(best.program)}
    shorter = True
    while shorter:
        shorter = False
        for candidate in family.smaller(best.program):
            if time.monotonic() > end:
                return best
            if repr(candidate) in tried:
                continue
            tried.add(repr(candidate))
            again = run_alone(family, candidate, HANGS_AFTER) if family.why_not(candidate) is None else None
            if again and again.kind == best.kind:
                best, shorter = again, True
                break
    return best


# What is simpler than plain data, for ``Family.smaller``.


def cuts(items: Sequence[Any]) -> Iterator[Any]:
    """Without a half, a quarter, ... and each single one; the last go first."""
    size = (len(items) + 1) // 2
    while size >= 1:
        for start in range(len(items) - size, -1, -1 if size == 1 else -size):
            yield items[:start] + items[start + size :]
        size //= 2


def put(items: Sequence[Any], index: int, item: Any) -> Any:
    """With another entry."""
    other = [*items[:index], item, *items[index + 1 :]]
    return tuple(other) if isinstance(items, tuple) else other


def simpler(value: Any, needed: Collection[str] = ()) -> Iterator[Any]:
    """Without entries of sequences, with fields at their defaults; and what is simpler within. Fields of the names in
    ``needed`` stay, and so does what is in them."""
    if is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            if field.name in needed:
                continue
            now = getattr(value, field.name)
            if field.default is not MISSING and now != field.default:
                yield replace(value, **{field.name: field.default})
            for less in simpler(now, needed):
                yield replace(value, **{field.name: less})
    elif isinstance(value, tuple | list):
        yield from cuts(value)
        for index, item in enumerate(value):
            for less in simpler(item, needed):
                yield put(value, index, less)
