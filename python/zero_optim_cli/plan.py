"""The flags of ``zero-optim plan``, and how their values are read."""

from __future__ import annotations

import argparse
import re
from decimal import Decimal
from typing import Any

from .choices import DTYPES, MASTERS, MODELS, MUON, RULES, STATE_DTYPES, read_nbytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``zero-optim plan``."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=_count, help="parameters, as in 7.5B or 7.5e9, of an invented GPT")
    model.add_argument("--model", help=f"one of {', '.join(MODELS)}; or a config.json of transformers")

    def flag(name: str, kind: Any, text: str, **more: Any) -> None:
        parser.add_argument(name, type=kind, help=text, **more)

    flag("--world", int, "ranks (1)", default=1)
    flag("--tp", int, "tensor-parallel ranks that a decoder is cut over (1)", default=1)
    flag("--ep", int, "ranks that the experts of each layer are spread over (1)", default=1)
    flag("--pp", int, "stages of a pipeline that the layers are cut into: the fullest is planned (1)", default=1)
    flag("--replicate", int, "of the others, how many hold each shard, as in a mesh (1)", default=1)
    text = "over which of these the state is sharded, as state_over= has it (shard)"
    flag("--state-over", str, text, choices=("shard", "all"), default="shard")
    flag("--stage", _stages, "stages to compare, as in 1,2 (0,1,2,3)", metavar="STAGES")
    flag("--dtype", str, "of parameters and gradients (bf16)", choices=DTYPES)
    flag("--grad-reduce-dtype", str, "in which gradients are reduced (--dtype)", choices=DTYPES)
    text = "whose state is planned (adamw); momentum is SGD's, muon is for matrices of layers beside AdamW"
    flag("--optimizer", str, text, choices=(*RULES, MUON), default="adamw")
    flag("--master", str, "of bf16 parameters, as master= has it (split)", choices=MASTERS)
    flag("--state-dtype", str, "as state_dtype= has it (fp32)", choices=STATE_DTYPES, default="fp32")
    flag("--averages", int, "averages of the parameters, as ema_decay has them kept (0)", default=0)
    text = "LoRA's adapters of this rank are trained, on every matrix of the layers; the model is frozen"
    flag("--lora", int, text, metavar="RANK")
    flag("--offload", _offload, "where the state is: none, paged, paged:BUDGET, cpu or nvme (none)", default="none")
    words = "stage 3: where shards of parameters rest: cpu or nvme (on the device; cpu, where no word follows)"
    parser.add_argument("--param-offload", nargs="?", const="cpu", choices=("cpu", "nvme"), help=words)
    flag("--gpu-memory", _size, "of each rank's device (80GB)", default=80 * 10**9, metavar="SIZE")
    flag("--seq", int, "tokens of a sequence; with --batch activations are counted")
    flag("--batch", int, "sequences of a micro-batch on each rank")
    flag("--accumulate", int, "micro-batches in a step (1; with --pp as many as stages)")
    parser.add_argument("--checkpointing", action="store_true", help="layers are computed again in backward")
    parser.add_argument("--verbose", action="store_true", help="what memory is made of, by kind; buckets")
    parser.add_argument("--json", action="store_true", help="print a list, an object a stage, in bytes")


_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _number(text: str) -> int:
    """Read a number such as ``8B``, ``350M``, ``8e9`` or ``8000000000``; 0 where it is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\+?\d{1,3})?)([KMBT]?)", text.strip().upper())
    return int(Decimal(match[1]) * _MULTIPLES[match[2]]) if match else 0


def _count(text: str) -> int:
    count = _number(text)
    if count < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters such as 8B or 8e9, at least 1e6")
    if count > 10**15:
        raise argparse.ArgumentTypeError(f"{text!r} is too many to be planned: at most 1e15")
    return count


def _stages(text: str) -> tuple[int, ...]:
    stages = tuple(int(part) if part in ("0", "1", "2", "3") else -1 for part in text.split(","))
    if -1 in stages:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of stages such as 0,1,2,3")
    return tuple(sorted(set(stages)))


def _size(text: str) -> int:
    nbytes = read_nbytes(text)
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GB or 40GiB")
    if nbytes < 10**6:  # it has no unit, by mistake
        raise argparse.ArgumentTypeError(f"{text!r} is {nbytes:,} bytes: give a unit, as in 80GB or 40GiB")
    return nbytes


def _offload(text: str) -> str:
    kind, _, budget = text.partition(":")
    known = kind in ("none", "cpu", "nvme") if not budget else kind == "nvme"
    if known or (kind == "paged" and (budget in ("", "auto") or read_nbytes(budget) is not None)):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none of none, paged, paged:BUDGET (as in paged:8GB), cpu and nvme")
