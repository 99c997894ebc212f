"""The kernels under Triton's interpreter: the bits of the reference, for every dtype, size, alignment and table."""

import itertools
import math
from unittest import mock

import pytest
import torch
from cases import FLOATS, EncodedShards, Shards, at_offset, awkward, dominated, same_bits
from interpreter import interpreted
from torch import Tensor

import zero_kernels
from zero_kernels import HYPER_COLUMNS, ROW, RULES, codecs, reference, triton
from zero_kernels.reference import STATS_BLOCK

pytestmark = pytest.mark.kernels

SIZES = (0, 1, 7, 127, 128, 129, 4095, 4097, 100_003)
NAMES = ("reference", "triton")

# Four slots: decoupled, decoupled with decay, L2 that maximizes, and one that is not active.
SETTINGS = {
    "lr": [1e-3, 1e-2, 0.1, 1.0],
    "betas": ([0.9, 0.3, 0.5, 0.9], [0.999, 0.99, 0.9, 0.95]),
    "eps": [1e-8, 1e-6, 0.0, 1e-8],
    "weight_decay": [0.0, 0.1, 0.1, 0.2],
    "step": [1, 2, 1000, 3],
    "decoupled": [True, True, False, True],
    "active": [True, True, True, False],
    "maximize": [False, False, True, False],
}
FACTORS = [1.0, 0.37, 0.7, 0.0]


def table() -> Tensor:
    with zero_kernels.use_backend("reference"):
        made = zero_kernels.hyper_table(**SETTINGS)
    made[:, HYPER_COLUMNS.index("grad_factor")] *= torch.tensor(FACTORS)
    return made


def check(want: list[Tensor], got: list[Tensor], what: object) -> None:
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        assert same_bits(a, b), f"tensor {i} differs: {what}"


