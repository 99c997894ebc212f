"""A GPT's training step by Muon: ``ShardedMuon`` with AdamW in a group, against torch's and Dion's.

python benchmarks/bench_muon.py --ranks 2 4 --tokens 256

Three columns are Muon's own: the share of the Newton-Schulz iteration in the step, on the rank where it is largest; the
most multiplications of a rank in it, over the mean of ranks; and at stage 2 the padding of the matrices' buckets.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace

import newton_schulz
import torch
from bench_stages import NUMELS, ROUNDS, TAKEN
from muon_on_paper import on_paper
from script import run_script
from zero_optim import ShardedMuon
from zero_optim.bench.contenders import DDP_MUON, FSDP2_DION, MUON, MUON_STAGE3, Task
from zero_optim.bench.contest import Say
from zero_optim.bench.ranks import on_ranks
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.rows.op import Row
from zero_optim.bench.run import Measured, tokens_of
from zero_optim.bench.train_step import Contest, hold_all, make_task
from zero_optim.train.model import GPT

NAME = "muon"
ABOUT = "Trains a GPT by Muon, and compares time, memory and what is communicated with torch's under DDP."
TOLERANCE = 1e-2
"""Relative difference of losses. In bf16 an update by either form of the iteration is a percent off the exact one. Two
percent of noise in torch's updates were seen to change the loss by half a percent."""
MENU = Menu({NAME: Choices({name: said for name, said in TAKEN.items() if name != "contenders"}, gpu=True)})


def run(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else NUMELS[device.type]
    ranks = request.ranks or ((2, 4) if device.type == "cpu" else (torch.cuda.device_count(),))
    tasks = {task.tokens: task for task in (make_task(numel, dtype, n, device) for n in tokens_of(request, device))}
    names = (MUON, MUON_STAGE3, DDP_MUON, FSDP2_DION)
    rounds = request.rounds or ROUNDS
    contests = [
        Contest(NAME, task, names, count, DDP_MUON, tolerance=TOLERANCE) for count in ranks for task in tasks.values()
    ]
    rows, packages = hold_all(contests, rounds, say)
    return [with_iteration(row, tasks[row.tokens or 0], rounds, say) for row in rows], packages


def with_iteration(row: Row, task: Task, rounds: int, say: Say) -> Row:
    """Add Muon's three columns to ``row``, except where the iteration is compiled, and so cannot be timed apart."""
    if row.backend == FSDP2_DION:
        return row
    ranks = row.ranks or 1
    say(f"{NAME}: the iteration of {row.backend}, {ranks} ranks")
    found = on_ranks(ranks, newton_schulz.on_rank, task, row.backend, rounds, device=task.device.type)
    multiplied = [of_rank.multiplications for of_rank in found]
    return replace(
        row,
        newton_schulz=round(max(of_rank.share for of_rank in found), 4),
        imbalance=round(max(multiplied) / statistics.mean(multiplied), 4),
        padding=round(padding(task, ranks), 6) if row.backend == MUON else None,
    )


def padding(task: Task, ranks: int) -> float:
    """Compute the padding in the matrices' buckets, over the elements of the matrices."""
    with torch.device("meta"):
        matrices, _ = ShardedMuon.split(GPT(task.config, task.dtype))
    return on_paper([(p.shape[0], p.shape[1]) for _, p in reversed(matrices)], ranks).padding


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script(NAME, ABOUT, MENU, alone={NAME: run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
