"""A GPT's training step on a mesh of two dimensions, against FSDP2's HSDP on the same mesh.

python benchmarks/bench_topologies.py --ranks 4 --contenders stage2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from bench_stages import NUMELS, ROUNDS, TAKEN, contest
from script import run_script
from zero_optim.bench.contenders import FSDP2, FSDP2_ZERO2, OURS
from zero_optim.bench.contest import Say
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.run import Measured, tokens_of
from zero_optim.bench.train_step import hold_all, in_order, make_task

NAME = "topologies"
NAMES = (*OURS[1:], FSDP2, FSDP2_ZERO2)  # at stage 0 nothing is shared, on a mesh or without
REPLICAS, RANKS = 2, 4
ABOUT = "Trains a GPT on two replicas with our stages and with FSDP2, and compares time, memory and traffic."
MENU = Menu({NAME: Choices({**TAKEN, "ranks": str(RANKS)}, gpu=True)})


def run(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else NUMELS[device.type]
    names = in_order(request.contenders or NAMES, FSDP2, FSDP2_ZERO2)
    tasks = [replace(make_task(numel, dtype, count, device), replicas=REPLICAS) for count in tokens_of(request, device)]
    contests = [replace(contest(task, names, count), op=NAME) for count in request.ranks or (RANKS,) for task in tasks]
    return hold_all(contests, request.rounds or ROUNDS, say)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script(NAME, ABOUT, MENU, alone={NAME: run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
