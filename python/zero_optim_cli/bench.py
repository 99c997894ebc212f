"""The flags of ``zero-optim bench``, and of the scripts in ``benchmarks/`` that measure more in a checkout."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

OPS = ("adam_step", "pack", "grad_stats")
DTYPES = ("fp16", "bf16")


@dataclass(frozen=True)
class Choices:
    """The choices that a user has for one benchmark.

    Attributes:
        taken: the names of FLAGS that it takes, each with its default in words.
        dtypes: its dtypes; the first is the default.
        every_dtype: the default is all dtypes, and several may be chosen.
        sizes: whether several sizes may be chosen.
        one_number: whether only one number of ranks may be chosen.
        fewest: the least number of ranks.
        gpu: whether it is measured on a GPU, too.
    """

    taken: Mapping[str, str]
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    every_dtype: bool = False
    sizes: bool = False
    one_number: bool = False
    fewest: int = 1
    gpu: bool = False

    @property
    def default_dtypes(self) -> tuple[str, ...]:
        return self.dtypes if self.every_dtype else self.dtypes[:1]


@dataclass(frozen=True)
class Menu:
    """The benchmarks of a command line, with the choices of each.

    ``together``: names of benchmarks that one run may measure. Each other one has a run, a file and a plot of its own.
    """

    choices: Mapping[str, Choices]
    together: tuple[str, ...] = ()


OF_OPS = Choices(
    {"numel": "64Mi; GPU: 2^20 to 2^30", "backends": "", "rounds": ""}, DTYPES, every_dtype=True, sizes=True, gpu=True
)
PACKAGE = Menu(
    {
        **dict.fromkeys(OPS, OF_OPS),
        "step_overhead": Choices(
            {"numel": "10 million", "rounds": "21", "ranks": "1 2"}, ("fp32", "bf16"), every_dtype=True
        ),
        "train_step": Choices({"numel": "16Mi", "contenders": "all", "rounds": "21", "tokens": "256 512"}),
        "memory_walkthrough": Choices({"ranks": "2; GPUs: all"}, one_number=True, gpu=True),
        "checkpoint": Choices({"numel": "32Mi", "rounds": "5", "ranks": "2"}, ("fp32",)),
        "offload": Choices(
            {"numel": "64Mi; GPU: 256Mi", "contenders": "all", "rounds": "11", "ranks": "2; GPUs: all"},
            ("bf16",),
            one_number=True,
            gpu=True,
        ),
    },
    together=OPS,
)
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_numel(text: str) -> int:
    """Read ``1000000``, ``1e6``, ``2^20``, ``2**20``, ``64Mi`` or ``1Gi``."""
    power = re.fullmatch(r"2(?:\^|\*\*)(\d{1,2})", text)
    count = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", text)
    decimal = re.fullmatch(r"\d+(\.\d+)?e\d{1,2}", text)
    numel = 2 ** int(power[1]) if power else int(count[1]) * _UNITS[count[2]] if count else 0
    if decimal and (exact := Decimal(text)) == int(exact):
        numel = int(exact)
    if numel < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of elements; write 1000000, 1e6, 2^20 or 64Mi")
    return numel


FLAGS: dict[str, dict[str, Any]] = {
    "numel": {"nargs": "+", "type": parse_numel, "help": "elements, or parameters, as 1000000, 1e6, 2^20 or 64Mi"},
    "backends": {"nargs": "+", "metavar": "NAME", "help": "kernel backends to measure (all but reference)"},
    "contenders": {"nargs": "+", "metavar": "NAME", "help": "who runs beside the baseline"},
    "ranks": {"nargs": "+", "type": int, "help": "how many ranks"},
    "replicas": {"type": int, "help": "of the ranks, how many hold each part of the state, as in a mesh"},
    "rounds": {"type": int, "help": "timed rounds of each case (10 to 51, as 5 seconds allow)"},
    "steps": {"type": int, "help": "steps of each training"},
    "tokens": {"nargs": "+", "type": int, "help": "of a rank in a step, in windows of 64; on GPUs of 1024 (4096)"},
}
"""Flags that only some benchmarks take, with their arguments for argparse."""


def add_arguments(parser: argparse.ArgumentParser, menu: Menu = PACKAGE) -> None:
    """Add the flags that some benchmark on the menu takes."""
    flag = parser.add_argument
    flag("--device", choices=("cpu", "cuda"), help="where to measure (cuda where torch sees a GPU)")
    dtypes = {name: " ".join(of.default_dtypes) for name, of in menu.choices.items()}
    about = f"of gradients and parameters; of {_by_default(dtypes)}"
    flag("--dtypes", nargs="+", choices=(*DTYPES, "fp32"), help=about)
    for name, words in FLAGS.items():
        if of := takers(menu, name):
            flag(f"--{name}", **{"metavar": "N", **words, "help": f"{words['help']}; of {_by_default(of)}"})
    flag("--threads", type=int, metavar="N", help="torch's threads on the CPU (torch's own choice)")
    flag("--out", type=Path, metavar="DIR", help="where JSON and plot go (below benchmarks/results in a checkout)")
    flag("--no-write", action="store_true", help="print the table only")
    flag("--redraw", type=Path, metavar="FILE.json", help="measure nothing: show this file, and draw its plot again")


def takers(menu: Menu, flag: str) -> dict[str, str]:
    """Find the benchmarks that take the flag, each with its default."""
    return {name: of.taken[flag] for name, of in menu.choices.items() if flag in of.taken}


def _by_default(defaults: Mapping[str, str]) -> str:
    """Write names and defaults, those with the same default together: ``"a, b (1 2); c (5)"``."""
    names_of: dict[str, list[str]] = {}
    for name, default in defaults.items():
        names_of.setdefault(default, []).append(name)
    return "; ".join(", ".join(names) + f" ({default})" * bool(default) for default, names in names_of.items())


def add_choice_of_ops(parser: argparse.ArgumentParser) -> None:
    alone = ", ".join(name for name in PACKAGE.choices if name not in OPS)
    parser.add_argument(
        "ops", nargs="*", metavar="OP", help=f"of {', '.join(OPS)} (all three); or alone one of {alone}"
    )
