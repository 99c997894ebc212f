"""The words that flags take, as ``zero_optim`` knows them, and how numbers are read."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal

DTYPES = ("bf16", "fp16", "fp32")
MASTERS = ("fp32", "split", "split8")
STATE_DTYPES = ("fp32", "bf16", "int8")
RULES = ("adamw", "amsgrad", "lion", "sgd", "momentum")
MUON = "muon"
MODELS = (
    *("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt3-175b"),
    *("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "llama-3-405b"),
    *("mistral-7b", "mixtral-8x7b"),
)
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def read_nbytes(text: str) -> int | None:
    """Read a size such as ``8GB`` (10^9), ``500MiB`` (2^20) or ``4096``; None where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kKMGT]?)(i?)B?", text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


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
