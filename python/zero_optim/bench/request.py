"""The flags of ``zero-optim bench``."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..train.config import UsageError

OPS = ("adam_step", "pack", "grad_stats", "step")
DEFAULT_OPS = OPS[:3]
DTYPES = ("fp16", "bf16")


CHOICES = ("numel", "backends", "contenders", "ranks", "rounds", "steps", "tokens")  # flags that not every op takes
TAKEN_BY_OPS = frozenset(("numel", "backends", "rounds"))


@dataclass(frozen=True)
class Alone:
    """What can be chosen of a run that measures one thing, with a file and a plot of its own.

    Attributes:
        taken: which of CHOICES.
        dtypes: which there are; the first is the default.
        every_dtype: the default is all of them, and several may be chosen.
        ranks: the default numbers, in words; empty: there is no choice.
        one_number: whether only one number of ranks may be chosen.
        gpu: whether it is measured on a GPU, too.
    """

    taken: frozenset[str]
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    every_dtype: bool = False
    ranks: str = ""
    one_number: bool = False
    gpu: bool = False


def _taking(*names: str, **more: Any) -> Alone:
    return Alone(frozenset((*names, *(["ranks"] if "ranks" in more else []))), **more)


ALONE = {
    "step_overhead": _taking("numel", "rounds", dtypes=("fp32", "bf16"), every_dtype=True, ranks="1 2"),
    "train_step": _taking("numel", "contenders", "rounds", "tokens"),
    "stages": _taking("numel", "contenders", "rounds", "tokens", ranks="2 4; GPUs: all", gpu=True),
    "memory_walkthrough": _taking(ranks="2", one_number=True, gpu=True),
    "scale": _taking("rounds", dtypes=("bf16",), ranks="8 64 1024 16384"),
    "endurance": _taking("steps", dtypes=("fp32",), ranks="1 2"),
    "checkpoint": _taking("numel", "rounds", dtypes=("fp32",), ranks="2"),
    "offload": _taking("numel", "contenders", "rounds", dtypes=("bf16",), ranks="2", one_number=True, gpu=True),
}
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class Request:
    """What to measure, and where to. None: what suits the device."""

    ops: tuple[str, ...] = DEFAULT_OPS
    device: str | None = None
    dtypes: tuple[str, ...] = DTYPES
    numels: tuple[int, ...] | None = None
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``zero-optim bench``."""
    flag = parser.add_argument
    flag(
        "ops",
        nargs="*",
        metavar="OP",
        help=f"of {', '.join(OPS)} (the first three); or alone one of {', '.join(ALONE)}",
    )
    flag("--device", choices=("cpu", "cuda"), help="where to measure (cuda where torch sees a GPU)")
    flag(
        "--numel",
        nargs="+",
        type=parse_numel,
        metavar="N",
        help="elements, as 1000000, 2^20 or 64Mi (cuda: 2^20 to 2^30; cpu: 64Mi); of step and train_step: parameters "
        "(1e9; 16Mi); of stages and offload (256Mi; 16Mi, 64Mi); of step_overhead: 10 million",
    )
    flag(
        "--dtypes",
        nargs="+",
        choices=(*DTYPES, "fp32"),
        help="of gradients and parameters (fp16 bf16); of what trains on ranks bf16 or fp32 (bf16); of step_overhead "
        "(fp32 bf16)",
    )
    flag("--backends", nargs="+", metavar="NAME", help="kernel backends to measure (all but reference)")
    flag(
        "--contenders",
        nargs="+",
        metavar="NAME",
        help="of train_step, stages, offload: who runs beside the baseline (all)",
    )
    ranks = ", ".join(f"of {op} ({alone.ranks})" for op, alone in ALONE.items() if alone.ranks)
    flag("--ranks", nargs="+", type=int, metavar="N", help=ranks)
    flag("--rounds", type=int, metavar="N", help="timed rounds of each case (10 to 51, as 5 seconds allow)")
    flag("--steps", type=int, metavar="N", help="of endurance: steps of each training (100000)")
    flag(
        "--tokens",
        nargs="+",
        type=int,
        metavar="N",
        help="of train_step, stages: of a rank in a step, in windows of 64 (256 512); GPUs: of 1024 (4096)",
    )
    flag("--threads", type=int, metavar="N", help="torch's threads on the CPU (torch's own choice)")
    flag("--out", type=Path, metavar="DIR", help="where JSON and plot go (below benchmarks/results in a checkout)")
    flag("--no-write", action="store_true", help="print the table only")
    flag("--redraw", type=Path, metavar="FILE.json", help="measure nothing: show this file, and draw its plot again")


