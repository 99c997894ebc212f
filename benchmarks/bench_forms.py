"""Time of a step by form of state: ``opt.step()`` of one rank, in turns, compared with fp32.

    python benchmarks/bench_forms.py --numel 33554432 --threads 2

Where bitsandbytes or torchao is installed, its AdamW with 8-bit moments takes turns, too. Neither has a master beside
the bf16 parameter. Both take much longer on a CPU: ``--numel 4194304 --rounds 7``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from zero_optim import ShardedAdamW

FORMS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"state_dtype": "bf16"},
    "bf16_stochastic": {"state_dtype": "bf16_stochastic"},
    "int8": {"state_dtype": "int8"},
    "split": {"master": "split"},
    "split, int8": {"master": "split", "state_dtype": "int8"},
    "split8": {"master": "split8"},
    "split8, int8": {"master": "split8", "state_dtype": "int8"},
}


NEIGHBOURS = {"bitsandbytes": "bitsandbytes.optim", "torchao": "torchao.optim"}
"""Packages, each with its module that has ``AdamW8bit``."""


def make(numel: int, optimizer: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Make an optimizer of one bf16 parameter with a gradient, and let it make two steps."""
    parameter = nn.Parameter(torch.randn(numel).bfloat16() * 0.02)
    parameter.grad = torch.randn(numel).bfloat16()
    opt = optimizer([parameter], lr=1e-3)
    opt.step()
    opt.step()
    return opt


def makers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """List the constructors of optimizers by name: ours in each form, and those of installed packages."""
    ours = {name: partial(ShardedAdamW, **form) for name, form in FORMS.items()}
    there = {name: module for name, module in NEIGHBOURS.items() if importlib.util.find_spec(name)}
    return {**ours, **{name: importlib.import_module(module).AdamW8bit for name, module in there.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**25, help="parameters (33554432)")
    parser.add_argument("--threads", type=int, default=2, help="of the processor (2)")
    parser.add_argument("--rounds", type=int, default=11, help="of all forms (11)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    optimizers = {name: make(given.numel, optimizer) for name, optimizer in makers().items()}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    for _ in range(given.rounds):
        for name, opt in optimizers.items():
            start = time.perf_counter()
            opt.step()
            times[name].append(1000 * (time.perf_counter() - start))
    exact = statistics.median(times["fp32"])
    for name, of_form in times.items():
        median = statistics.median(of_form)
        print(f"{name:15} {median:8.2f} ms  {median / exact:.2f} of fp32  ({min(of_form):.2f} to {max(of_form):.2f})")


if __name__ == "__main__":
    main()
