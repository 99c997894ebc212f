"""Runs the CUDA kernels' bodies, compiled for this processor under sanitizers, and compares them with the reference.

    LD_PRELOAD=libasan.so python tests/cuda/bodies.py FOLDER OPS

`FOLDER` holds the libraries made from `tests/cuda/host`. Prints how many cases of each op agreed; stops at the first
that does not.
"""

import ctypes
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from kernel_cases import FLOATS, Averaged, EncodedShards, at_offset, awkward, dominated, rule_table, same_bits  # noqa: E402

from zero_kernels import ROW, RULES, codecs, reference  # noqa: E402

DTYPE_CODE = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
FORM_CODE = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
SIZES = (0, 1, 7, 127, 128, 129, 2047, 2048, 4097, 20_001)
ADDRESS = ctypes.c_void_p
LONG = ctypes.c_int64


def fresh(numel: int, dtype: torch.dtype, seed: int, offset: int = 0) -> Tensor:
    """Awkward values in an allocation that ends where they do, so that one element more is seen to be read."""
    return at_offset(awkward(numel, dtype, seed), offset)


def at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def demand(holds: bool, *case: object) -> None:
    if not holds:
        raise SystemExit(f"differs from the reference: {case}")


# ---- foreach_step ---------------------------------------------------------------------------------------------------


def step_body(folder: Path):
    body = ctypes.CDLL(str(folder / "step.so")).step
    body.argtypes = [
        ctypes.c_char_p,
        ADDRESS,
        ctypes.c_int,
        ADDRESS,
        *[ctypes.c_int] * 3,
        *[ADDRESS] * 4,
        ctypes.c_int32,
        *[ADDRESS] * 2,
        ctypes.c_int,
        ADDRESS,
    ]
    body.restype = ctypes.c_int
    return body


def one_shard(folder: Path) -> int:
    """AdamW, of every pair of dtypes, size and misalignment."""
    body, ran = step_body(folder), 0
    shifted = [(4097, (1,) * 6), (2048, (3,) * 6), (4100, (4,) * 6)]
    shifted += [(2048, alone(place)) for place in range(5)]
    for (grad_dtype, out_dtype), (numel, offset) in itertools.product(
        itertools.product(FLOATS, (None, *FLOATS)), [(size, (0,) * 6) for size in SIZES] + shifted
    ):
        for found_inf in (0.0, math.nan) if numel in (129, 4097) else (0.0,):
            shard = step_arguments("adamw", grad_dtype, out_dtype, numel, offset, found_inf)
            compare(body, "adamw", [shard], grad_dtype, out_dtype, found_inf)
            ran += 1
    return ran


