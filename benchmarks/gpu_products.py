"""Muon's ``ns_product="triton"`` against torch, by shape: the products of its iteration, and the whole iteration.

    python benchmarks/gpu_products.py
    TRITON_INTERPRET=1 python benchmarks/gpu_products.py --device cpu

For each shape, in turns: X X^T by ``torch.bmm``, b A + c A A by ``torch.baddbmm``, and the whole iteration. Muon takes
the kernel for large matrices alone; here it takes it for all shapes. Exit codes: 0; 77 without Triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import lab
import torch
from gpu_ranks import SKIP_CODE
from torch import Tensor
from zero_optim.bench.record import Result
from zero_optim.bench.run import find_device
from zero_optim.bench.timing import Spread, interleaved, make_clock
from zero_optim.rules import newton_schulz
from zero_optim.rules.newton_schulz import PRODUCTS, QUINTIC, TORCH, TRITON

import zero_kernels

SHAPES = {  # matrices, rows, columns
    "cuda": [*((1, side, side) for side in (256, 512, 1024, 2048, 3072, 4096)), (1, 4096, 11008), (1, 11008, 4096)]
    + [(1, 1024, 4096), (16, 1024, 1024), (64, 256, 256)],
    "cpu": [(1, 32, 32), (2, 20, 50)],
}
ROUNDS = {"cuda": 20, "cpu": 2}
WORKS = SQUARE, POLYNOMIAL, ITERATION = "square", "polynomial", "iteration"


def jobs_of(given: Tensor) -> dict[str, Callable[[], object]]:
    """Make jobs by work and backend, on [n, rows, columns] bf16. As in Muon a tall matrix is transposed, uncopied."""
    product = zero_kernels.symmetric_product
    x = given.mT if given.shape[1] > given.shape[2] else given
    a = torch.bmm(x, x.mT)
    _, b, c = QUINTIC
    whole = given[0] if len(given) == 1 else given

    def iterate(backend: str) -> None:
        with mock.patch.object(newton_schulz, "TRITON_FROM", 0):  # for all shapes
            newton_schulz.orthogonalized(whole, QUINTIC, 5, 1e-7, True, backend)

    return {
        f"{SQUARE} {TORCH}": lambda: torch.bmm(x, x.mT),
        f"{SQUARE} {TRITON}": lambda: product(x, x.mT),
        f"{POLYNOMIAL} {TORCH}": lambda: torch.baddbmm(a, a, a, beta=b, alpha=c),
        f"{POLYNOMIAL} {TRITON}": lambda: product(a, a, a, beta=b, alpha=c),
        **{f"{ITERATION} {backend}": partial(iterate, backend) for backend in PRODUCTS},
    }


def medians(jobs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    times = interleaved({name: [job] for name, job in jobs.items()}, make_clock(device), ROUNDS[device.type])
    return {name: Spread.of([sum(laps) for laps in of_job]).ms for name, of_job in times.items()}


def measure(shape: Sequence[int], device: torch.device) -> dict[str, Any]:
    """Make the row of one shape."""
    x = torch.randn(*shape, device=device).bfloat16() / max(shape[1:]) ** 0.5
    ms = medians(jobs_of(x), device)
    return {
        "op": "products",
        "backend": TRITON,
        "shape": list(shape),
        "ms": {work: {backend: ms[f"{work} {backend}"] for backend in PRODUCTS} for work in WORKS},
        "speed": {work: round(ms[f"{work} {TORCH}"] / ms[f"{work} {TRITON}"], 4) for work in WORKS},
    }


def main(options: Any) -> int:
    device = find_device(options.device)
    if (reason := zero_kernels.why_no_symmetric_product(device)) is not None:
        print(f"Triton has no symmetric product here: {reason}", flush=True)
        return SKIP_CODE
    result = Result(device, options.out, options.write, "products")
    for shape in SHAPES[device.type]:
        row = measure(shape, device)
        result.add([row])
        speeds = ", ".join(f"{work} {speed:.2f}x" for work, speed in row["speed"].items())
        print(f"{' x '.join(map(str, shape))}: {speeds} torch's speed", flush=True)
    return 0


if __name__ == "__main__":
    about = "Measures symmetric products of Muon's iteration: Triton's beside torch's."
    sys.exit(lab.run_script(lab.parser_of(__file__, about, device=None), main))
