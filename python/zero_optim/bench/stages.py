"""A GPT's training step by stage, on several numbers of ranks, against FSDP2 at the same setting."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .contenders import FSDP2, FSDP2_ZERO2, OURS, STAGE3, Task
from .record import Row
from .train_step import Contest, Say, hold_all, in_order, make_task

NAMES = (*OURS, FSDP2, FSDP2_ZERO2)
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
    """Rows of ``names`` and of both FSDP2s, on each number of ``ranks``, of ``tokens``; and why one is left out."""
    tasks = [make_task(numel, dtype, count, device) for count in tokens]
    names = in_order(names, FSDP2, FSDP2_ZERO2)
    return hold_all([contest(task, names, count) for count in ranks for task in tasks], rounds, say)


def contest(task: Task, names: Sequence[str], ranks: int) -> Contest:
    """Whoever has whole parameters from forward to backward is held against the FSDP2 that keeps them, too."""
    keeping = [name for name in names if name not in (STAGE3, FSDP2)]
    return Contest("stages", task, names, ranks, FSDP2, dict.fromkeys(keeping, FSDP2_ZERO2))