def read_request(parsed: argparse.Namespace) -> Request:
    """The flags, checked as far as they can be without the device. Raises UsageError."""
    for op in parsed.ops:
        if op not in (*OPS, *ALONE):
            raise UsageError(f"there is no op {op!r} to measure; choose from {', '.join((*OPS, *ALONE))}")
    dtypes = _check_alone(parsed) if set(parsed.ops) & set(ALONE) else _check_ops(parsed)
    for name in ("rounds", "steps", "tokens", "threads", "ranks"):
        values = getattr(parsed, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value}: at least 1")
    if parsed.redraw is not None and not parsed.redraw.is_file():
        raise UsageError(f"--redraw {parsed.redraw}: no such file")
    return Request(
        ops=tuple(dict.fromkeys(parsed.ops)) or DEFAULT_OPS,
        device="cpu" if any(op in ALONE and not ALONE[op].gpu for op in parsed.ops) else parsed.device,
        dtypes=dtypes,
        numels=tuple(sorted(set(parsed.numel))) if parsed.numel else None,
        backends=tuple(dict.fromkeys(parsed.backends)) if parsed.backends else None,
        contenders=tuple(dict.fromkeys(parsed.contenders)) if parsed.contenders else None,
        ranks=tuple(sorted(set(parsed.ranks))) if parsed.ranks else None,
        rounds=parsed.rounds,
        steps=parsed.steps,
        tokens=tuple(sorted(set(parsed.tokens))) if parsed.tokens else None,
        threads=parsed.threads,
        out=parsed.out,
        write=not parsed.no_write,
        redraw=parsed.redraw,
    )


def _check_taken(parsed: argparse.Namespace, op: str, taken: frozenset[str]) -> None:
    """Raises UsageError for a flag that ``op`` has no use for."""
    for name in CHOICES:
        if getattr(parsed, name) is not None and name not in taken:
            takers = [*(OPS if name in TAKEN_BY_OPS else ()), *(other for other in ALONE if name in ALONE[other].taken)]
            raise UsageError(f"--{name}: {op} does not take it; it is of {', '.join(takers)}")


def _check_ops(parsed: argparse.Namespace) -> tuple[str, ...]:
    """The dtypes of ordinary ops. Raises UsageError for what only a run alone can have."""
    _check_taken(parsed, (*parsed.ops, *DEFAULT_OPS)[0], TAKEN_BY_OPS)
    if "fp32" in (parsed.dtypes or ()):
        in_fp32 = (op for op, alone in ALONE.items() if "fp32" in alone.dtypes)
        raise UsageError(f"--dtypes fp32: only {', '.join(in_fp32)} are measured in it")
    return tuple(dict.fromkeys(parsed.dtypes or DTYPES))


def _check_alone(parsed: argparse.Namespace) -> tuple[str, ...]:
    """The dtypes of a run that measures one thing. Raises UsageError for what it cannot have."""
    op = next(op for op in parsed.ops if op in ALONE)
    if set(parsed.ops) != {op}:
        raise UsageError(f"{op} is measured alone: leave out {', '.join(sorted(set(parsed.ops) - {op}))}")
    alone, ranks = ALONE[op], set(parsed.ranks or ())
    dtypes = tuple(dict.fromkeys(parsed.dtypes or (alone.dtypes if alone.every_dtype else alone.dtypes[:1])))
    if not {*dtypes} <= {*alone.dtypes} or len(dtypes) > 1 and not alone.every_dtype:
        choice = (" and " if alone.every_dtype else " or ").join(alone.dtypes)
        raise UsageError(f"--dtypes {' '.join(dtypes)}: {op} is measured in {choice}")
    _check_taken(parsed, op, alone.taken)
    for name, refused, why in (
        ("device cuda", parsed.device == "cuda" and not alone.gpu, "is measured on the CPU"),
        ("numel", len(set(parsed.numel or ())) > 1, "is measured at one size a run"),
        ("ranks", len(ranks) > 1 and alone.one_number, "is measured on one number of them a run"),
        ("ranks", op == "scale" and 1 in ranks, "is of two at least"),
    ):
        if refused:
            raise UsageError(f"--{name}: {op} {why}")
    return dtypes
