"""`grad_stats`: the fixed order of additions, the counts, the norms."""

import math

import numpy as np
import pytest
import torch
from kernel_cases import ISAS, awkward, backend, same_bits, threads

import zero_kernels

NAMES = ["reference", *ISAS]
NORMS = (1.0, 2.0, math.inf)


def finite(numel: int, dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    x = awkward(numel, dtype, 1, offset)
    return torch.where(x.isfinite() & (x.abs() < 1e18), x, torch.ones_like(x))


def fold(lanes: np.ndarray) -> np.float32:
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def ordered_sum(terms: np.ndarray, block: int) -> list[np.float32]:
    """One partial a block of `block` terms: 1024 lanes down the block in order, then folded by halves."""
    partials = []
    for begin in range(0, len(terms), block):
        lanes = np.zeros(1024, np.float32)
        for k in range(begin, min(begin + block, len(terms)), 1024):
            part = terms[k : min(k + 1024, begin + block)]
            lanes[: len(part)] += part
        partials.append(fold(lanes))
    return partials


@pytest.mark.parametrize("numel", [1, 1025, 8192, 50_000])
def test_the_order_is_the_written_one(numel: int) -> None:
    shard = finite(numel, torch.float32)
    x = shard.numpy()
    for norm, terms in ((1.0, np.abs(x)), (2.0, x * x)):
        partials = np.array(ordered_sum(terms, 8192), np.float32)
        (want,) = ordered_sum(partials, len(partials) + 1024)
        with backend("reference"):
            assert zero_kernels.grad_stats(shard, norm)[0].item() == want


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_counts(name: str) -> None:
    shard = torch.full((20_000,), 0.5, dtype=torch.bfloat16)
    with backend(name):
        assert zero_kernels.grad_stats(shard).tolist() == [5000, 0]
        assert zero_kernels.grad_stats(shard, 1.0).tolist() == [10_000, 0]
        assert zero_kernels.grad_stats(shard, math.inf).tolist() == [0.5, 0]
        cubes, none = zero_kernels.grad_stats(shard, 3.0).tolist()
        assert cubes == pytest.approx(2500, rel=1e-6) and none == 0
        shard[[3, 9_000, 19_999]] = torch.tensor([math.inf, -math.inf, math.inf], dtype=torch.bfloat16)
        assert zero_kernels.grad_stats(shard).tolist() == [math.inf, 3]
        assert zero_kernels.grad_stats(shard, math.inf).tolist() == [math.inf, 3]
        shard[11] = math.nan
        for norm in NORMS:
            value, count = zero_kernels.grad_stats(shard, norm).tolist()
            assert math.isnan(value) and count == 4


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_shard(name: str) -> None:
    for norm in (*NORMS, 3.0):
        with backend(name):
            assert zero_kernels.grad_stats(torch.empty(0), norm).tolist() == [0, 0]


@pytest.mark.parametrize("isa", ISAS)
def test_thread_count_does_not_change_the_numbers(isa: str) -> None:
    shard = finite(1_000_003, torch.float32)
    results = []
    for count in (1, 2, 3):
        with threads(count), backend(isa):
            results.append(zero_kernels.grad_stats(shard))
    assert all(same_bits(results[0], other) for other in results)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="norm_type must be positive or inf, got 0"):
        zero_kernels.grad_stats(torch.ones(3), 0.0)
    with pytest.raises(TypeError, match="shard must be float16 or bfloat16 or float32, got float64"):
        zero_kernels.grad_stats(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match="shard must be flat"):
        zero_kernels.grad_stats(torch.ones(3, 3))
    with pytest.raises(ValueError, match="at least one shard"):
        zero_kernels.grad_stats([])
    with pytest.raises(TypeError, match=r"shards\[1\] must be float16 or bfloat16 or float32, got int64"):
        zero_kernels.grad_stats([torch.ones(3), torch.ones(3, dtype=torch.int64)])
