"""`pack` and `unpack`: casts, scales, gaps, flags, the same bits on every backend."""

import math

import pytest
import torch
from kernel_cases import ISAS, backend, threads

import zero_kernels

NAMES = ["reference", *ISAS]


@pytest.mark.parametrize("name", NAMES)
def test_values(name: str) -> None:
    grads = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(0), torch.tensor([8.0], dtype=torch.float16)]
    bucket = torch.full((8,), math.nan, dtype=torch.bfloat16)
    with backend(name):
        zero_kernels.pack(grads, [1, 6, 6], bucket, 0.5)
    assert bucket.tolist() == [0, 0.5, 1, 1.5, 2, 0, 4, 0]
    with backend(name):
        zero_kernels.unpack(bucket, [1, 6, 6], grads, 4.0)
    assert grads[0].tolist() == [[2, 4], [6, 8]] and grads[2].tolist() == [16]


@pytest.mark.parametrize("isa", ISAS)
def test_flags_of_a_gradient_that_threads_share(isa: str) -> None:
    for bad in (0, 499_999, 999_999):
        grad = torch.zeros(1_000_000, dtype=torch.bfloat16)
        grad[bad] = math.nan
        flags = torch.zeros(2, dtype=torch.int32)
        with threads(2), backend(isa):
            zero_kernels.pack([torch.zeros(3), grad], [0, 128], torch.empty(1_000_128), 1.0, flags)
        assert flags.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("grads", "offsets", "error", "message"),
    [
        ([torch.zeros(4)], [0, 4], ValueError, "offsets must have one entry a gradient"),
        ([torch.zeros(4), torch.zeros(4)], [0, 3], ValueError, r"offsets\[1\] = 3 must be at least 4"),
        ([torch.zeros(4)], [-1], ValueError, r"offsets\[0\] = -1 must be at least 0"),
        ([torch.zeros(4)], [5], ValueError, "offsets reach to element 9, but bucket has 8"),
        ([torch.zeros(4, dtype=torch.float64)], [0], TypeError, r"grads\[0\] must be float16 or bfloat16 or float32"),
        ([torch.zeros(2, 3).T], [0], ValueError, r"grads\[0\] must be contiguous"),
    ],
)
def test_wrong_arguments_are_named(grads: list, offsets: list, error: type, message: str) -> None:
    bucket = torch.ones(8)
    with pytest.raises(error, match=message):
        zero_kernels.pack(grads, offsets, bucket)
    with pytest.raises(error, match=message):
        zero_kernels.unpack(bucket, offsets, grads)
    assert bucket.tolist() == [1] * 8


def test_wrong_flags_are_named() -> None:
    with pytest.raises(ValueError, match="nonfinite must have 1 elements, got 2"):
        zero_kernels.pack([torch.zeros(4)], [0], torch.zeros(4), 1.0, torch.zeros(2, dtype=torch.int32))
