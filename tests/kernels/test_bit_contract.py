"""One result on every backend: the bits of the reference on the CPU, for each dtype, size, alignment and option.

The expected bits are computed once for a case; neither backend nor alignment may change them. Every tensor that an op
writes is poisoned before it and surrounded by sentinels.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_cases import FLOATS, SIZES, Averaged, EncodedShards, backend
from places import (
    ADAM_NAMES,
    ON_CUDA,
    SEED,
    SPECIFICATION,
    Place,
    check,
    everywhere,
    fetch,
    finite,
    four_slots,
    put,
    sizes_at,
    using,
    values,
)
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, RULES, codecs, dispatch

STREAMING = (1 << 22) + 77  # past the sizes at which outputs go around the cache
MILLION = 1_000_003

# ---- adam_step -------------------------------------------------------------------------------------------------------

# Elements by which grad, states and param_out miss the start of an allocation. The second keeps all at 16 bytes.
ALIGNMENTS = ((0, 0, 0), (8, 4, 8), (1, 0, 0), (0, 0, 1), (3, 1, 5))


@dataclass(frozen=True)
class Adam:
    """One call of `adam_step`. `scale` and `found_inf` None leave the argument out."""

    numel: int
    grad_dtype: torch.dtype
    param_dtype: torch.dtype | None
    scale: float | None = 0.37
    found_inf: float | None = None
    flags: bool = False

    def rows(self) -> Tensor:
        generator = torch.Generator().manual_seed(SEED + self.numel)
        return torch.randint(-1, 4, (-(-self.numel // ROW),), dtype=torch.int32, generator=generator)

    def run(self, place: Place, alignment: Sequence[int] = ALIGNMENTS[0]) -> list[Tensor]:
        """All that may be written, in the order of ADAM_NAMES, on the CPU. Flags that were not asked for are empty."""
        of_grad, of_state, of_param = alignment
        states = [put(x, place, of_state) for x in self.states()]
        param = None if self.param_dtype is None else put(values(self.numel, self.param_dtype, 5), place, of_param)
        flags = put(torch.zeros(4 if self.flags else 0, dtype=torch.int32), place)
        table = put(four_slots(), place)
        using(
            place,
            lambda: zero_kernels.adam_step(
                put(values(self.numel, self.grad_dtype, 1), place, of_grad),
                *states,
                param,
                put(self.rows(), place),
                table,
                grad_scale=None if self.scale is None else torch.tensor(self.scale, device=place.device),
                found_inf=None if self.found_inf is None else torch.tensor([self.found_inf], device=place.device),
                nonfinite_slots=flags if self.flags else None,
            ),
        )
        written = [*states, states[0] if param is None else param, flags]
        return [fetch(tensor) for tensor in written]

    def states(self) -> list[Tensor]:
        master, exp_avg, exp_avg_sq = (values(self.numel, torch.float32, which) for which in (2, 3, 4))
        return [master, exp_avg, exp_avg_sq.abs()]


@functools.lru_cache(maxsize=128)
def adam_specification(case: Adam) -> list[Tensor]:
    return case.run(SPECIFICATION)


def check_adam(case: Adam, place: Place, alignment: Sequence[int] = ALIGNMENTS[0]) -> None:
    check(case.run(place, alignment), adam_specification(case), ADAM_NAMES, f"{place}, {case}, {alignment=}")


@everywhere
@pytest.mark.parametrize("param_dtype", (*FLOATS, None), ids=str)
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_adam_step_of_every_pair_of_dtypes(
    grad_dtype: torch.dtype, param_dtype: torch.dtype | None, place: Place
) -> None:
    # Triton compiles for each alignment anew, about a second every time: not for every pair.
    alignments = (ALIGNMENTS[0], ALIGNMENTS[-1]) if grad_dtype == param_dtype else ALIGNMENTS[:1]
    sizes = (129, 4097, MILLION) if grad_dtype == param_dtype else (129, 4097)
    for numel, alignment in itertools.product(sizes_at(place, sizes), alignments):
        check_adam(Adam(numel, grad_dtype, param_dtype), place, alignment)


@everywhere
@pytest.mark.parametrize(("grad_dtype", "param_dtype"), [(torch.bfloat16, torch.bfloat16), (torch.float32, None)])
def test_adam_step_of_every_size_and_alignment(
    grad_dtype: torch.dtype, param_dtype: torch.dtype | None, place: Place
) -> None:
    for numel in sizes_at(place, (*SIZES, STREAMING)):
        for alignment in ALIGNMENTS if numel < 10_000 else ALIGNMENTS[:2]:
            check_adam(Adam(numel, grad_dtype, param_dtype), place, alignment)


@everywhere
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0, math.nan, -2.0])
def test_adam_step_with_every_option(found_inf: float | None, place: Place) -> None:
    for scale, flags in itertools.product((None, 1.0, 2.0**-16), (False, True)):
        check_adam(Adam(4097, torch.float16, torch.bfloat16, scale, found_inf, flags), place)


@everywhere
def test_a_skipped_step_leaves_every_bit_and_names_the_slots(place: Place) -> None:
    case = Adam(4097, torch.float16, torch.float16, found_inf=1.0, flags=True)
    before = [*case.states(), values(case.numel, torch.float16, 5)]
    *after, flags = case.run(place)
    check(after, before, ADAM_NAMES[:4], place)
    grad = torch.nn.functional.pad(values(case.numel, torch.float16, 1), (0, -case.numel % ROW)).view(-1, ROW)
    bad = case.rows()[~grad.isfinite().all(1)]
    assert flags.tolist() == [int((bad == slot).any()) for slot in range(4)], f"{place}, seed {SEED}"


@everywhere
def test_a_skipped_step_names_the_slots_that_their_factors_overflow(place: Place) -> None:
    """The scale and a slot's factor make one number first: 3e38 * (0.5 * 2) is finite, 3e38 * 2 is not."""
    table, flags = four_slots().clone(), put(torch.zeros(4, dtype=torch.int32), place)
    table[:, zero_kernels.HYPER_COLUMNS.index("grad_factor")] = torch.tensor([2.0, -4.0, 3e38, 0.0])
    grad, states = put(torch.full((4 * ROW,), 3e38), place), [put(torch.zeros(4 * ROW), place) for _ in range(3)]
    row_slot, one = put(torch.arange(4, dtype=torch.int32), place), torch.ones(1, device=place.device)
    arguments = (grad, *states, None, row_slot, put(table, place), one / 2, one, flags)
    using(place, lambda: zero_kernels.adam_step(*arguments))
    assert fetch(flags).tolist() == [0, 1, 1, 0], place


