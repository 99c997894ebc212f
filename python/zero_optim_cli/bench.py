"""The flags of ``zero-optim bench``."""

from __future__ import annotations

import argparse
from pathlib import Path

from .choices import at_least_one, parse_numel

OPS = ("adam_step", "pack", "grad_stats")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    # without choices=, which in some Python versions refuses that none is given
    flag("ops", nargs="*", metavar="OP", type=_op, help=f"of {', '.join(OPS)} (all)")
    flag("--device", choices=("cpu", "cuda"), help="where to measure (cuda where torch sees a GPU)")
    flag("--dtypes", nargs="+", choices=("fp16", "bf16"), default=("fp16", "bf16"), help="of gradients (both)")
    numels = "elements, as 1000000, 1e6, 2^20 or 64Mi (64Mi; GPU: 2^20 to 2^30)"
    flag("--numel", nargs="+", type=parse_numel, metavar="N", help=numels)
    flag("--backends", nargs="+", metavar="NAME", help="kernel backends to measure (all but reference)")
    flag("--rounds", type=at_least_one, metavar="N", help="timed rounds of each case (10 to 51, as 5 seconds allow)")
    flag("--threads", type=at_least_one, metavar="N", help="torch's threads on the CPU (torch's own choice)")
    flag("--out", type=Path, metavar="DIR", help="where JSON goes (below benchmarks/results in a checkout)")
    flag("--no-write", dest="write", action="store_false", help="print the table only")


def _op(text: str) -> str:
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"there is no op {text!r}; choose from {', '.join(OPS)}")
    return text
