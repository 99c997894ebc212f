"""A GPT's training step by Muon: ``ShardedMuon`` with AdamW in a group, against torch's and Dion's.

python benchmarks/bench_muon.py --ranks 2 4 --tokens 256
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from bench_stages import NUMELS, ROUNDS, TAKEN
from script import run_script
from zero_optim.bench.contenders import DDP_MUON, FSDP2_DION, MUON, MUON_STAGE3
from zero_optim.bench.contest import Say
from zero_optim.bench.request import Choices, Menu, Request
from zero_optim.bench.run import Measured, tokens_of
from zero_optim.bench.train_step import Contest, hold_all, make_task

NAME = "muon"
ABOUT = "Trains a GPT by Muon, and compares time, memory and what is communicated with torch's under DDP."
MENU = Menu({NAME: Choices({name: said for name, said in TAKEN.items() if name != "contenders"}, gpu=True)})


def run(request: Request, device: torch.device, say: Say) -> Measured:
    (dtype,) = request.dtypes
    numel = request.numel[0] if request.numel else NUMELS[device.type]
    ranks = request.ranks or ((2, 4) if device.type == "cpu" else (torch.cuda.device_count(),))
    tasks = [make_task(numel, dtype, count, device) for count in tokens_of(request, device)]
    names = (MUON, MUON_STAGE3, DDP_MUON, FSDP2_DION)
    contests = [Contest(NAME, task, names, count, DDP_MUON) for count in ranks for task in tasks]
    return hold_all(contests, request.rounds or ROUNDS, say)


def main(arguments: Sequence[str] | None = None) -> int:
    return run_script(NAME, ABOUT, MENU, alone={NAME: run}, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