@everywhere
def test_adam_step_of_a_shard_that_is_all_padding(place: Place) -> None:
    states = [put(values(300, torch.float32, which), place) for which in (2, 3, 4)]
    rows, table = put(torch.full((3,), -1, dtype=torch.int32), place), put(torch.empty(0, 12), place)
    using(place, lambda: zero_kernels.adam_step(states[0].clone(), *states, None, rows, table))
    check([fetch(s) for s in states], [values(300, torch.float32, which) for which in (2, 3, 4)], ADAM_NAMES[:3], place)


# ---- foreach_step ----------------------------------------------------------------------------------------------------

# Every pair of dtypes, every second one misaligned.
PAIRS = [(grad, param, i % 2 * 3) for i, (grad, param) in enumerate(itertools.product(FLOATS, (*FLOATS, None)))]
FORMS = tuple(codecs.FORMS)
SHARDS = (2000, 1, 0, 127, 128, 129, 4097)


def shard_cases(rule: str, place: Place) -> Iterator[EncodedShards]:
    """Several shards in one call: state in fp32 with every pair of dtypes; each form of state beside each other, whole
    and split masters. Where kernels are compiled for each case, or interpreted, few of them."""
    few = place.backend == "triton"
    states = len(RULES[rule].states)
    for i, (grad, param, offset) in list(enumerate(PAIRS))[:: 4 if few else 1]:
        forms = [torch.float32] * states
        yield EncodedShards(rule, SHARDS, grad, param, offset, i % 4 != 0, forms=forms)
    for i in range(4 if few else 4 ** min(2, states)):
        low = (None, *codecs.LOWS)[i % 3]
        yield EncodedShards(
            *(rule, SHARDS, FLOATS[i % 3], torch.bfloat16 if low else (*FLOATS, None)[i // 3 % 4], i % 2 * 3),
            calm=i % 4 != 0,
            forms=[FORMS[(i // 4**at + i * few) % 4] for at in range(states)],
            low=low,
            huge=i % 4 == 2,
        )


def ran(op: Callable[..., object], lists: list[Any], written: list[Tensor], place: Place) -> list[Tensor]:
    """What the op makes of `written`, which `lists` has. Tensors start as far into an allocation as on the CPU."""
    moved: dict[int, Tensor] = {}

    def there(given: Any) -> Any:
        if isinstance(given, list):
            return [there(tensor) for tensor in given]
        return None if given is None else moved.setdefault(id(given), put(given, place, given.storage_offset()))

    arguments = there(lists)
    using(place, lambda: op(*arguments))
    return [fetch(moved[id(tensor)]) for tensor in written]


def after(shards: EncodedShards, place: Place, **shared: Tensor) -> list[Tensor]:
    op = functools.partial(torch.ops.zero_kernels.foreach_step, shards.rule)
    return ran(op, *shards.lists(**shared), place)


def check_shards(shards: EncodedShards, place: Place, what: object) -> None:
    want, got = (after(shards, where) for where in (SPECIFICATION, place))
    check(got, want, [f"tensor {i}" for i in range(len(want))], f"{place}, {shards.rule}, {what}")


@everywhere
@pytest.mark.parametrize("rule", RULES)
def test_foreach_step(rule: str, place: Place) -> None:
    for number, shards in enumerate(shard_cases(rule, place)):
        check_shards(shards, place, number)
    skipped = after(shards, place, found_inf=torch.ones(1))
    check(skipped, shards.written, [f"tensor {i}" for i in range(len(skipped))], f"{place}, {rule}, skipped")


@everywhere
def test_more_shards_than_a_launch_takes(place: Place) -> None:
    for grad, param in ((torch.bfloat16, torch.bfloat16), (torch.float16, None)):
        shards = EncodedShards("adamw", sizes_at(place, (2049,) * 70), grad, param, forms=[torch.float32] * 2)
        check_shards(shards, place, (grad, param))


@everywhere
@pytest.mark.parametrize("low", (None, *codecs.LOWS), ids=str)
@pytest.mark.parametrize("forms", (FLOATS[1:2] * 2, (torch.int8, torch.uint8), FLOATS[2:] * 2), ids=str)
def test_the_usual_forms_of_adamw(forms: tuple[torch.dtype, ...], low: torch.dtype | None, place: Place) -> None:
    """CUDA has kernels of their own for these. The first shard has no elements, so it has no address to tell by whether
    masters are split."""
    for calm, offset in ((False, 0), (True, 0), (True, 3)):
        shards = EncodedShards(
            *("adamw", sizes_at(place, (0, 2000, 1, 127, 129, 4097, 3 * 2048)), torch.bfloat16, torch.bfloat16, offset),
            calm=calm,
            huge=offset != 0,
            forms=forms,
            low=low,
        )
        check_shards(shards, place, (forms, low, calm, offset))


# ---- ema -------------------------------------------------------------------------------------------------------------


def check_averages(shards: Averaged, place: Place, what: object) -> None:
    want, got = (ran(zero_kernels.ema, *shards.lists(), where) for where in (SPECIFICATION, place))
    check(got, want, [f"average {i}" for i in range(len(want))], f"{place}, {what}")


@everywhere
@pytest.mark.parametrize("dtype", (*FLOATS, *codecs.LOWS), ids=str)
def test_ema(dtype: torch.dtype, place: Place) -> None:
    for each, offset in ((2, 0), (3, 3)):
        sizes = sizes_at(place, (2000, 0, 1, 127, 128, 129, 100_003))
        check_averages(Averaged(sizes, dtype, each, offset), place, (dtype, each, offset))


@everywhere
def test_ema_of_as_many_averages_as_wanted(place: Place) -> None:
    for each in (0, 1, 16, 33):  # CUDA takes 16 in a launch
        check_averages(Averaged((300, 2048), torch.float32, each), place, each)


# ---- pack and unpack -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packing:
    """Gradients of (numel, dtype), each `gap` elements after the one before; element 0 is the first gap's."""

    bucket_dtype: torch.dtype
    grads: tuple[tuple[int, torch.dtype], ...]
    gaps: tuple[int, ...]
    scale: float = 1 / 3
    back: float = 3.3

    def offsets(self) -> list[int]:
        ends = itertools.accumulate(gap + numel for gap, (numel, _) in zip(self.gaps, self.grads, strict=True))
        return [end - numel for end, (numel, _) in zip(ends, self.grads, strict=True)]

    def numel(self) -> int:
        return sum(self.gaps) + sum(numel for numel, _ in self.grads) + 131

    def run(self, place: Place, alignment: int = 0) -> list[Tensor]:
        """The bucket that pack makes, its flags, and what unpack makes of the bucket."""
        grads = [put(values(numel, dtype, i % 3), place, alignment) for i, (numel, dtype) in enumerate(self.grads)]
        bucket = put(torch.full((self.numel(),), math.nan, dtype=self.bucket_dtype), place, alignment)
        flags = put(torch.full((len(grads),), 5, dtype=torch.int32), place)
        back = [put(torch.full_like(values(numel, dtype, 0), 9.0), place, alignment) for numel, dtype in self.grads]

        def pack_and_unpack() -> None:
            zero_kernels.pack(grads, self.offsets(), bucket, self.scale, flags)
            zero_kernels.unpack(bucket, self.offsets(), back, self.back)

        using(place, pack_and_unpack)
        return [fetch(tensor) for tensor in (bucket, flags, *back)]


@functools.lru_cache(maxsize=64)
def packing_specification(case: Packing) -> list[Tensor]:
    return case.run(SPECIFICATION)


def check_packing(case: Packing, place: Place, alignment: int = 0) -> None:
    names = ("bucket", "nonfinite", *(f"unpacked[{i}]" for i in range(len(case.grads))))
    what = f"{place}, bucket of {case.bucket_dtype}, {len(case.grads)} gradients, first {case.grads[0]}, {alignment=}"
    check(case.run(place, alignment), packing_specification(case), names, what)


@everywhere
@pytest.mark.parametrize("bucket_dtype", FLOATS, ids=str)
def test_pack_and_unpack_of_every_size_and_dtype(bucket_dtype: torch.dtype, place: Place) -> None:
    """Two gradients of each size: one at the bucket's start or at an odd element, one behind a gap of odd size."""
    for numel, grad_dtype in itertools.product(sizes_at(place, (*SIZES, STREAMING)), FLOATS):
        if numel == STREAMING and grad_dtype != bucket_dtype:
            continue
        for start, alignment in ((0, 0), (3, 0), (0, 1)) if numel < 10_000 else ((0, 0), (3, 1)):
            grads = ((numel, grad_dtype), (numel // 3, torch.float32))
            check_packing(Packing(bucket_dtype, grads, (start, 131)), place, alignment)


@everywhere
@pytest.mark.parametrize("bucket_dtype", FLOATS, ids=str)
def test_pack_and_unpack_of_more_slots_than_a_launch_takes(bucket_dtype: torch.dtype, place: Place) -> None:
    random = torch.Generator().manual_seed(SEED)
    counts = (1, 128, 129, 1280, 1281, 2600) if bucket_dtype == torch.bfloat16 else (129, 2600)
    for count in counts if place.device == "cuda" else counts[:1]:  # a CPU has no launches
        numels = torch.randint(0, 300, (count,), generator=random).tolist()
        gaps = torch.randint(0, 20, (count,), generator=random).tolist()
        grads = tuple((numel, FLOATS[i % 3]) for i, numel in enumerate(numels))
        check_packing(Packing(bucket_dtype, grads, tuple(gaps)), place)


@everywhere
def test_pack_of_slots_within_and_across_tiles(place: Place) -> None:
    """Slots of one element to two tiles, with and without gaps, of three dtypes."""
    sizes = (1, 2, 127, 128, 0, 3, 511, 512, 513, 2047, 2048, 2049, 4096, 5, 1, 1, 1)
    gaps = (0, 3, 1, 0, 0, 0, 125, 0, 7, 1, 0, 2048, 0, 0, 0, 1, 0)
    check_packing(Packing(torch.float32, tuple((size, FLOATS[i % 3]) for i, size in enumerate(sizes)), gaps), place)


@everywhere
@pytest.mark.parametrize("scale", [1e-42, 1e300, math.nan])
def test_pack_by_odd_scales(scale: float, place: Place) -> None:
    """Below the least normal fp32, above the greatest, and not a number."""
    check_packing(Packing(torch.float32, ((700, torch.float32),), (0,), scale), place)


@everywhere
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_gradient_in_its_own_slot_is_scaled_in_place(dtype: torch.dtype, place: Place) -> None:
    for numel, start in itertools.product(sizes_at(place, (130, 4097, MILLION)), (0, 8, 7)):
        before = values(numel + start + 9, dtype, 1)
        bucket = put(before, place)
        slot = bucket[start : start + numel]
        using(place, lambda slot=slot, start=start, bucket=bucket: zero_kernels.pack([slot], [start], bucket, 0.125))
        want = torch.zeros_like(before)
        want[start : start + numel] = (before[start : start + numel].float() * 0.125).to(dtype)
        check([fetch(bucket)], [want], ["bucket"], f"{place}, {numel=}, {start=}")


@everywhere
def test_pack_of_nothing_zeroes_the_bucket(place: Place) -> None:
    bucket = put(torch.full((1000,), math.nan), place)
    using(place, lambda: zero_kernels.pack([], [], bucket))
    using(place, lambda: zero_kernels.unpack(bucket, [], []))
    assert not fetch(bucket).any()


@everywhere
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
def test_every_16_bit_value_widens_and_narrows_exactly(dtype: torch.dtype, place: Place) -> None:
    """All 65536 values, the fp32 midpoints between them and their neighbours, against torch's casts on the CPU."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide = every.float()
    ordered = wide[wide.isfinite()].sort().values
    middle = ((ordered[1:].double() + ordered[:-1].double()) / 2).float()
    top = torch.tensor([torch.finfo(dtype).max]) * (1 + torch.finfo(dtype).eps / 4)
    exact = torch.cat((wide, middle, top, -top))
    for source in (exact, *(torch.nextafter(exact, torch.tensor(to)) for to in (math.inf, -math.inf))):
        narrow = put(torch.zeros(len(source), dtype=dtype), place)
        using(place, lambda source=source, narrow=narrow: zero_kernels.pack([put(source, place)], [0], narrow))
        check([fetch(narrow)], [source.to(dtype)], ["narrowed"], place)
    widened = put(torch.zeros(len(every)), place)
    using(place, lambda: zero_kernels.pack([put(every, place)], [0], widened))
    check([fetch(widened)], [wide], ["widened"], place)


# ---- grad_stats ------------------------------------------------------------------------------------------------------

# Around a block of 8192, and past the 1024 blocks whose partials fill the lanes of the second stage.
STATS_SIZES = (*SIZES, 8191, 8192, 8193, 100_000, 1024 * 8192, 1024 * 8192 + 1)


@functools.lru_cache(maxsize=256)
def stats_specification(numel: int, dtype: torch.dtype, summable: bool, norm: float) -> Tensor:
    with zero_kernels.use_backend("reference"):
        return zero_kernels.grad_stats(stats_input(numel, dtype, summable), norm)


@functools.lru_cache(maxsize=8)
def stats_input(numel: int, dtype: torch.dtype, summable: bool) -> Tensor:
    x = values(numel, dtype, 6)
    return finite(x) if summable else x


@everywhere
@pytest.mark.parametrize("summable", [True, False], ids=["finite", "with inf and NaN"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grad_stats_of_every_size(dtype: torch.dtype, summable: bool, place: Place) -> None:
    sizes = STATS_SIZES if place.device == "cuda" else STATS_SIZES[:-2]
    for numel in sizes_at(place, sizes if summable else SIZES):
        for offset, norm in itertools.product((0, 3) if numel < 1_000_000 else (0,), (1.0, 2.0, math.inf)):
            shard = put(stats_input(numel, dtype, summable), place, offset)
            with backend(place.isa or place.backend):
                got = zero_kernels.grad_stats(shard, norm).cpu()
            want = stats_specification(numel, dtype, summable, norm)
            check([got], [want], ["stats"], f"{place}, {numel=}, {dtype}, {norm=}, {offset=}")


@everywhere
@pytest.mark.parametrize("count", [1, 2, 65, 1024, 1025, 2100])
def test_grad_stats_of_several_shards(count: int, place: Place) -> None:
    """Each as if it were alone: mixed dtypes, empty ones among them, starting at odd elements."""
    if place.device == "cpu" and count > 70:
        return  # a CPU has no launches
    longest = 20_011 if count < 100 else 1_009
    numels = [(i * 7919) % longest if i % 5 else 0 for i in range(count)]
    shards = [values(numel, FLOATS[i % 3], 6) for i, numel in enumerate(numels)]
    for norm in (1.0, 2.0, math.inf):
        with zero_kernels.use_backend("reference"):
            want = zero_kernels.grad_stats(shards, norm)
        there = [put(shard, place, i % 4) for i, shard in enumerate(shards)]
        with backend(place.isa or place.backend):
            got = zero_kernels.grad_stats(there, norm).cpu()
        check([got], [want], ["stats"], f"{place}, {count} shards, {norm=}")


# Of three whole blocks and a tail: where one value is not finite.
STATS_PLACES = {"first block": 5, "middle block": 8192 + 77, "last whole block": 3 * 8192 - 1, "tail": 3 * 8192 + 4}


@everywhere
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_grad_stats_counts_one_value_wherever_it_is(dtype: torch.dtype, bad: float, place: Place) -> None:
    """Where a block's partial is finite nothing is counted, and what its count would be is undefined."""
    for at, norm in itertools.product(STATS_PLACES.values(), (1.0, 2.0, math.inf)):
        shard = torch.full((3 * 8192 + 5,), 0.5, dtype=dtype)
        shard[at] = bad
        with zero_kernels.use_backend("reference"):
            want = zero_kernels.grad_stats(shard, norm)
        with backend(place.isa or place.backend):
            got = zero_kernels.grad_stats(put(shard, place), norm).cpu()
        check([got], [want], ["stats"], f"{place}, {at=}, {norm=}")
        assert got[1] == 1


@everywhere
@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grad_stats_counts_no_finite_value_whose_sum_overflows(dtype: torch.dtype, norm: float, place: Place) -> None:
    """A block's sum; the sum of blocks that are each finite; either beside a shard with a NaN, and beside an inf."""
    in_a_block, over_blocks = (3e38, 3e34) if norm == 1.0 else (1e30, 1.7e17)
    shards = [torch.full((3 * 8192 + 5,), big, dtype=dtype) for big in (in_a_block, over_blocks, 1.0, 1.0, in_a_block)]
    shards[2][8192] = math.nan
    shards[4][-1] = -math.inf
    with backend(place.isa or place.backend):
        got = zero_kernels.grad_stats([put(shard, place) for shard in shards], norm).cpu()
    with zero_kernels.use_backend("reference"):
        check([got], [zero_kernels.grad_stats(shards, norm)], ["stats"], place)
    assert got[:, 0].isfinite().tolist() == [False, False, False, True, False]
    assert got[:, 1].tolist() == [0, 0, 1, 0, 1]


@everywhere
def test_grad_stats_of_another_norm(place: Place) -> None:
    """Summed in float64, so no bits are promised."""
    shard = finite(values(4097, torch.float32, 6)).clamp(-1e6, 1e6)
    with backend(place.isa or place.backend):
        total, count = zero_kernels.grad_stats(put(shard, place), 3.0).tolist()
    assert total == pytest.approx(shard.double().abs().pow(3).sum().item(), rel=1e-6) and count == 0


# ---- hyper_table -----------------------------------------------------------------------------------------------------


def hyper_inputs(slots: int, groups: int | None) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Random coefficients, each slot's group, step counts up to 2^32 - 1 and which slots are active."""
    random = torch.Generator().manual_seed(SEED + slots)
    columns = slots if groups is None else groups
    uniform = torch.rand(7, columns, dtype=torch.float64, generator=random)
    uniform[1:3] = 1 - 10 ** (-4 * uniform[1:3])  # betas from 0 to 0.9999
    uniform[3] *= 1e-6
    uniform[5:] = (uniform[5:] > 0.5).double()
    group = None if groups is None else torch.randint(0, groups, (slots,), dtype=torch.int32, generator=random)
    step = torch.exp2(32 * torch.rand(slots, dtype=torch.float64, generator=random)).floor()
    return uniform, group, step, torch.rand(slots, generator=random) < 0.8


@everywhere
@pytest.mark.parametrize("groups", [None, 1, 7])
@pytest.mark.parametrize("slots", [0, 1, 5, 129, 5000])
def test_hyper_table(slots: int, groups: int | None, place: Place) -> None:
    for with_active in (True, False):

        def make(where: Place, with_active: bool = with_active) -> Tensor:
            coefficients, group, step, active = (
                None if x is None else put(x, where) for x in hyper_inputs(slots, groups)
            )
            out = put(torch.full((slots, len(zero_kernels.HYPER_COLUMNS)), math.nan), where)
            using(
                where,
                lambda: torch.ops.zero_kernels.hyper_table(
                    coefficients, group, step, active if with_active else None, out
                ),
            )
            return fetch(out)

        check([make(place)], [make(SPECIFICATION)], ["table"], f"{place}, {with_active=}")


@everywhere
def test_hyper_table_of_the_usual_settings(place: Place) -> None:
    """Through the face, against float64 arithmetic written out: a device's library may not do it in fp32."""
    steps = [1, 2, 10, 1000, 100_000, 10_000_000]
    with backend(place.isa or place.backend):
        table = zero_kernels.hyper_table(3e-4, (0.9, 0.999), 1e-8, 0.1, steps, device=place.device).cpu()
    for row, step in zip(table.tolist(), steps, strict=True):
        got = dict(zip(zero_kernels.HYPER_COLUMNS, row, strict=True))
        assert got["step_size"] == pytest.approx(3e-4 / (1 - 0.9**step), rel=2**-23)
        assert got["bias_correction2_sqrt"] == pytest.approx(math.sqrt(1 - 0.999**step), rel=2**-23)
        assert got["decay"] == torch.tensor(1 - 3e-4 * 0.1, dtype=torch.float64).float().item()


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_backend_of_a_gpu_is_usable() -> None:
    assert zero_kernels.available_backends("cuda")[:3] == [*ON_CUDA], dispatch.unusable_backends("cuda")
