"""Where Muon's matrices lie at stages 1 and 2, for so many ranks, by shapes alone: buckets, padding, and who has most.

    python benchmarks/muon_on_paper.py --ranks 8 64 1024 16384

For each model and number of ranks there is a line where all of them share. Where that does not fit, there is another
one, where fewer share and the others are replicas: a mesh of two dimensions. Replicas may share the work. Its last
column says from which speed of the link between them on that takes less time than it saves.
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
"""The iteration is a small part of a long step, so what one rank has to do beside the others matters less."""
MOST_BYTES = 16e9
"""Of the largest bucket. A rank has two buffers as large, which are then two fifths of a GPU with 80 GB."""

PEAK = 400e12
"""Operations a second in bf16 that a GPU is taken to make in the iteration: an assumption, not a measurement."""

Matrix = tuple[int, int]


@dataclass(frozen=True)
class OnPaper:
    """The buckets of Muon's matrices.

    Attributes:
        shards: ranks that share.
        largest: elements of the largest bucket.
        padding: elements beside those of the matrices, over theirs.
        imbalance: what the rank with most to do multiplies, over the mean.
        idle: ranks without a matrix.
        numel: elements that a rank has of matrices, on average.
        multiplied: what the rank with most to do multiplies.
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
        """Bytes a second of a rank's link, from which on replicas save time where they share the work: an all-reduce of
        what a rank has sends it twice, but for the part of one."""
        sent = 2 * ITEMSIZE * self.numel * (replicas - 1) / replicas
        saved = 2 * self.multiplied * (1 - 1 / min(replicas, PARAMETERS_A_RANK)) / PEAK
        return sent / saved


def costs_of(matrices: Sequence[Matrix]) -> dict[int, int]:
    """Multiplications of the iteration of each, by Muon's own options."""
    return {number: Muon().cost(matrix) for number, matrix in enumerate(matrices)}


def layouts_of(matrices: Sequence[Matrix], shards: int) -> list[BucketLayout]:
    """The buckets of bf16 ``matrices``, in the order in which the first backward makes their gradients."""
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
    """Those of blocks, from the last to the first."""
    return (shapes.block_matrices * shapes.layers)[::-1]


def choices(matrices: Sequence[Matrix], ranks: int) -> Iterator[OnPaper]:
    """All ranks share; and if that does not fit, the most that do, by halves."""
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
