"""The request that the flags of ``zero-optim bench`` make, and those of the scripts in ``benchmarks/``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_optim_cli.bench import DTYPES, FLAGS, OPS, PACKAGE, Choices, Menu, add_arguments, takers

from ..errors import UsageError

__all__ = ["DTYPES", "OPS", "PACKAGE", "Choices", "Menu", "Request", "add_arguments", "read_request"]

_SCRIPTS = ("stages", "topologies", "scale", "pages", "sleep", "endurance")
ELSEWHERE = {"step": "gpt_step", **{name: name for name in _SCRIPTS}}
"""Benchmarks in scripts of a checkout: by op, NAME of ``benchmarks/bench_NAME.py``."""


@dataclass(frozen=True)
class Request:
    """A request: what to measure, and where to write it. None: a default that suits benchmark and device."""

    ops: tuple[str, ...] = OPS
    device: str | None = None
    dtypes: tuple[str, ...] = DTYPES
    numel: tuple[int, ...] | None = None
    backends: tuple[str, ...] | None = None
    contenders: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    replicas: int | None = None
    rounds: int | None = None
    steps: int | None = None
    tokens: tuple[int, ...] | None = None
    threads: int | None = None
    out: Path | None = None
    write: bool = True
    redraw: Path | None = None


def read_request(parsed: argparse.Namespace, menu: Menu = PACKAGE) -> Request:
    """Read the flags, and check them as far as that needs no device. Raises UsageError."""
    for op in parsed.ops:
        if op in ELSEWHERE and op not in menu.choices:
            raise UsageError(f"{op} is not in the package: run benchmarks/bench_{ELSEWHERE[op]}.py of a checkout")
        if op not in menu.choices:
            raise UsageError(f"there is no op {op!r} to measure; choose from {', '.join(menu.choices)}")
    ops = tuple(dict.fromkeys(parsed.ops)) or menu.together
    op = next((op for op in ops if op not in menu.together), ops[0])
    if op not in menu.together and len(ops) > 1:
        raise UsageError(f"{op} is measured alone: leave out {', '.join(sorted({*ops} - {op}))}")
    chosen = {name: getattr(parsed, name, None) for name in FLAGS}
    dtypes = _check_choices(parsed, chosen, op, menu)
    for name in ("rounds", "steps", "tokens", "threads", "ranks", "replicas"):
        given = getattr(parsed, name, None)
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value}: at least 1")
    if parsed.redraw is not None and not parsed.redraw.is_file():
        raise UsageError(f"--redraw {parsed.redraw}: no such file")
    choices: dict[str, Any] = {
        name: _each_once(value) if isinstance(value, list) else value for name, value in chosen.items()
    }
    return Request(
        ops=ops,
        device=parsed.device if menu.choices[op].gpu else "cpu",
        dtypes=dtypes,
        threads=parsed.threads,
        out=parsed.out,
        write=not parsed.no_write,
        redraw=parsed.redraw,
        **choices,
    )


def _each_once(values: list[Any]) -> tuple[Any, ...]:
    """Drop repeated values: names keep the order in which they were given, numbers are sorted."""
    once = dict.fromkeys(values)
    return tuple(once if isinstance(values[0], str) else sorted(once))


def _check_choices(parsed: argparse.Namespace, chosen: Mapping[str, Any], op: str, menu: Menu) -> tuple[str, ...]:
    """Choose the dtypes of ``op``. Raises UsageError for a flag or value that it cannot have."""
    choices, ranks = menu.choices[op], set(chosen["ranks"] or ())
    dtypes = tuple(dict.fromkeys(parsed.dtypes or choices.default_dtypes))
    if not {*dtypes} <= {*choices.dtypes} or len(dtypes) > 1 and not choices.every_dtype:
        there = (" and " if choices.every_dtype else " or ").join(choices.dtypes)
        raise UsageError(f"--dtypes {' '.join(dtypes)}: {op} is measured in {there}")
    for name, value in chosen.items():
        if value is not None and name not in choices.taken:
            raise UsageError(f"--{name}: {op} does not take it; it is of {', '.join(takers(menu, name))}")
    for name, refused, why in (
        ("device cuda", parsed.device == "cuda" and not choices.gpu, "is measured on the CPU"),
        ("numel", len(set(chosen["numel"] or ())) > 1 and not choices.sizes, "is measured at one size a run"),
        ("ranks", len(ranks) > 1 and choices.one_number, "is measured on one number of them a run"),
        ("ranks", 0 < min(ranks, default=0) < choices.fewest, f"is of {choices.fewest} at least"),
    ):
        if refused:
            raise UsageError(f"--{name}: {op} {why}")
    return dtypes
