"""The flags of ``zero-optim train``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .choices import DTYPES, MASTERS, STATE_DTYPES


def _at_least(kind: type, least: int) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if not (value := kind(text)) >= least:
            raise argparse.ArgumentTypeError(f"{text}: at least {least}")
        return value

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read


def positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: a positive number")
    return value


_COUNT, _COUNT_OR_NONE = _at_least(int, 1), _at_least(int, 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``zero-optim train``. A flag not given is None, so that a checkpoint can supply its value."""

    def flag(name: str, kind: Any, text: str, **more: Any) -> None:
        parser.add_argument(name, type=kind, help=text, **more)

    stages = "what is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (2)"
    flag("--stage", int, stages, choices=(0, 1, 2, 3))
    dtypes = "parameters and gradients; fp16 brings the loss scaler (bf16; fp32 without bf16 units)"
    flag("--dtype", str, dtypes, choices=DTYPES)
    flag("--layers", _COUNT, "transformer blocks (3)")
    flag("--hidden", _COUNT, "width of the residual stream (192)")
    flag("--heads", _COUNT, "attention heads; they divide --hidden evenly (3)")
    flag("--seq", _COUNT, "bytes in a window (256)")
    flag("--batch", _COUNT, "windows in a micro-batch on each rank (4; 2 on a CPU without bf16 units)")
    flag("--accumulate", _COUNT, "micro-batches in a step (1)")
    flag("--steps", _COUNT, "optimizer steps (500; 250 on a CPU without bf16 units)")
    muon = "muon: Muon for the matrices of blocks and AdamW for the rest, in one optimizer (adamw)"
    flag("--optimizer", str, muon, choices=("adamw", "muon"))
    flag("--lr", positive, "peak learning rate of the cosine schedule (4e-3)")
    flag("--muon-lr", positive, "the same of the matrices that Muon updates (0.02)")
    flag("--warmup", _COUNT_OR_NONE, "steps of linear warm-up (30)")
    flag("--weight-decay", _at_least(float, 0), "decoupled, on matrices alone (0.1)")
    flag("--clip", positive, "largest norm of the averaged gradient (1.0)")
    flag("--seed", _COUNT_OR_NONE, "of the initial weights and of the data order (0)")
    devices = "auto is cuda where every rank can have a GPU of its own (auto)"
    flag("--device", str, devices, choices=("auto", "cpu", "cuda"))
    flag("--data", str, "a file or a folder of text (the Python standard library of this interpreter)")
    flag("--out", str, "run directory: report.html, log.jsonl, loss.png, sample.txt, checkpoint/ (runs/<date>)")
    flag("--keep-last", _COUNT_OR_NONE, "keep so many checkpoints: the newest and those that it came from; 0: all (0)")
    saving = parser.add_mutually_exclusive_group()
    saving.add_argument("--save-every", type=_COUNT_OR_NONE, help="steps between checkpoints; 0: at the end alone (0)")
    never = "save none, not at the end either"
    saving.add_argument("--no-checkpoint", dest="checkpoint", action="store_const", const=False, help=never)
    telemetry = "log norms, the largest update and zeros of each parameter at every K-th step"
    flag("--telemetry-every", _COUNT, telemetry, metavar="K")
    offload = "where state lives: paged, cpu, or nvme:DIR; see docs/memory.md (on the device)"
    flag("--state-offload", str, offload, metavar="STORE")
    flag("--device-budget", str, "of paged: state that stays on the device, as in 8GB (auto)", metavar="SIZE")
    masters = "of bf16 parameters; split: 16 bits beside them, split8: 8; see docs/state.md (split)"
    flag("--master", str, masters, choices=MASTERS)
    flag("--state-dtype", str, "of the moments; see docs/state.md (fp32)", choices=STATE_DTYPES)
    offload = "at stage 3: where shards of parameters rest: cpu, or nvme:DIR (on the device)"
    flag("--param-offload", str, offload, metavar="STORE")
    resume = "run directory or checkpoint to go on from; what came after it is written anew. auto: the newest in --out,"
    flag("--resume", Path, f"{resume} or from the start where there is none")
    flag("--ranks", _COUNT, "start this many ranks on this machine, as torchrun would")
