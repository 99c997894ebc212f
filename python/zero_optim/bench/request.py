"""The flags of ``zero-optim bench``, and of the scripts of ``benchmarks/`` that measure what is not in the package."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..train.config import UsageError

OPS = ("adam_step", "pack", "grad_stats")
DTYPES = ("fp16", "bf16")


TAKEN_BY_OPS = {"numel": "64Mi; GPU: 2^20 to 2^30", "backends": "", "rounds": ""}


@dataclass(frozen=True)
class Single:
    """The choices of a run that measures one thing, with a file and a plot of its own.

    Attributes:
        taken: which of CHOICES, and what is chosen by default, in words.
        dtypes: which there are; the first is the default.
        every_dtype: the default is all of them, and several may be chosen.
        one_number: whether only one number of ranks may be chosen.
        fewest: ranks that may be chosen.
        gpu: whether it is measured on a GPU, too.
    """

    taken: Mapping[str, str]
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    every_dtype: bool = False
    one_number: bool = False
    fewest: int = 1
    gpu: bool = False


ALONE = {
    "step_overhead": Single(
        {"numel": "10 million", "rounds": "21", "ranks": "1 2"}, ("fp32", "bf16"), every_dtype=True
    ),
    "train_step": Single({"numel": "16Mi", "contenders": "all", "rounds": "21", "tokens": "256 512"}),
    "memory_walkthrough": Single({"ranks": "2; GPUs: all"}, one_number=True, gpu=True),
    "checkpoint": Single({"numel": "32Mi", "rounds": "5", "ranks": "2"}, ("fp32",)),
    "offload": Single(
        {"numel": "64Mi; GPU: 256Mi", "contenders": "all", "rounds": "11", "ranks": "2; GPUs: all"},
        ("bf16",),
        one_number=True,
        gpu=True,
    ),
}
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class Request:
    """A request: what to measure, and where to write it. None: what suits the device."""

    ops: tuple[str, ...] = OPS
    device: str | None = None
    dtypes: tuple[str, ...] = DTYPES
    numel: tuple[int, ...] | None = None
    backends: tuple[str, ...] | None = None
    contenders: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    rounds: int | None = None
    steps: int | None = None
    tokens: tuple[int, ...] | None = None
    threads: int | None = None
    out: Path | None = None
    write: bool = True
    redraw: Path | None = None


def parse_numel(text: str) -> int:
    """``1000000``, ``2^20``, ``2**20``, ``64Mi`` or ``1Gi``."""
    power = re.fullmatch(r"2(?:\^|\*\*)(\d{1,2})", text)
    count = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", text)
    numel = 2 ** int(power[1]) if power else int(count[1]) * _UNITS[count[2]] if count else 0
    if numel < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of elements; write 1000000, 2^20 or 64Mi")
    return numel


@dataclass(frozen=True)
class Menu:
    """The menu of a command line: ops, several in one run, and those that are measured alone.

    ``taken_by_ops``: which of CHOICES all ops take, and what is chosen by default, in words.
    """

    ops: tuple[str, ...] = ()
    taken_by_ops: Mapping[str, str] = field(default_factory=dict)
    alone: Mapping[str, Single] = field(default_factory=dict)

    def takers(self, choice: str) -> dict[str, str]:
        """Say who takes the flag, and what is chosen by default."""
        of_ops = dict.fromkeys(self.ops, self.taken_by_ops[choice]) if choice in self.taken_by_ops else {}
        return of_ops | {name: alone.taken[choice] for name, alone in self.alone.items() if choice in alone.taken}


PACKAGE = Menu(OPS, TAKEN_BY_OPS, ALONE)
ELSEWHERE = {"step": "gpt_step", **{name: name for name in ("stages", "scale", "endurance")}}
"""What scripts of a checkout measure: their ``benchmarks/bench_<name>.py``."""

CHOICES: dict[str, dict[str, Any]] = {
    "numel": {"nargs": "+", "type": parse_numel, "help": "elements, or parameters, as 1000000, 2^20 or 64Mi"},
    "backends": {"nargs": "+", "metavar": "NAME", "help": "kernel backends to measure (all but reference)"},
    "contenders": {"nargs": "+", "metavar": "NAME", "help": "who runs beside the baseline"},
    "ranks": {"nargs": "+", "type": int, "help": "how many ranks"},
    "rounds": {"type": int, "help": "timed rounds of each case (10 to 51, as 5 seconds allow)"},
    "steps": {"type": int, "help": "steps of each training"},
    "tokens": {"nargs": "+", "type": int, "help": "of a rank in a step, in windows of 64; on GPUs of 1024 (4096)"},
}
"""Flags that not everything takes, as argparse has them."""


def add_arguments(parser: argparse.ArgumentParser, menu: Menu = PACKAGE) -> None:
    """Adds the flags that something on the menu takes."""
    flag = parser.add_argument
    flag("--device", choices=("cpu", "cuda"), help="where to measure (cuda where torch sees a GPU)")
    flag(
        "--dtypes",
        nargs="+",
        choices=(*DTYPES, "fp32"),
        help="of gradients and parameters (fp16 bf16); of what is measured alone: "
        + ", ".join(
            f"{name} ({' '.join(alone.dtypes if alone.every_dtype else alone.dtypes[:1])})"
            for name, alone in menu.alone.items()
        ),
    )
    for name, words in CHOICES.items():
        if takers := menu.takers(name):
            by_default: dict[str, list[str]] = {}
            for taker, default in takers.items():
                by_default.setdefault(default, []).append(taker)
            of = "; ".join(", ".join(names) + f" ({default})" * bool(default) for default, names in by_default.items())
            flag(f"--{name}", **{"metavar": "N", **words, "help": f"{words['help']}; of {of}"})
    flag("--threads", type=int, metavar="N", help="torch's threads on the CPU (torch's own choice)")
    flag("--out", type=Path, metavar="DIR", help="where JSON and plot go (below benchmarks/results in a checkout)")
    flag("--no-write", action="store_true", help="print the table only")
    flag("--redraw", type=Path, metavar="FILE.json", help="measure nothing: show this file, and draw its plot again")


def add_choice_of_ops(parser: argparse.ArgumentParser) -> None:
    names = f"of {', '.join(OPS)} (all three); or alone one of {', '.join(ALONE)}"
    parser.add_argument("ops", nargs="*", metavar="OP", help=names)


def read_request(parsed: argparse.Namespace, menu: Menu = PACKAGE) -> Request:
    """The flags, checked as far as they can be without the device. Raises UsageError."""
    for op in parsed.ops:
        if op in ELSEWHERE and op not in menu.ops and op not in menu.alone:
            raise UsageError(f"{op} is not in the package: run benchmarks/bench_{ELSEWHERE[op]}.py of a checkout")
        if op not in (*menu.ops, *menu.alone):
            raise UsageError(f"there is no op {op!r} to measure; choose from {', '.join((*menu.ops, *menu.alone))}")
    chosen = {name: getattr(parsed, name, None) for name in CHOICES}
    dtypes = (
        _check_alone(parsed, chosen, menu) if set(parsed.ops) & set(menu.alone) else _check_ops(parsed, chosen, menu)
    )
    for name in ("rounds", "steps", "tokens", "threads", "ranks"):
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
        ops=tuple(dict.fromkeys(parsed.ops)) or OPS,
        device="cpu" if any(op in menu.alone and not menu.alone[op].gpu for op in parsed.ops) else parsed.device,
        dtypes=dtypes,
        threads=parsed.threads,
        out=parsed.out,
        write=not parsed.no_write,
        redraw=parsed.redraw,
        **choices,
    )


def _each_once(values: list[Any]) -> tuple[Any, ...]:
    """Names in the order in which they were given, numbers by size."""
    once = dict.fromkeys(values)
    return tuple(once if isinstance(values[0], str) else sorted(once))


def _check_taken(chosen: Mapping[str, Any], op: str, taken: Mapping[str, str], menu: Menu) -> None:
    """Raises UsageError for a flag that ``op`` has no use for."""
    for name, value in chosen.items():
        if value is not None and name not in taken:
            raise UsageError(f"--{name}: {op} does not take it; it is of {', '.join(menu.takers(name))}")


def _check_ops(parsed: argparse.Namespace, chosen: Mapping[str, Any], menu: Menu) -> tuple[str, ...]:
    """The dtypes of ordinary ops. Raises UsageError for what only a run alone can have."""
    _check_taken(chosen, (*parsed.ops, *OPS)[0], menu.taken_by_ops, menu)
    if "fp32" in (parsed.dtypes or ()):
        in_fp32 = (op for op, alone in menu.alone.items() if "fp32" in alone.dtypes)
        raise UsageError(f"--dtypes fp32: only {', '.join(in_fp32)} are measured in it")
    return tuple(dict.fromkeys(parsed.dtypes or DTYPES))


def _check_alone(parsed: argparse.Namespace, chosen: Mapping[str, Any], menu: Menu) -> tuple[str, ...]:
    """The dtypes of a run that measures one thing. Raises UsageError for what it cannot have."""
    op = next(op for op in parsed.ops if op in menu.alone)
    if set(parsed.ops) != {op}:
        raise UsageError(f"{op} is measured alone: leave out {', '.join(sorted(set(parsed.ops) - {op}))}")
    alone, ranks = menu.alone[op], set(chosen["ranks"] or ())
    dtypes = tuple(dict.fromkeys(parsed.dtypes or (alone.dtypes if alone.every_dtype else alone.dtypes[:1])))
    if not {*dtypes} <= {*alone.dtypes} or len(dtypes) > 1 and not alone.every_dtype:
        choice = (" and " if alone.every_dtype else " or ").join(alone.dtypes)
        raise UsageError(f"--dtypes {' '.join(dtypes)}: {op} is measured in {choice}")
    _check_taken(chosen, op, alone.taken, menu)
    for name, refused, why in (
        ("device cuda", parsed.device == "cuda" and not alone.gpu, "is measured on the CPU"),
        ("numel", len(set(chosen["numel"] or ())) > 1, "is measured at one size a run"),
        ("ranks", len(ranks) > 1 and alone.one_number, "is measured on one number of them a run"),
        ("ranks", 0 < min(ranks, default=0) < alone.fewest, f"is of {alone.fewest} at least"),
    ):
        if refused:
            raise UsageError(f"--{name}: {op} {why}")
    return dtypes
