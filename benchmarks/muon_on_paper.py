"""The layout of Muon's matrices over ranks at stages 1 and 2, from shapes alone: buckets, padding, and imbalance.

    python benchmarks/muon_on_paper.py --ranks 8 64 1024 16384

For each model and number of ranks there is a line in which all ranks share. Where that does not fit, there is another
one, in which fewer ranks share and the others are replicas: a mesh of two dimensions. Replicas may share the work. The
last column is the speed of the link between them from which on that saves time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from scale_model import ITEMSIZE, LLAMA_7B, LLAMA_70B, Shapes
from zero_optim.params.layout import BucketLayout, bucket_capacities, build_layout
from zero_optim.rules import Muon
from zero_optim.rules.homes import PARAMETERS_A_RANK

MODELS = {"Llama 2 7B": LLAMA_7B, "Llama 2 70B": LLAMA_70B}
RANKS = (8, 64, 1024, 16384)
MOST_PADDING, MOST_IMBALANCE = 0.1, 1.25
"""Imbalance may be the larger of both, since the iteration is a small part of a long step."""
MOST_BYTES = 16e9
"""Limit of the largest bucket. A rank has two buffers of its size: two fifths of a GPU with 80 GB."""

PEAK = 400e12
"""Assumed operations a second of a GPU in the iteration in bf16. It was not measured."""

Matrix = tuple[int, int]


@dataclass(frozen=True)
class OnPaper:
    """The buckets of Muon's matrices.

    Attributes:
        shards: ranks that share.
        largest: elements of the largest bucket.
        padding: elements of padding over those of the matrices.
        imbalance: multiplications of the rank with most, over the mean of ranks.
        idle: number of ranks without a matrix.
        numel: elements of matrices on a rank, on average.
        multiplied: multiplications of the rank with most.
    """

    shards: int
    buckets: int
    largest: int
    padding: float
    imbalance: float
    idle: int
    numel: float
    multiplied: int

    @property
    def fits(self) -> bool:
        balanced = self.padding <= MOST_PADDING and self.imbalance <= MOST_IMBALANCE
        return balanced and self.largest * ITEMSIZE <= MOST_BYTES

    def pays_from(self, replicas: int) -> float:
        """Compute the bytes a second of a rank's link from which on replicas save time by sharing the work. The
        all-reduce of a rank's matrices sends 2 (R-1)/R of their bytes, for R replicas."""
        sent = 2 * ITEMSIZE * self.numel * (replicas - 1) / replicas
        saved = 2 * self.multiplied * (1 - 1 / min(replicas, PARAMETERS_A_RANK)) / PEAK
        return sent / saved


def costs_of(matrices: Sequence[Matrix]) -> dict[int, int]:
    """Count the multiplications of each matrix's iteration, by Muon's default options."""
    return {number: Muon().cost(matrix) for number, matrix in enumerate(matrices)}


def layouts_of(matrices: Sequence[Matrix], shards: int) -> list[BucketLayout]:
    """Lay out buckets of bf16 ``matrices``, given in the order in which the first backward makes their gradients."""
    numels = {number: rows * columns for number, (rows, columns) in enumerate(matrices)}
    kinds = dict.fromkeys(numels, 0)
    capacities = bucket_capacities(numels, kinds, None, {0: ITEMSIZE}, shards)
    return build_layout(numels, kinds, list(numels), capacities, shards, {0: Muon.layout}, costs_of(matrices))


def on_paper(matrices: Sequence[Matrix], shards: int) -> OnPaper:
    buckets, costs = layouts_of(matrices, shards), costs_of(matrices)
    loads = [0] * shards
    for bucket in buckets:
        for slot in bucket.slots:
            loads[bucket.shard_of(slot)] += costs[slot.param]
    numel = sum(rows * columns for rows, columns in matrices)
    return OnPaper(
        shards,
        len(buckets),
        max(bucket.numel for bucket in buckets),
        sum(bucket.numel for bucket in buckets) / numel - 1,
        max(loads) * shards / sum(loads),
        loads.count(0),
        numel / shards,
        max(loads),
    )


def matrices_of(shapes: Shapes) -> list[Matrix]:
    """List the matrices of blocks, from the last to the first."""
    return (shapes.block_matrices * shapes.layers)[::-1]


def choices(matrices: Sequence[Matrix], ranks: int) -> Iterator[OnPaper]:
    """Give the layout in which all ranks share. If that does not fit, halve the ranks that share until it does."""
    found = on_paper(matrices, ranks)
    yield found
    shards = ranks
    while not found.fits and shards % 2 == 0:
        shards //= 2
        found = on_paper(matrices, shards)
    if shards < ranks:
        yield found


def table(models: Mapping[str, Shapes], ranks: Sequence[int]) -> list[str]:
    heads = ("", "ranks", "share", "replicas", "buckets", "padding", "largest bucket, GB", "imbalance", "idle ranks")
    heads += ("sharing pays from, GB/s",)
    lines = [heads, ["---"] * len(heads)]
    for name, shapes in models.items():
        for count in ranks:
            for found in choices(matrices_of(shapes), count):
                replicas = count // found.shards
                lines.append(
                    (
                        name,
                        f"{count:,}",
                        f"{found.shards:,}",
                        f"{replicas:,}",
                        f"{found.buckets}",
                        f"{found.padding:,.1%}".replace("%", " %"),
                        f"{found.largest * ITEMSIZE / 1e9:,.1f}",
                        f"{found.imbalance:.2f}",
                        f"{found.idle:,}",
                        f"{found.pays_from(replicas) / 1e9:.1f}" if replicas > 1 else "",
                    )
                )
    return [f"| {' | '.join(line)} |" for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    shown = " ".join(map(str, RANKS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, metavar="N", help=f"how many ({shown})")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=[*MODELS], metavar="NAME", help="(all)")
    given = parser.parse_args()
    print("\n".join(table({name: MODELS[name] for name in given.models}, given.ranks)))


if __name__ == "__main__":
    main()
