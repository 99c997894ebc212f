"""Muon's `ns_product="triton"` against torch, by shape: the products of its iteration, and the whole iteration.

    python benchmarks/gpu_products.py --out products.json
    TRITON_INTERPRET=1 python benchmarks/gpu_products.py --device cpu

For each shape, in turns: X X^T by `torch.bmm`, b A + c A A by `torch.baddbmm`, and the whole iteration. Muon takes the
kernel for large matrices alone; here it takes it for all shapes.
The peak is the speed of `torch.mm` of large square matrices in the same run. Exit codes: 0; 77 without Triton.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from gpu_results import SKIP_CODE
from torch import Tensor
from zero_optim.bench.timing import Spread, TimedRounds, interleaved, make_clock
from zero_optim.rules import newton_schulz
from zero_optim.rules.newton_schulz import PRODUCTS, QUINTIC, TORCH, TRITON

import zero_kernels

SHAPES = {  # matrices, rows, columns
    "cuda": [*((1, side, side) for side in (256, 512, 1024, 2048, 3072, 4096)), (1, 4096, 11008), (1, 11008, 4096)]
    + [(1, 1024, 4096), (16, 1024, 1024), (64, 256, 256)],
    "cpu": [(1, 32, 32), (2, 20, 50)],
}
SIDE = {"cuda": 8192, "cpu": 64}  # of the peak's matrices
BLOCKS = {"cuda": (64, 128), "cpu": (32,)}  # rows of tiles that are measured besides a shape's own tile
STEPS = 5
SQUARE, POLYNOMIAL, ITERATION = "square", "polynomial", "iteration"


@dataclass(frozen=True)
class Figures:
    """Figures of one shape.

    Attributes:
        shape: matrices, rows, columns.
        ms: median milliseconds by work and backend.
        speed: by work, torch's time over Triton's.
        of_peak: speed over the peak, by product and backend, where only multiplications that are made count.
        share: about the share of symmetric products in the time of torch's iteration, from the products' own times.
        by_tile: milliseconds of X X^T in Triton, by the rows of a tile.
    """

    shape: tuple[int, int, int]
    ms: dict[str, dict[str, float]]
    speed: dict[str, float]
    of_peak: dict[str, dict[str, float]]
    share: float
    by_tile: dict[int, float]

    def __str__(self) -> str:
        said = [f"{work} {self.speed[work]:.2f}x" for work in (SQUARE, POLYNOMIAL, ITERATION)]
        peaks = ", ".join(f"{of:.0%}" for of in self.of_peak[SQUARE].values())
        return f"{named(self.shape)}: {', '.join(said)} torch's speed; {peaks} of the peak; share {self.share:.0%}"


def named(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape[1:] if shape[0] == 1 else shape))


def jobs_of(given: Tensor, blocks: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Make jobs by work and backend, on [n, rows, columns] bf16. As in Muon a tall matrix is transposed, uncopied."""
    product = zero_kernels.symmetric_product
    x = given.mT if given.shape[1] > given.shape[2] else given
    a, out = torch.bmm(x, x.mT), {}
    _, b, c = QUINTIC
    out[f"{SQUARE} {TORCH}"] = lambda: torch.bmm(x, x.mT)
    out[f"{SQUARE} {TRITON}"] = lambda: product(x, x.mT)
    out[f"{POLYNOMIAL} {TORCH}"] = lambda: torch.baddbmm(a, a, a, beta=b, alpha=c)
    out[f"{POLYNOMIAL} {TRITON}"] = lambda: product(a, a, a, beta=b, alpha=c)
    whole = given[0] if len(given) == 1 else given
    for backend in PRODUCTS:
        iteration = partial(newton_schulz.orthogonalized, whole, QUINTIC, STEPS, 1e-7, True, backend)
        out[f"{ITERATION} {backend}"] = partial(for_all_shapes, iteration)
    for block in blocks:
        out[f"tile {block}"] = partial(with_tile, block, lambda: product(x, x.mT))
    return out


def for_all_shapes(work: Callable[[], object]) -> None:
    with mock.patch.object(newton_schulz, "TRITON_FROM", 0):
        work()


