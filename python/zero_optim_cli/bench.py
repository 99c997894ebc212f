"""The flags of ``zero-optim bench``."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from pathlib import Path

OPS = ("adam_step", "pack", "grad_stats", "step")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def parse_numel(text: str) -> int:
    """Read ``1000000``, ``1e6``, ``2^20``, ``2**20``, ``64Mi`` or ``1Gi``."""
    if power := re.fullmatch(r"2(?:\^|\*\*)(\d{1,2})", text):
        return 2 ** int(power[1])
    count = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)(Ki|Mi|Gi|)", text)
    numel = Decimal(count[1]) * _UNITS.get(count[2], 1) if count else Decimal()
    if numel < 1 or numel != int(numel):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of elements; write 1000000, 1e6, 2^20 or 64Mi")
    return int(numel)


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flag = parser.add_argument
    # without choices=, which in some Python versions refuses that none is given
    flag("ops", nargs="*", metavar="OP", type=_op, help=f"of {', '.join(OPS)} (all)")
    flag("--device", choices=("cpu", "cuda"), help="where to measure (cuda where torch sees a GPU)")
    flag("--dtypes", nargs="+", choices=("fp16", "bf16"), default=("fp16", "bf16"), help="of gradients (both)")
    numels = "elements, as 1000000, 1e6, 2^20 or 64Mi (64Mi; GPU: 2^20 to 2^30; of step 16Mi; GPU: 1e9)"
    flag("--numel", nargs="+", type=parse_numel, metavar="N", help=numels)
    flag("--backends", nargs="+", metavar="NAME", help="kernel backends to measure (all but reference)")
    flag("--rounds", type=at_least_one, metavar="N", help="timed rounds of each case (10 to 51, as 5 seconds allow)")
    flag("--threads", type=at_least_one, metavar="N", help="torch's threads on the CPU (torch's own choice)")
    flag("--out", type=Path, metavar="DIR", help="where JSON and plot go (below benchmarks/results in a checkout)")
    flag("--no-write", dest="write", action="store_false", help="print the table only")


def _op(text: str) -> str:
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"there is no op {text!r}; choose from {', '.join(OPS)}")
    return text
