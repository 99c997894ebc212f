"""A GPT's training step by stage, on several numbers of ranks, against FSDP2 at the same setting.

python benchmarks/bench_stages.py --ranks 2 --contenders stage3
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from script import run_script
from zero_optim.bench.contenders import FORMS, FSDP2, FSDP2_ZERO2, GATHERING_TWICE, OURS, Task
from zero_optim.bench.contest import Say
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.rows.op import Row
from zero_optim.bench.run import Measured, tokens_of
from zero_optim.bench.train_step import Contest, hold_all, in_order, make_task

NAMES = (*OURS, *FORMS, FSDP2, FSDP2_ZERO2)
ROUNDS = 11
RANKS = (2, 4)
NUMELS = {"cpu": 2**24, "cuda": 2**28}  # side by side they need about 120 bytes a parameter on one rank


def measure(
    numel: int,
    dtype: str,
    names: Sequence[str],
    ranks: Sequence[int],
    tokens: Sequence[int],
    rounds: int,
    device: torch.device,
    say: Say,
) -> tuple[list[Row], dict[str, str]]:
    """Measure ``names`` and both FSDP2s for all ``ranks`` and ``tokens``. Returns rows, and why one is left out."""
    tasks = [make_task(numel, dtype, count, device) for count in tokens]
    names = in_order(names, FSDP2, FSDP2_ZERO2)
    return hold_all([contest(task, names, count) for count in ranks for task in tasks], rounds, say)


def contest(task: Task, names: Sequence[str], ranks: int) -> Contest:
    """Compare contenders that keep whole parameters from forward to backward with the FSDP2 that keeps them, too."""
    keeping = [name for name in names if name not in GATHERING_TWICE]
    return Contest("stages", task, names, ranks, FSDP2, dict.fromkeys(keeping, FSDP2_ZERO2))


ABOUT = "Trains a GPT at every stage and with FSDP2, and compares time, memory and what is communicated."
TAKEN = {
    "numel": "16Mi; GPUs: 256Mi",
    "contenders": "all",
    "rounds": str(ROUNDS),
    "tokens": "256 512",
    "ranks": "2 4; GPUs: all",
}
MENU = Menu({"stages": Choices(TAKEN, gpu=True)})


def run(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else NUMELS[device.type]
    ranks = request.ranks or (RANKS if device.type == "cpu" else (torch.cuda.device_count(),))
    tokens = tokens_of(request, device)
    return measure(numel, dtype, request.contenders or NAMES, ranks, tokens, request.rounds or ROUNDS, device, say)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script("stages", ABOUT, MENU, alone={"stages": run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
