"""A GPT's training step by stage, on several numbers of ranks, against FSDP2 at the same setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .contenders import FSDP2, FSDP2_ZERO2, OURS, STAGE3, Task
from .gpt_step import model_config
from .record import Row
from .train_step import BATCH, DTYPES, SEQ, Contest, Say, hold, in_order

NAMES = (*OURS, FSDP2, FSDP2_ZERO2)
ROUNDS = 11
RANKS = (2, 4)
NUMELS = {"cpu": 2**24, "cuda": 2**28}  # side by side they need about 120 bytes a parameter on one rank


def measure(
    numel: int, dtype: str, names: Sequence[str], ranks: Sequence[int], rounds: int, device: torch.device, say: Say
) -> tuple[list[Row], dict[str, str]]:
    """Rows of ``names`` and of both FSDP2s, on each number of ``ranks``; and why one is left out."""
    config = model_config(numel, device)
    if device.type == "cpu":
        config = replace(config, seq=SEQ)
    task = Task(config, DTYPES[dtype], BATCH, device)
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for count in ranks:
        say(f"stages: {count} ranks")
        names = in_order(names, FSDP2, FSDP2_ZERO2)
        of_count, without = hold(contest(task, names, count), rounds, say)
        rows += of_count
        left_out |= without
    return rows, left_out


def contest(task: Task, names: Sequence[str], ranks: int) -> Contest:
    """Whoever has whole parameters from forward to backward is held against the FSDP2 that keeps them, too."""
    keeping = [name for name in names if name not in (STAGE3, FSDP2)]
    return Contest("stages", task, names, ranks, FSDP2, dict.fromkeys(keeping, FSDP2_ZERO2))