def steps(
    grad: Tensor, param: torch.dtype | None, offset: int = 0, row_slot: Tensor | None = None, **extra: Tensor
) -> list[list[Tensor]]:
    """Master, exp_avg, exp_avg_sq, param_out: before a step, and after one by each backend."""
    numel = grad.numel()
    if row_slot is None:
        generator = torch.Generator().manual_seed(numel)
        row_slot = torch.randint(-1, 4, (-(-numel // ROW),), dtype=torch.int32, generator=generator)
    before = [
        awkward(numel, torch.float32, 2),
        awkward(numel, torch.float32, 3),
        awkward(numel, torch.float32, 4).abs(),
    ]
    if param is not None:
        before.append(awkward(numel, param, 5))
    results = [before]
    for name in NAMES:
        copies = [at_offset(tensor, offset) for tensor in before]
        with zero_kernels.use_backend(name):
            zero_kernels.adam_step(
                grad, *(copies if param is not None else [*copies, None]), row_slot, table(), **extra
            )
        results.append(copies)
    return results


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@interpreted
def test_adam_step(dtype: torch.dtype, numel: int) -> None:
    small = numel < 10_000
    for param, offset in itertools.product((*FLOATS, None) if small else (dtype,), (0, 3) if small else (0,)):
        _, want, got = steps(awkward(numel, dtype, 1, offset), param, offset, grad_scale=torch.tensor(0.37))
        check(want, got, (param, offset))


@pytest.mark.parametrize("rule", RULES)
@interpreted
def test_foreach_step(rule: str) -> None:
    """Every dtype, tails and whole rows, misaligned, several shards, one of them empty; and a step that is skipped."""
    pairs = ((torch.float16, torch.bfloat16, 3), (torch.bfloat16, None, 0), (torch.float32, torch.float32, 1))
    for averages, (grad, param, offset) in enumerate(pairs):
        shards = Shards(rule, (0, 2000, 2 * ROW, 5), grad, param, offset, averages)
        check(shards.run("reference"), shards.run("triton"), (grad, param))
    for found_inf, calm in ((1.0, True), (0.0, True), (0.0, False)):
        shards = Shards(rule, (0, 2000, 2 * ROW, 5), *pairs[calm], averages=1, calm=calm)
        stats = [[torch.full((-(-grad.numel() // ROW), 5), 7.0) for grad in shards.grads] for _ in NAMES]
        for name, of_backend in zip(NAMES, stats, strict=True):
            shards.run(name, found_inf=torch.tensor([found_inf]), row_stats=of_backend)
        check(*stats, ("row_stats", found_inf, calm))
        assert any(rows.any() for rows in stats[1]) == (found_inf == 0)
    marks = [torch.zeros(4, dtype=torch.int32) for _ in NAMES]
    for name, slots in zip(NAMES, marks, strict=True):
        check(shards.written, shards.run(name, found_inf=torch.ones(1), nonfinite_slots=slots), "skipped")
    assert torch.equal(*marks) and marks[0].any()


@pytest.mark.parametrize("rule", RULES)
@interpreted
def test_encoded_states_and_split_masters(rule: str) -> None:
    """Every form for every state; tails and whole rows, misaligned, averages in fp32 and bf16, measured rows; and a
    skipped step."""
    forms = tuple(codecs.FORMS)
    for number, form in enumerate(forms):
        given = (form, forms[(number + 1 + number // 2) % 4], forms[number - 1])
        grad, param, low = (
            FLOATS[number % 3],
            (torch.bfloat16, None)[number % 2],
            (torch.int16, None, torch.int8, None)[number],
        )
        shards = EncodedShards(
            *(rule, (0, 2000, 2 * ROW, 5), grad, param, number, (2, 1, 0, 1)[number]),
            calm=number < 2,
            average_dtype=torch.bfloat16 if number % 3 == 0 else torch.float32,
            forms=given,
            low=low,
            stochastic=number != 1,
        )
        check(shards.measured("reference"), shards.measured("triton"), (given, low))
        check(shards.written, shards.run("triton", found_inf=torch.ones(1)), "skipped")
    # What is behind the last element is NaN then, and the elements themselves are inf, as is their scale.
    shards = EncodedShards(rule, (5,), torch.float32, None, calm=True, forms=(torch.int8, torch.uint8, torch.uint8))
    shards.row_slots = [torch.zeros(1, dtype=torch.int32)]
    wide = {"grad_scale": torch.tensor(math.inf)}
    check(shards.run("reference", **wide), shards.run("triton", **wide), "inf")
    shards = EncodedShards(
        rule, (300,), torch.float32, None, calm=True, huge=True, forms=(torch.int8, torch.uint8, torch.uint8)
    )
    shards.row_slots = [torch.zeros(3, dtype=torch.int32)]
    check(shards.run("reference"), shards.run("triton"), "huge")


@interpreted
def test_adam_step_without_a_scale() -> None:
    _, want, got = steps(awkward(4097, torch.float16, 1), torch.bfloat16)
    check(want, got, "no grad_scale")


@pytest.mark.parametrize("flag", [1.0, math.nan, -2.0, 0.0, -0.0])
@interpreted
def test_found_inf_leaves_everything_and_names_the_slots(flag: float) -> None:
    grad = torch.ones(ROW * 5 + 3, dtype=torch.float16)
    grad[ROW * 2 + 5] = math.inf  # slot 1
    grad[ROW * 3] = math.nan  # padding
    grad[ROW * 5 + 2] = math.nan  # slot 3, which is not active, in the tail
    row_slot = torch.tensor([0, 1, 1, -1, 2, 3], dtype=torch.int32)
    slots = torch.tensor([7, 0, 0, 0], dtype=torch.int32)
    extra = {"found_inf": torch.tensor([flag]), "nonfinite_slots": slots}
    before, want, got = steps(grad, torch.bfloat16, row_slot=row_slot, **extra)
    check(want, got, flag)
    if flag == 0:
        assert slots.tolist() == [7, 0, 0, 0]
    else:
        check(before, got, flag)
        assert slots.tolist() == [7, 1, 0, 1]


@interpreted
def test_an_overflow_of_the_scaled_gradient_counts() -> None:
    """The scale and a slot's factor make one number first: 3e38 * (0.5 * 2) is finite, 3e38 * 2 is not."""
    for scale, factors, marked in (
        (2.0, [1.0, 1.0, 1.0, 1.0], [1, 1, 1, 0]),
        (2.0, [0.5, 0.37, -0.7, 0.0], [0, 0, 1, 0]),
        (0.5, [2.0, -2.0, 4.0, 1.0], [0, 0, 1, 0]),
    ):
        slots = torch.zeros(4, dtype=torch.int32)
        arguments = {"grad_scale": torch.tensor(scale), "found_inf": torch.ones(()), "nonfinite_slots": slots}
        with mock.patch.dict(globals(), NAMES=("triton",), FACTORS=factors):
            steps(torch.full((3 * ROW,), 3e38), None, row_slot=torch.arange(3, dtype=torch.int32), **arguments)
        assert slots.tolist() == marked, (scale, factors)


@interpreted
def test_an_empty_table_is_left_alone() -> None:
    state = [torch.ones(ROW) for _ in range(4)]
    row_slot = torch.full((1,), -1, dtype=torch.int32)
    with zero_kernels.use_backend("triton"):
        zero_kernels.adam_step(torch.ones(ROW), *state, row_slot, torch.empty(0, 12))
    assert all(tensor.eq(1).all() for tensor in state)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@interpreted
def test_pack_and_unpack(dtype: torch.dtype, numel: int) -> None:
    """`dtype` is the bucket's. Gaps before, between and behind; the bucket itself starts at any element."""
    small = numel < 10_000
    for grad_dtype, offset in itertools.product(FLOATS if small else (dtype,), (0, 3) if small else (0,)):
        grads = [awkward(numel, grad_dtype, 1, offset), awkward(numel // 3, torch.float32, 2), torch.empty(0)]
        offsets = [offset, offset + numel + 130, offset + numel + 130 + numel // 3]
        results = []
        for name in NAMES:
            bucket = torch.full((2 * numel + 300 + offset,), 7.0, dtype=dtype)[offset:]
            flags = torch.full((3,), 5, dtype=torch.int32)
            back = [torch.full_like(grad, 9.0) for grad in grads]
            with zero_kernels.use_backend(name):
                zero_kernels.pack(grads, offsets, bucket, 1 / 3, flags)
                zero_kernels.unpack(bucket, offsets, back, 3.3)
            assert flags.tolist() == [int(not grad.isfinite().all()) for grad in grads], (name, grad_dtype, offset)
            results.append([bucket, *back])
        check(*results, (grad_dtype, offset))


@interpreted
def test_a_tile_of_many_slots() -> None:
    """Slots of one element to two tiles, with and without gaps, of three dtypes; every third is not finite."""
    sizes = [1, 2, 127, 128, 0, 3, 511, 512, 513, 2047, 2048, 2049, 4096, 5, 1, 1, 1]
    gaps = [0, 3, 1, 0, 0, 0, 125, 0, 7, 1, 0, 2048, 0, 0, 0, 1, 0]
    grads = [torch.full((size,), i + 1.0, dtype=FLOATS[i % 3]) for i, size in enumerate(sizes)]
    for grad in grads[::3]:
        grad[-1:] = math.inf
    offsets, end = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        offsets.append(end + gap)
        end += gap + size
    results = []
    for name in NAMES:
        bucket, flags = torch.full((end + 77,), math.nan), torch.ones(len(grads), dtype=torch.int32)
        back = [torch.zeros_like(grad) for grad in grads]
        with zero_kernels.use_backend(name):
            zero_kernels.pack(grads, offsets, bucket, 1.0, flags)
            zero_kernels.unpack(bucket, offsets, back)
        results.append([bucket, flags.float()])
        check(grads, back, name)
    check(*results, "pack")


@interpreted
def test_no_gradients_zero_the_bucket() -> None:
    bucket = torch.ones(5000)
    with zero_kernels.use_backend("triton"):
        zero_kernels.pack([], [], bucket)
        assert not bucket.any()
        bucket.fill_(1)
        zero_kernels.unpack(bucket, [], [])
        zero_kernels.pack([], [], bucket[:0])
    assert bucket.eq(1).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@interpreted
def test_a_gradient_in_its_own_slot_is_scaled_in_place(dtype: torch.dtype) -> None:
    bucket = awkward(10_000, dtype, 1).clone()
    want = (bucket.float() * 0.125).to(dtype)
    want[:7], want[9_007:] = 0, 0
    with zero_kernels.use_backend("triton"):
        zero_kernels.pack([bucket[7:9_007].view(90, 100)], [7], bucket, 0.125)
    assert same_bits(want, bucket)


@pytest.mark.parametrize("scale", [1e-42, 1e300, math.nan])
@interpreted
def test_odd_scales(scale: float) -> None:
    """Below the least normal fp32, above the greatest, and not a number."""
    results = []
    for name in NAMES:
        bucket = torch.empty(700)
        with zero_kernels.use_backend(name):
            zero_kernels.pack([awkward(700, torch.float32, 1)], [0], bucket, scale)
        results.append([bucket])
    check(*results, scale)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@interpreted
def test_16_bit_casts_are_exact(dtype: torch.dtype) -> None:
    """All values of the dtype, the fp32 midpoints between them, the midpoints' neighbours, and a sample of all fp32."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = values[values.isfinite()].float().sort().values
    middle = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    top = torch.tensor([torch.finfo(dtype).max]).float() * (1 + torch.finfo(dtype).eps / 4)
    exact = torch.cat([middle, top, -top])
    sample = torch.arange(-(2**31), 2**31, 32771, dtype=torch.int64).to(torch.int32).view(torch.float32)
    wide = torch.empty(len(values))
    with zero_kernels.use_backend("triton"):
        zero_kernels.pack([values], [0], wide)
        assert same_bits(wide, values.float())
        for source in (exact, *(torch.nextafter(exact, torch.tensor(to)) for to in (math.inf, -math.inf)), sample):
            narrow = torch.empty(len(source), dtype=dtype)
            zero_kernels.pack([source], [0], narrow)
            assert same_bits(narrow, source.to(dtype))


def tame(x: Tensor) -> Tensor:
    """With 1 for all whose sum would not be finite."""
    return torch.where(x.isfinite() & (x.abs() < 1e15), x, torch.ones_like(x))


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("wild", [False, True])
@interpreted
def test_grad_stats(wild: bool, norm: float) -> None:
    """All shards in one call: dtypes, sizes and offsets mixed, empty ones first, between and last."""
    sizes = (0, 1, 7, 127, 129, 4097, STATS_BLOCK - 1, 0, STATS_BLOCK, STATS_BLOCK + 1, 20_000)
    shards = [torch.empty(0)]
    for i, (dtype, numel) in enumerate(itertools.product(FLOATS, sizes)):
        shards.append(awkward(numel, dtype, i, offset=3 * (i % 2)))
    shards.append(torch.empty(0))
    shards = shards if wild else [tame(shard) for shard in shards]
    check(list(reference.grad_stats(shards, norm)), list(triton.OPS["grad_stats"](shards, norm)), norm)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@interpreted
def test_grad_stats_of_one_shard(dtype: torch.dtype) -> None:
    shard = tame(awkward(100_003, dtype, 1))
    with zero_kernels.use_backend("triton"):
        got = zero_kernels.grad_stats(shard)
    assert same_bits(got, reference.grad_stats([shard], 2.0)[0])


@pytest.mark.parametrize(("wild", "norm"), [(False, 1.0), (True, 2.0), (False, math.inf), (True, math.inf)])
@interpreted
def test_partials_are_added_in_order(wild: bool, norm: float) -> None:
    """The launches after the first by themselves, for shards too large to interpret that on; two shards are large. They
    add alike for the norms 1 and 2."""
    sizes = [1, 0, 1024, 16 * 1024 + 1, 1025, 0, STATS_BLOCK + 1, 16 * 1024, 35 * 1024 + 7, 3, 0]
    rows = [(0, 0, sum(sizes[:i]), 0, 0) for i in range(len(sizes) + 1)]
    partials = awkward(rows[-1][2], torch.float32, 1).abs() if wild else dominated(rows[-1][2], 2)
    counts = torch.arange(len(partials), dtype=torch.int32) % STATS_BLOCK
    want = []
    for of_shard, of_count in zip(partials.split(sizes), counts.split(sizes), strict=True):
        lanes = torch.nn.functional.pad(of_shard, (0, -len(of_shard) % 1024)).view(1, -1, 1024)
        total = reference._max_abs(of_shard) if norm == math.inf else reference._fold(lanes)[0]
        want.append(torch.stack([total, of_count.sum().float()]))
    out = torch.empty(len(sizes), 2)
    partials = partials.view(torch.int32) if norm == math.inf else partials
    norm = triton.grad_stats.INF if norm == math.inf else int(norm)
    triton.grad_stats._combine(rows, torch.tensor(rows), partials.clone(), counts.clone(), out, norm)
    check(want, list(out), (wild, norm))


@interpreted
def test_another_norm_is_the_references() -> None:
    shards = [tame(awkward(1000, torch.float32, 1))]
    assert same_bits(triton.OPS["grad_stats"](shards, 3.0), reference.grad_stats(shards, 3.0))


@pytest.mark.parametrize("slots", [0, 1, 5, 127, 128, 129, 300])
@interpreted
def test_hyper_table(slots: int) -> None:
    generator = torch.Generator().manual_seed(slots)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    step = torch.exp2(uniform(slots) * 32).floor()
    step[:5] = torch.tensor([1, 2, 3, 2**31, 2**32 - 1])[:slots]
    active = uniform(slots) < 0.5
    group = torch.randint(0, 7, (slots,), generator=generator, dtype=torch.int32)
    for groups, of_slot in ((7, group), (slots, None)):
        coefficients = uniform(7, groups)
        coefficients[1:3] = 1 - coefficients[1:3] ** 8  # betas, many of them close to 1
        coefficients[5:] = (coefficients[5:] < 0.5).double()
        for mask in (active, None):
            want, got = torch.full((slots, 12), 7.0), torch.full((slots, 12), 7.0)
            reference.hyper_table(coefficients, of_slot, step, mask, want)
            triton.OPS["hyper_table"](coefficients, of_slot, step, mask, got)
            assert same_bits(want, got), (groups, mask is None)