def with_tile(block: int, work: Callable[[], object]) -> None:
    from zero_kernels.triton import symmetric

    with mock.patch.object(symmetric, "tile_of", lambda rows, columns: (block, 8 if block == symmetric.LARGEST else 4)):
        work()


def measure(shape: tuple[int, int, int], device: torch.device, peak: float, rounds: TimedRounds) -> Figures:
    """Measure one shape. ``peak``: multiplications a millisecond."""
    from zero_kernels.triton import symmetric

    n, (rows, columns) = shape[0], sorted(shape[1:])
    x = torch.randn(shape, device=device).bfloat16() / columns**0.5
    times = interleaved(
        {name: [job] for name, job in jobs_of(x, BLOCKS[device.type]).items()}, make_clock(device), rounds
    )
    ms = {name: Spread.of([sum(laps) for laps in of_job]).ms for name, of_job in times.items()}
    block, _ = symmetric.tile_of(rows, columns)
    tiles = -(-rows // block)
    made = {TORCH: n * rows * rows, TRITON: n * tiles * (tiles + 1) // 2 * block * block}  # elements
    depth = {SQUARE: columns, POLYNOMIAL: rows}
    lengths = [len(phase) for phase in newton_schulz.phases(rows, columns, [QUINTIC] * STEPS, gram=True)]
    symmetric_ms = sum(ms[f"{SQUARE} {TORCH}"] + (4 * length - 3) * ms[f"{POLYNOMIAL} {TORCH}"] for length in lengths)
    return Figures(
        shape,
        {work: {backend: ms[f"{work} {backend}"] for backend in PRODUCTS} for work in (*depth, ITERATION)},
        {work: round(ms[f"{work} {TORCH}"] / ms[f"{work} {TRITON}"], 4) for work in (*depth, ITERATION)},
        {w: {by: round(made[by] * d / ms[f"{w} {by}"] / peak, 4) for by in PRODUCTS} for w, d in depth.items()},
        round(symmetric_ms / ms[f"{ITERATION} {TORCH}"], 4),
        {tile: ms[f"tile {tile}"] for tile in BLOCKS[device.type]},
    )


def peak_of(device: torch.device, rounds: TimedRounds) -> float:
    """Measure the multiplications a millisecond of ``torch.mm``."""
    side = SIDE[device.type]
    x = torch.randn(side, side, device=device).bfloat16()
    times = interleaved({"mm": [lambda: torch.mm(x, x)]}, make_clock(device), rounds)
    return side**3 / Spread.of([sum(laps) for laps in times["mm"]]).ms


def verdict(found: Sequence[Figures]) -> str:
    """Write for which shapes Triton, and for which torch, is faster in the whole iteration."""
    faster = {True: TRITON, False: TORCH}
    told = {name: [of for of in found if (of.speed[ITERATION] > 1) == wins] for wins, name in faster.items()}
    said = (f"{name}: {', '.join(named(of.shape) for of in shapes) or 'none'}" for name, shapes in told.items())
    return f"the iteration is faster by {'; by '.join(said)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="symmetric products of Muon's iteration: Triton's beside torch's")
    parser.add_argument("--device", default="cuda", choices=SHAPES)
    parser.add_argument("--out", type=Path, help="a JSON file, which grows with each shape")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if (reason := zero_kernels.why_no_symmetric_product(device)) is not None:
        print(f"Triton has no symmetric product here: {reason}", flush=True)
        return SKIP_CODE
    rounds = TimedRounds(seconds=2.0) if device.type == "cuda" else TimedRounds.exactly(2)
    peak, found = peak_of(device, rounds), []
    print(f"peak: torch.mm of {SIDE[device.type]}, {2 * peak / 1e9:.4g} TFLOP/s", flush=True)
    for shape in SHAPES[device.type]:
        found.append(measure(shape, device, peak, rounds))
        print(found[-1], flush=True)
        if options.out:
            record = {"peak_tflops": 2 * peak / 1e9, "side": SIDE[device.type], "shapes": [asdict(of) for of in found]}
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(verdict(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
