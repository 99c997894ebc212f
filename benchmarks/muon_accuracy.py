"""The error of Muon's iteration against float64: by torch's operations, and in the form with fewer multiplications.

    python benchmarks/muon_accuracy.py

Matrices are of 20 x 60 to 768 x 3072, three of each size. Printed are the relative distance from the float64 result, in
the Frobenius norm, and by how much the result is longer along it. This takes less than a minute.
"""

from __future__ import annotations

import torch
from torch import Tensor
from zero_optim.rules.newton_schulz import QUINTIC, orthogonalized

SHAPES = ((20, 60), (64, 256), (128, 512), (256, 1024), (640, 2560), (768, 3072))
SEEDS = 3


def matrix(kind: str, rows: int, columns: int) -> Tensor:
    if kind == "random":
        return torch.randn(rows, columns)
    if kind == "a twentieth of the rank":
        rank = max(1, rows // 20)
        return torch.randn(rows, rank) @ torch.randn(rank, columns) + 0.01 * torch.randn(rows, columns)
    u, _ = torch.linalg.qr(torch.randn(rows, rows))
    v, _ = torch.linalg.qr(torch.randn(columns, rows))
    return u * torch.logspace(0, -3, rows) @ v.T


def exact(given: Tensor) -> Tensor:
    x = given.double() / given.double().norm()
    for _ in range(5):
        square = x @ x.T
        x = QUINTIC[0] * x + (QUINTIC[1] * square + QUINTIC[2] * square @ square) @ x
    return x


def main() -> None:
    for kind in ("random", "a twentieth of the rank", "three decades"):
        for gram in (False, True):
            distances, longer = [], []
            for shape in SHAPES:
                for seed in range(SEEDS):
                    torch.manual_seed(seed)
                    given = matrix(kind, *shape)
                    wanted, found = exact(given), orthogonalized(given, QUINTIC, 5, 1e-7, gram).double()
                    distances.append(float((found - wanted).norm() / wanted.norm()))
                    longer.append(float((found * wanted).sum() / (wanted * wanted).sum()) - 1)
            form = "fewer multiplications" if gram else "torch's operations"
            print(
                f"{kind:24} {form:22} off by {min(distances):.2%} to {max(distances):.2%}, "
                f"longer by {min(longer):+.2%} to {max(longer):+.2%}"
            )


if __name__ == "__main__":
    main()
