"""What all ranks have seen in their backwards, brought together in one small vector.

A rank's observation has an entry a parameter. If every rank had those of all others, that would be ranks x parameters:
100 MB on each of 16,384 ranks, for 700 parameters. Only rank 0's order matters, and the largest counts. So one vector
is maximised over the ranks, of three fp32 values a parameter and one more::

    [how often it came at most ... | whether it came ... | its place in rank 0's order, from 1 ... | cut short]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.sharding import Sharding
from .readiness import Observation


def merged(own: Observation, sharding: Sharding, count: int) -> list[Observation]:
    """Collective. Rank 0's order, and what any rank has seen of ``count`` parameters: as good as all their reports."""
    sharding.everyone.gather_objects(None, "the first step")  # raises unless all ranks are here
    vector = _vector(own, count, orders=sharding.rank == 0).to(sharding.device)
    sharding.everyone.exchange(vector, maximum=True, kind="construction")
    return _reports(vector, count)


def _vector(own: Observation, count: int, *, orders: bool) -> Tensor:
    """[3 * count + 1] fp32. ``orders``: whether this rank's order counts."""
    vector = torch.zeros(3 * count + 1, dtype=torch.float32)
    times, came, places, cut_short = vector.split([count, count, count, 1])
    for index, most in own.counts.items():
        times[index] = most
    came[list(own.order)] = 1.0
    for place, index in enumerate(own.order if orders else (), start=1):
        places[index] = place  # of one that came several times the last
    cut_short[0] = own.cut_short
    return vector


def _reports(vector: Tensor, count: int) -> list[Observation]:
    values = [int(value) for value in vector.tolist()]
    times, came, places = (values[start : start + count] for start in range(0, 3 * count, count))
    order = sorted((index for index, place in enumerate(places) if place), key=places.__getitem__)
    anywhere = tuple(index for index, seen in enumerate(came) if seen)
    counts = {index: most for index, most in enumerate(times) if most}
    cut_short = bool(values[-1])
    return [Observation(tuple(order), counts, cut_short), Observation(anywhere, counts, cut_short)]
