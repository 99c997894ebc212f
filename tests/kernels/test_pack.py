"""`pack` and `unpack`: casts, scales, gaps, flags, the same bits on every backend."""

import itertools
import math

import pytest
import torch
from cases import FLOATS, ISAS, SIZES, awkward, backend, same_bits, threads

import zero_kernels

NAMES = ["reference", *ISAS]


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bucket_dtype", FLOATS, ids=str)
def test_same_bits_on_every_backend(bucket_dtype: torch.dtype, numel: int) -> None:
    for grad_dtype, offset in itertools.product(FLOATS, (0, 3) if numel < 10_000 else (3,)):
        grads = [awkward(numel, grad_dtype, 1, offset), awkward(numel // 3, torch.float32, 2)]
        offsets = [offset, offset + numel + 130]
        results = {}
        for name in NAMES:
            bucket = torch.full((2 * numel + 300,), 7.0, dtype=bucket_dtype)[1:]
            flags = torch.full((2,), 5, dtype=torch.int32)
            back = [torch.full_like(grad, 9.0) for grad in grads]
            with backend(name):
                zero_kernels.pack(grads, offsets, bucket, 1 / 3, flags)
                zero_kernels.unpack(bucket, offsets, back, 3.3)
            results[name] = [bucket, *back]
            assert flags.tolist() == [int(not grad.isfinite().all()) for grad in grads], name
        for isa in ISAS:
            for want, got in zip(results["reference"], results[isa], strict=True):
                assert same_bits(want, got), f"{isa} differs, {grad_dtype=}, {offset=}"


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


@pytest.mark.parametrize("name", NAMES)
def test_no_gradients_zero_the_bucket(name: str) -> None:
    bucket = torch.ones(300)
    with backend(name):
        zero_kernels.pack([], [], bucket)
        zero_kernels.unpack(bucket, [], [])
    assert not bucket.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_gradient_in_its_own_slot_is_scaled_in_place(name: str, dtype: torch.dtype) -> None:
    bucket = awkward(100_000, dtype, 1).clone()
    want = (bucket.float() * 0.125).to(dtype)
    want[:7], want[90_007:] = 0, 0
    with backend(name):
        zero_kernels.pack([bucket[7:90_007].view(300, 300)], [7], bucket, 0.125)
    assert same_bits(want, bucket)


@pytest.mark.parametrize("isa", ISAS)
def test_flags_of_a_gradient_that_threads_share(isa: str) -> None:
    for bad in (0, 499_999, 999_999):
        grad = torch.zeros(1_000_000, dtype=torch.bfloat16)
        grad[bad] = math.nan
        flags = torch.zeros(2, dtype=torch.int32)
        with threads(2), backend(isa):
            zero_kernels.pack([torch.zeros(3), grad], [0, 128], torch.empty(1_000_128), 1.0, flags)
        assert flags.tolist() == [0, 1]


@pytest.mark.parametrize("isa", ISAS)
def test_every_16_bit_value_widens_and_narrows_exactly(isa: str) -> None:
    """All fp16 and bf16 values, the fp32 midpoints between them, and their neighbours, against torch's casts."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        values = patterns.view(dtype)
        wide = torch.empty(len(values))
        with backend(isa):
            zero_kernels.pack([values], [0], wide)
            assert same_bits(wide, values.float())
            finite = values[values.isfinite()].float().sort().values
            middle = ((finite[1:].double() + finite[:-1].double()) / 2).float()
            top = torch.tensor([torch.finfo(dtype).max]).float() * (1 + torch.finfo(dtype).eps / 4)
            exact = torch.cat([wide, middle, top, -top])
            near = [torch.nextafter(exact, torch.tensor(to)) for to in (math.inf, -math.inf)]
            for source in (exact, *near):
                narrow = torch.empty(len(source), dtype=dtype)
                zero_kernels.pack([source], [0], narrow)
                assert same_bits(narrow, source.to(dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_fp32_patterns_narrow_exactly(isa: str) -> None:
    patterns = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).to(torch.int32).view(torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        narrow = torch.empty(len(patterns), dtype=dtype)
        with backend(isa):
            zero_kernels.pack([patterns], [0], narrow)
        assert same_bits(narrow, patterns.to(dtype))


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
