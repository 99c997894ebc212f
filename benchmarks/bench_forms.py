"""How long a step takes by each form of state: ``opt.step()`` of one rank, in turns, beside fp32.

python benchmarks/bench_forms.py --numel 33554432 --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
from torch import nn
from zero_optim import ShardedAdamW

FORMS: Mapping[str, Mapping[str, str]] = {
    "fp32": {},
    "bf16": {"state_dtype": "bf16"},
    "bf16_stochastic": {"state_dtype": "bf16_stochastic"},
    "int8": {"state_dtype": "int8"},
    "split": {"master": "split"},
    "split, int8": {"master": "split", "state_dtype": "int8"},
    "split8": {"master": "split8"},
    "split8, int8": {"master": "split8", "state_dtype": "int8"},
}


def make(numel: int, form: Mapping[str, str]) -> ShardedAdamW:
    """An optimizer of one bf16 parameter that has a gradient, and has made two steps."""
    parameter = nn.Parameter(torch.randn(numel).bfloat16() * 0.02)
    parameter.grad = torch.randn(numel).bfloat16()
    opt = ShardedAdamW([parameter], lr=1e-3, **form)  # type: ignore[arg-type]
    opt.step()
    opt.step()
    return opt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--numel", type=int, default=2**25, help="parameters (33554432)")
    parser.add_argument("--threads", type=int, default=2, help="of the processor (2)")
    parser.add_argument("--rounds", type=int, default=11, help="of all forms (11)")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    optimizers = {name: make(given.numel, form) for name, form in FORMS.items()}
    times: dict[str, list[float]] = {name: [] for name in FORMS}
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
