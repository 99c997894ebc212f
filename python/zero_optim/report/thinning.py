"""Of very many steps the few points that a chart can show."""

from __future__ import annotations

import math
from collections.abc import Sequence

BUCKETS = 640
"""About one for each pixel of a chart's width."""
MEANS = 160
"""Fewer, for what is averaged."""

Point = tuple[float, float | None]


def bucket_size(points: int, buckets: int = BUCKETS) -> int:
    """How many points fall into one bucket: 1 where all of them can be shown."""
    return 1 if points <= 2 * buckets else math.ceil(points / buckets)


def extremes(points: Sequence[Point], buckets: int = BUCKETS) -> list[Point]:
    """The least and the most of each bucket, in their order; all where they are few.

    A bucket of which a value is missing keeps that gap. The first and the last point stay.
    """
    size = bucket_size(len(points), buckets)
    if size == 1:
        return list(points)
    kept = [points[0]]
    for start in range(0, len(points), size):
        kept += _extremes_of(points[start : start + size])
    kept.append(points[-1])
    return sorted(dict(kept).items())


def _extremes_of(bucket: Sequence[Point]) -> list[Point]:
    there = [(value, x) for x, value in bucket if value is not None]
    gaps = [(x, None) for x, value in bucket if value is None][:1]
    if not there:
        return list(gaps)
    return [*((x, value) for value, x in (min(there), max(there))), *gaps]


def means(points: Sequence[Point], buckets: int = MEANS) -> list[Point]:
    """The mean of each bucket at its middle; all points where they are few. Missing values count for nothing."""
    size = bucket_size(len(points), buckets)
    if size == 1:
        return list(points)
    found: list[Point] = []
    for start in range(0, len(points), size):
        bucket = points[start : start + size]
        there = [value for _, value in bucket if value is not None]
        found.append((bucket[len(bucket) // 2][0], math.fsum(there) / len(there) if there else None))
    return found