def foreach_step(folder: Path) -> int:
    body, ran = step_body(folder), 0
    several = [(0, 1, 0, 4097, 127, 2048, 0), (0, 0), (2049,) * 33, tuple(range(0, 70 * ROW, ROW)), (20_001, 5)]
    dtypes = ((torch.float16, torch.bfloat16), (torch.bfloat16, None), (torch.float32, torch.float32))
    for (number, rule), sizes in itertools.product(enumerate(RULES), several):
        for grad_dtype, out_dtype in dtypes if rule == "adamw" else dtypes[number % 3 :][:1]:
            for found_inf in (0.0, 1.0) if len(sizes) == 2 else (0.0,):
                # Of every second shard one tensor is misaligned, of each another.
                shards = [
                    step_arguments(rule, grad_dtype, out_dtype, numel, alone(i // 2 % 6 if i % 2 else -1), 0.0)
                    for i, numel in enumerate(sizes)
                ]
                launches = compare(body, rule, shards, grad_dtype, out_dtype, found_inf)
                demand(launches == -(-len(sizes) // 28), "launches", launches, sizes)
                ran += 1
    return ran


def alone(place: int) -> tuple[int, ...]:
    """Offsets by which one tensor is misaligned, of grad, master, param_out and three states."""
    return tuple(int(i == place) for i in range(6))


def step_arguments(
    rule: str,
    grad_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    numel: int,
    offset: tuple[int, ...],
    found_inf: float,
) -> list[Tensor | None]:
    """Grad, master, param_out, row_slot, then the states."""
    row_slot = (torch.arange(-(-numel // ROW)) * 7 % 5 - 1).to(torch.int32)  # -1 is padding; slot 3 is not active
    grad = fresh(numel, grad_dtype, 1, offset[0])
    if found_inf and numel == 4097:
        grad.nan_to_num_()  # only slot 0's factor makes it infinite, and that of bf16 and fp32
    out = None if out_dtype is None else fresh(numel, out_dtype, 6, offset[2])
    states = [
        at_offset(awkward(numel, torch.float32, 3 + i).abs(), offset[3 + i]) for i in range(len(RULES[rule].states))
    ]
    return [grad, fresh(numel, torch.float32, 2, offset[1]), out, row_slot, *states]


def compare(
    body,
    rule: str,
    shards: list[list[Tensor | None]],
    grad_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    found_inf: float,
) -> int:
    """Run the kernel and the reference on copies, demand the same bits, and tell how many launches it took."""
    hyper, found = rule_table(RULES[rule]), torch.tensor([found_inf])
    hyper[0, RULES[rule].columns.index("grad_factor")] = 37.0
    scale = torch.tensor([0.25]) if shards[0][0].numel() % 2 else None
    flags, expected = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    twins = [[None if tensor is None else tensor.clone() for tensor in shard] for shard in shards]
    tensors = [tensor for shard in shards for tensor in shard]
    numels = [shard[0].numel() for shard in shards]
    launches = body(
        *(rule.encode(), addresses(tensors), len(shards[0]) - 4),
        *(ctypes.cast((LONG * len(numels))(*numels), ADDRESS), len(shards)),
        *(DTYPE_CODE[grad_dtype], DTYPE_CODE[out_dtype or torch.float32]),
        *(at(hyper), at(scale), at(found), at(flags), len(hyper)),
        *(ctypes.cast((ctypes.c_int * 3)(), ADDRESS), None, 0, None),
    )
    grads, masters, outs, row_slots, *states = (list(column) for column in zip(*twins, strict=True))
    of_shards = [tensor for of_shard in zip(*states, strict=True) for tensor in of_shard]
    outs = [] if out_dtype is None else outs
    lists = (grads, masters, of_shards, outs, row_slots)
    reference.foreach_step(rule, *lists, hyper, scale, found, expected)
    for number, (ours, theirs) in enumerate(zip(shards, twins, strict=True)):
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same = a is None or (torch.equal(a, b) if place == 3 else same_bits(a, b))
            demand(same, rule, "shard", number, "tensor", place, grad_dtype, out_dtype, numels, found_inf)
    demand(torch.equal(flags, expected), "flags", rule, grad_dtype, numels, found_inf)
    return launches


USUAL = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.int8, torch.uint8)]
"""Forms of AdamW's moments that have kernels of their own, with bf16 gradients and parameters."""


@dataclass(frozen=True)
class EncodedCase:
    """`number`: by which sizes and values are chosen."""

    rule: str
    number: int
    forms: Sequence[torch.dtype]
    low: torch.dtype | None
    grad: torch.dtype
    param: torch.dtype | None

    @property
    def sizes(self) -> tuple[int, ...]:
        return (0, 1, 4097, 127, 2048) if self.number else (129,) * 29

    def shards(self) -> EncodedShards:
        number = self.number
        shards = EncodedShards(
            *(self.rule, self.sizes, self.grad, self.param, number % 2),
            calm=number in (2, 4),
            huge=number == 4,
            forms=self.forms,
            low=self.low,
        )
        if self.low and number == 3 and self.rule != "adamw":  # masters stay, and all are ties
            for grad, low, high in zip(shards.grads, shards.masters, shards.params, strict=True):
                grad.zero_()
                low.fill_(torch.iinfo(low.dtype).min)
                high.fill_(1.5)
        return shards


def encoded_cases() -> Iterator[EncodedCase]:
    forms = tuple(codecs.FORMS)
    for (at_rule, rule), number, low in itertools.product(enumerate(RULES), range(5), (None, *codecs.LOWS)):
        given = [forms[(number + i * (1 + number % 2)) % 4] for i in range(len(RULES[rule].states))]
        param = torch.bfloat16 if low else (*FLOATS, None)[(number + at_rule) % 4]
        yield EncodedCase(rule, number, given, low, FLOATS[(number + at_rule) % 3], param)
    for given, low, number in itertools.product(USUAL, (None, *codecs.LOWS), range(5)):
        yield EncodedCase("adamw", number, given, low, torch.bfloat16, torch.bfloat16)


def encoded_step(folder: Path) -> int:
    """Every form for every state, beside others; tails, misaligned shards, a skipped
    step, huge gradients; and the usual forms of AdamW."""
    body, ran = step_body(folder), 0
    for case in encoded_cases():
        rule, sizes, count, shards = case.rule, case.sizes, len(case.forms), case.shards()
        marks = [torch.zeros(4, dtype=torch.int32) for _ in range(2)]
        # Where the scale is inf, elements that do not exist are NaN, and the others inf.
        found, scale = torch.tensor([float(case.number == 1)]), torch.tensor([math.inf if case.number == 2 else 0.25])
        lists, want = shards.lists(grad_scale=scale, found_inf=found, nonfinite_slots=marks[0])
        reference.foreach_step(rule, *lists)
        lists, got = shards.lists()
        grads, masters, states, params, rows, table, *_, scales, keys = lists
        left = list(scales or ())
        of_states = [left.pop(0) if state.element_size() == 1 else None for state in states]
        tensors, of_scales = [], []
        for i in range(len(sizes)):
            own = states[i * count : (i + 1) * count]
            tensors += [grads[i], masters[i], params[i] if params else None, rows[i], *own]
            of_scales += [*of_states[i * count : (i + 1) * count], *[None] * (3 - count)]
        launches = body(
            *(rule.encode(), addresses(tensors), count, ctypes.cast((LONG * len(sizes))(*sizes), ADDRESS)),
            *(len(sizes), DTYPE_CODE[case.grad], DTYPE_CODE[case.param or torch.float32]),
            *(at(table), at(scale), at(found), at(marks[1]), len(table)),
            ctypes.cast((ctypes.c_int * 3)(*(FORM_CODE[x] for x in case.forms)), ADDRESS),
            *(addresses(of_scales), case.low.itemsize if case.low else 0, addresses(keys) if keys else None),
        )
        for place, (a, b) in enumerate(zip(want, got, strict=True)):
            demand(same_bits(a, b), "encoded_step", place, case)
        demand(torch.equal(*marks), "flags", case)
        demand(launches == -(-len(sizes) // 28), "launches", launches, case)
        ran += 1
    return ran


def addresses(tensors: list[Tensor | None]) -> ctypes.c_void_p:
    return ctypes.cast((ctypes.c_void_p * len(tensors))(*map(at, tensors)), ADDRESS)


# ---- ema ------------------------------------------------------------------------------------------------------------


def ema(folder: Path) -> int:
    """Also of a launch that has some of the averages, as where there are more than it takes."""
    body = ctypes.CDLL(str(folder / "ema.so")).ema
    body.argtypes = [*[ADDRESS] * 5, LONG, *[ctypes.c_int] * 5]
    ran = 0
    for dtype, each, offset in itertools.product((*FLOATS, *codecs.LOWS), (1, 3, 16), (0, 1, 2, 4)):
        lists, ours = Averaged(SIZES, dtype, each, offset).lists()
        _, masters, params, rows, rates = lists
        expected = [average.clone() for average in ours]
        reference.ema(expected, *lists[1:])
        for i, numel in enumerate(SIZES):
            of_shard, low = ours[i * each : (i + 1) * each], 0 if dtype in FLOATS else dtype.itemsize
            for first, count in ((0, 1), (1, each - 1)) if each == 3 else ((0, each),):
                body(
                    *(at(masters[i]), at(params[i]) if low else None, addresses(of_shard[first : first + count])),
                    *(rates.data_ptr() + 4 * first, at(rows[i]), numel, count, each, len(rates), low),
                    DTYPE_CODE[torch.bfloat16 if low else dtype],
                )
            demand(
                all(map(same_bits, of_shard, expected[i * each : (i + 1) * each])), "ema", dtype, each, numel, offset
            )
            ran += 1
    return ran


# ---- pack and unpack ------------------------------------------------------------------------------------------------


def pack(folder: Path) -> int:
    body = ctypes.CDLL(str(folder / "pack.so")).pack
    body.argtypes = [ctypes.c_int, *[ADDRESS] * 4, ctypes.c_int, ADDRESS, LONG, ctypes.c_int, ctypes.c_float, ADDRESS]
    body.restype = ctypes.c_int
    ran = 0
    for bucket_dtype, (sizes, numel, rows, offset) in itertools.product(FLOATS, pack_layouts()):
        grads, offsets = pack_arguments(sizes, numel, rows, offset)
        bucket = fresh(numel, bucket_dtype, 9, offset % 3)
        flags = torch.zeros(len(grads), dtype=torch.int32)
        expected, expected_flags = bucket.clone(), torch.full_like(flags, 7)
        launches = call_pack(body, 0, grads, offsets, bucket, 0.3, flags)
        reference.pack(grads, offsets, expected, 0.3, expected_flags)
        case = (bucket_dtype, len(sizes), numel, rows, offset)
        demand(same_bits(bucket, expected) and torch.equal(flags, expected_flags), "pack", *case)
        demand(launches == max(1, -(-len(grads) // 1280)), "launches", launches, *case)
        unpacked = [grad.clone() for grad in grads]
        call_pack(body, 1, grads, offsets, bucket, 3.0, None)
        reference.unpack(bucket, offsets, unpacked, 3.0)
        demand(all(map(same_bits, grads, unpacked)), "unpack", *case)
        ran += 2
    in_place = fresh(5000, torch.bfloat16, 3)
    expected = in_place.clone()
    reference.pack([expected[128:4200].clone()], [128], expected, 0.5, None)
    call_pack(body, 0, [in_place[128:4200]], [128], in_place, 0.5, None)
    demand(same_bits(in_place, expected), "pack in place")
    return ran + 1


def pack_layouts() -> Iterator[tuple[list[int], int, bool, int]]:
    """(sizes of the gradients, numel of the bucket, whether each starts on a row, how far pointers are shifted)."""
    yield [], 0, True, 0
    yield [], 300, True, 0
    yield [0, 1, 0, 127, 128, 129, 0], 1024, True, 0
    for offset in (0, 1, 4, 8):
        yield [20_000, 1, 9000, 33, 5], 30_000, True, offset
        yield [20_000, 1, 9000, 33, 5], 29_100, False, offset
    yield [3] * 130, 460, False, 0  # more than the small table holds
    yield [5] * 1281 + [2000], 9100, False, 1  # more than one launch takes
    yield [5] * 1280 + [30_000], 38_000, False, 0  # the second begins at no chunk of the bucket


def pack_arguments(sizes: list[int], numel: int, rows: bool, offset: int) -> tuple[list[Tensor], list[int]]:
    grads, offsets, end = [], [], 0 if rows else 3
    for i, size in enumerate(sizes):
        grad = fresh(size, FLOATS[i % 3], i % 16, offset)
        grads.append(torch.nan_to_num(grad) if i % 2 else grad)
        offsets.append(end)
        end += -(-size // ROW) * ROW if rows else size + i % 2
    if end > numel:
        raise SystemExit(f"the layout needs {end} elements, not {numel}")
    return grads, offsets


def call_pack(body, unpack: int, grads, offsets, bucket: Tensor, scale: float, flags: Tensor | None) -> int:
    count = len(grads)
    pointers = (ctypes.c_void_p * count)(*(grad.data_ptr() for grad in grads))
    dtypes = (ctypes.c_int * count)(*(DTYPE_CODE[grad.dtype] for grad in grads))
    begins = (LONG * count)(*offsets)
    ends = (LONG * count)(*(begin + grad.numel() for begin, grad in zip(offsets, grads, strict=True)))
    tables = [ctypes.cast(table, ADDRESS) for table in (pointers, dtypes, begins, ends)]
    code = DTYPE_CODE[bucket.dtype]
    return body(unpack, *tables, count, at(bucket), bucket.numel(), code, scale, at(flags))


# ---- grad_stats -----------------------------------------------------------------------------------------------------


def grad_stats(folder: Path) -> int:
    body = stats_body(folder)
    ran = 0
    sizes = (0, 1, 7, 1023, 1025, 8191, 8192, 8193, 100_003)
    for dtype, norm, numel, offset, special in itertools.product(
        FLOATS, (1.0, 2.0, math.inf), sizes, (0, 1), (True, False)
    ):
        shard = fresh(numel, dtype, 7, offset)
        shard = shard if special else at_offset(torch.nan_to_num(shard, 0.1, 0.2, -0.3).clamp(-9, 9), offset)
        demand(same_bits(*both_stats(body, [shard], norm)), dtype, norm, numel, offset, special)
        ran += 1
    # More partials than a lane of the second stage takes at a time; every dtype and empty ones in one call; more shards
    # than one launch takes.
    many_blocks = [torch.randn(8192 * 1100 + 5).bfloat16()]
    mixed = [fresh(size, FLOATS[i % 3], i) for i, size in enumerate((0, 9000, 0, 0, 1, 8192, 30_000, 0))]
    many_shards = [fresh(5, FLOATS[i % 3], i % 7) for i in range(1030)]
    for shards in (many_blocks, mixed, many_shards):
        for norm in (1.0, 2.0, math.inf):
            demand(same_bits(*both_stats(body, shards, norm)), len(shards), norm)
            ran += 1
    return ran + partials_of_many_blocks(body)


def partials_of_many_blocks(body) -> int:
    """Given partials in place of shards with gigabytes. A shard with more than 16 rows of 1024 partials is large."""
    few, large = [5, 0, 1025, 16 * 1024], [0, 16 * 1024 + 1, 3, 0, 16 * 1024, 65 * 1024 + 7, 17 * 1024, 1, 0]
    ran = 0
    for sizes, values, norm in itertools.product((few, large), ("finite", "wild", "huge"), (1.0, 2.0, math.inf)):
        demand(same_bits(*both_combined(body, sizes, values, norm)), sizes, values, norm)
        ran += 1
    # The last shard has launches of its own, without a large one. They find the scratch as the first left it.
    sizes = [1] * 500 + [17 * 1024] + [2] * 523 + [1]
    out, expected = both_combined(body, sizes, "finite", 2.0)
    demand(same_bits(out[:1024], expected[:1024]), "a large shard among small ones")
    return ran + 1


def both_combined(body, sizes: list[int], values: str, norm: float) -> tuple[Tensor, Tensor]:
    """From as many partials as `sizes` has for each shard. Where those are finite, no count is written."""
    numel = sum(sizes)
    partials = {
        "finite": lambda: dominated(numel, 11),
        "wild": lambda: fresh(numel, torch.float32, 11).abs(),
        "huge": lambda: torch.full((numel,), 1e38),  # finite, with sums that are not
    }[values]()
    nonfinite = (torch.arange(numel) % 8192 + 1).to(torch.int32)
    expected = torch.stack(
        [combined(*of_shard, norm) for of_shard in zip(partials.split(sizes), nonfinite.split(sizes), strict=True)]
    )
    out = torch.full((len(sizes), 2), math.nan)
    numels = [max(0, 8192 * size - 5) for size in sizes]
    launches = call_stats(body, None, numels, norm, partials, nonfinite, out)
    lots = [sizes[i : i + 1024] for i in range(0, len(sizes), 1024)]
    demand(launches == sum(2 + (max(lot) > 16 * 1024) for lot in lots), "launches", launches, len(sizes))
    return out, expected


def combined(partials: Tensor, nonfinite: Tensor, norm: float) -> Tensor:
    """[2]: the sum or the largest of a shard's partials, and what they count."""
    rows = torch.nn.functional.pad(partials, (0, -len(partials) % 1024)).view(1, -1, 1024)
    total = reference._max_abs(partials) if norm == math.inf else reference._fold(rows)[0]
    return torch.stack([total, nonfinite[~partials.isfinite()].sum().float()])


def stats_body(folder: Path):
    body = ctypes.CDLL(str(folder / "grad_stats.so")).grad_stats
    body.argtypes = [*[ADDRESS] * 3, ctypes.c_int, ctypes.c_double, *[ADDRESS] * 3]
    return body


def both_stats(body, shards: list[Tensor], norm: float) -> tuple[Tensor, Tensor]:
    count, blocks = len(shards), sum(-(-shard.numel() // 8192) for shard in shards)
    partials, out = torch.full((blocks,), math.nan), torch.full((count, 2), math.nan)
    nonfinite = torch.full((blocks,), 77, dtype=torch.int32)
    launches = call_stats(body, shards, [shard.numel() for shard in shards], norm, partials, nonfinite, out)
    demand(launches == 2 * -(-count // 1024), "launches", launches, count)
    return out, reference.grad_stats(shards, norm)


def call_stats(
    body, shards: list[Tensor] | None, numels: list[int], norm: float, partials: Tensor, nonfinite: Tensor, out: Tensor
) -> int:
    count = len(numels)
    pointers = shards and (ctypes.c_void_p * count)(*(shard.data_ptr() for shard in shards))
    dtypes = (ctypes.c_int * count)(*(DTYPE_CODE[shard.dtype] for shard in shards or ()))
    tables = [ctypes.cast(table, ADDRESS) for table in (pointers, dtypes, (LONG * count)(*numels))]
    return body(*tables, count, norm, at(partials), at(nonfinite), at(out))


# ---- hyper_table ----------------------------------------------------------------------------------------------------


def hyper(folder: Path) -> int:
    body = ctypes.CDLL(str(folder / "hyper_table.so")).hyper_table
    body.argtypes = [ADDRESS, LONG, *[ADDRESS] * 4, LONG]
    generator = torch.Generator().manual_seed(0)
    ran = 0
    for slots, grouped in itertools.product((0, 1, 127, 129, 1000), (True, False)):
        groups = 5 if grouped else slots
        coefficients = torch.rand(7, groups, generator=generator, dtype=torch.float64)
        coefficients[1:3] = 1 - torch.rand(2, groups, generator=generator, dtype=torch.float64) * 1e-2
        coefficients[5:].round_()
        group = torch.randint(groups, (slots,), generator=generator).to(torch.int32) if grouped else None
        step = torch.randint(0, 2**32 - 1, (slots,), generator=generator).double()
        step[: slots // 2] = torch.randint(0, 300, (slots // 2,), generator=generator).double()
        active = torch.rand(slots, generator=generator) < 0.5 if grouped else None
        out, expected = torch.full((slots, 12), math.nan), torch.full((slots, 12), math.nan)
        body(at(coefficients), groups, at(group), at(step), at(active), at(out), slots)
        reference.hyper_table(coefficients, group, step, active, expected)
        demand(same_bits(out, expected), slots, grouped)
        ran += 1
    return ran


def overrun(folder: Path) -> int:
    """Reads one element too many on purpose: the sanitizer must stop it."""
    shard, partials, nonfinite, out = (
        torch.zeros(1024),
        torch.zeros(1),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(2),
    )
    return call_stats(stats_body(folder), [shard], [1025], 2.0, partials, nonfinite, out)


OPS = {
    "one_shard": one_shard,
    "foreach_step": foreach_step,
    "encoded_step": encoded_step,
    "ema": ema,
    "pack": pack,
    "grad_stats": grad_stats,
    "hyper_table": hyper,
    "overrun": overrun,
}

if __name__ == "__main__":
    for op in sys.argv[2:]:
        print(op, OPS[op](Path(sys.argv[1])), flush=True)
