"""Muon's iteration: its error against float64; and, for ``bench_training.py muon``, its part of a training step.

    python benchmarks/newton_schulz.py

compares torch's operations and the form with fewer multiplications on matrices of 20 x 60 to 768 x 3072, three of each
size. Printed are the relative distance from the float64 result, in the Frobenius norm, and by how much the result is
longer along it. This takes less than a minute.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from contenders import WAYS, Task, train
from torch import Tensor
from zero_optim.rules import Muon, newton_schulz
from zero_optim.rules.newton_schulz import QUINTIC, orthogonalized

# -- its part of a training step ---------------------------------------------------------------------------------------


@dataclass
class Iteration:
    """The iterations of a rank in a step, or its figures at last.

    Attributes:
        seconds: in the iteration.
        multiplications: as many as our form of it takes.
        part: of a step's time in the iteration, median.
        padding: at stage 2: elements of padding in the matrices' buckets, over those of the matrices.
    """

    seconds: float = 0.0
    multiplications: int = 0
    part: float = 0.0
    padding: float | None = None


def on_rank(task: Task, name: str, rounds: int) -> Iteration:
    """Collective. Train one contender. On a GPU the host waits around each iteration, which makes a step longer."""
    training = WAYS[name].make(task)
    train(training, 2)  # buckets are laid out in the first step
    parts = []
    for _ in range(rounds):
        with watched(name, task.device) as seen:
            begin = _now(task.device)
            train(training, 1)
            parts.append(seen.seconds / (_now(task.device) - begin))
    return replace(seen, part=statistics.median(parts), padding=padding_of(training.opt) if name == "muon" else None)


@contextmanager
def watched(name: str, device: torch.device) -> Iterator[Iteration]:
    """Time and count the iterations of the contender ``name`` in this block."""
    seen = Iteration()
    module, function = newton_schulz, "orthogonalized"
    if name == "ddp_muon":
        module, function = torch.optim._muon, "_zeropower_via_newtonschulz"
    real: Callable[..., Tensor] = getattr(module, function)

    def run(matrix: Tensor, *options: Any) -> Tensor:
        begin = _now(device)
        result = real(matrix, *options)
        seen.seconds += _now(device) - begin
        several = matrix.numel() // (matrix.shape[-2] * matrix.shape[-1])
        seen.multiplications += several * Muon().cost(tuple(matrix.shape[-2:]))
        return result

    with mock.patch.object(module, function, run):
        yield seen


def padding_of(opt: Any) -> float:
    """Compute the padding in the buckets of a ``ShardedMuon``'s matrices, over the elements of the matrices."""
    matrices = {id(parameter) for parameter in opt.param_groups[0]["params"]}
    layouts = [bucket.layout for bucket in opt.engine.reducer.buckets if id(bucket.params[0]) in matrices]
    return sum(layout.numel for layout in layouts) / sum(s.numel for layout in layouts for s in layout.slots) - 1


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# -- its error ---------------------------------------------------------------------------------------------------------

SHAPES = ((20, 60), (64, 256), (128, 512), (256, 1024), (640, 2560), (768, 3072))
KINDS = ("random", "a twentieth of the rank", "three decades")


def matrix(kind: str, rows: int, columns: int) -> Tensor:
    if kind == "random":
        return torch.randn(rows, columns)
    if kind == "a twentieth of the rank":
        rank = max(1, rows // 20)
        return torch.randn(rows, rank) @ torch.randn(rank, columns) + 0.01 * torch.randn(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, rows))
    v, _ = torch.linalg.qr(torch.randn(columns, rows))
    return u * torch.logspace(0, -3, rows) @ v.T


def error(given: Tensor, gram: bool) -> tuple[float, float]:
    """Compare with float64. Returns the relative distance, and by how much the result is longer along the exact one."""
    found = orthogonalized(given, QUINTIC, 5, 1e-7, gram).double()
    exact = given.double() / given.double().norm()
    for _ in range(5):
        square = exact @ exact.T
        exact = QUINTIC[0] * exact + (QUINTIC[1] * square + QUINTIC[2] * square @ square) @ exact
    return float((found - exact).norm() / exact.norm()), float((found * exact).sum() / (exact * exact).sum()) - 1


def main() -> None:
    for kind in KINDS:
        for gram in (False, True):
            torch.manual_seed(0)
            errors = [error(matrix(kind, *shape), gram) for shape in SHAPES for _ in range(3)]
            distances, longer = zip(*errors, strict=True)
            form = "fewer multiplications" if gram else "torch's operations"
            print(
                f"{kind:24} {form:22} off by {min(distances):.2%} to {max(distances):.2%}, "
                f"longer by {min(longer):+.2%} to {max(longer):+.2%}"
            )


if __name__ == "__main__":
    main()
