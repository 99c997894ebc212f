"""`grad_stats` in Triton: one launch over the blocks of all shards, one over the shards; docs/ops.md has the order.

Where a shard has many partials, a launch between the two has many programs add them to one row.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_kernels import reference
from zero_kernels.capture import is_capturing
from zero_kernels.reference import STATS_BLOCK, STATS_LANES
from zero_kernels.triton.common import EXACT, nonfinite, times, widen
from zero_kernels.triton.table import BF16, DTYPES, FP16, elements, upload

# Eight lanes a thread: 16 bytes of a 16-bit type, twice that of fp32.
WARPS = 4

# Row k of a shard's partials has a term for each lane, as a row of elements has. One program combines a shard, with
# loads of eight rows in flight. For many rows that is slow, so one more launch first spreads the lanes over programs.
LARGE = 16 * STATS_LANES  # partials; a shard that has more of them is large
LARGE_LANES = 32  # lanes of a large shard for each program: 128 bytes of a row
LARGE_ROWS = 32  # rows whose loads are in flight together

INF = 0  # the norm inf, for a kernel; 1 and 2 are themselves
FIELDS = 5  # of a shard in the table

# Few programs run at once. Without maxnreg ptxas was seen to take 64 registers, and to wait for the first loads before
# issuing the last.
ROOMY: dict[str, Any] = {"maxnreg": 255, **EXACT}

_LANES = tl.constexpr(STATS_LANES)
_DEPTH = tl.constexpr(STATS_BLOCK // STATS_LANES)
_BLOCK = tl.constexpr(STATS_BLOCK)
_LARGE = tl.constexpr(LARGE)
_LARGE_LANES = tl.constexpr(LARGE_LANES)
_LARGE_ROWS = tl.constexpr(LARGE_ROWS)
_INF = tl.constexpr(INF)
_FIELDS = tl.constexpr(FIELDS)


@triton.jit
def _fold(lanes):
    """[1024] fp32 to a scalar: lane j gets lane j + h, for h = 512, 256, ... 1. Each sum is of two numbers.

    For the first three sums a thread gets both numbers of all its pairs: one exchange in place of one for each sum.
    """
    lanes = tl.permute(tl.reshape(lanes, (2, 2, 2, 128)), (3, 2, 1, 0))
    for _ in tl.static_range(3):
        one, other = tl.split(lanes)
        lanes = one + other
    lanes = tl.reshape(lanes, (2, 2, 2, 2, 2, 2, 2))
    for _ in tl.static_range(7):
        lanes = tl.sum(lanes, axis=0)
    return lanes


@triton.jit
def _block(address, begin, numel, DTYPE: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr):
    """The partial of a block of elements."""
    lane = tl.arange(0, _LANES)
    total = tl.zeros([_LANES], tl.float32)
    largest = tl.zeros([_LANES], tl.int32)
    for k in tl.static_range(_DEPTH):
        at = begin + k * _LANES + lane
        x = elements(address, at, DTYPE, WHOLE)
        x = widen(tl.load(x) if WHOLE else tl.load(x, mask=at < numel, other=0.0))
        if NORM == _INF:
            largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        elif NORM == 1:
            total = total + tl.abs(x)
        else:
            total = total + times(x, x)
    return tl.max(largest, axis=0) if NORM == _INF else _fold(total)


@triton.jit(noinline=True)
def _count_nonfinite(address, begin, numel, bad_count, DTYPE: tl.constexpr):
    """The count of a block, read once more. Inlined, it takes up to 128 registers of all blocks' threads, not 96."""
    lane = tl.arange(0, _LANES)
    bad = tl.zeros([_LANES], tl.int32)
    for k in range(_DEPTH):
        at = begin + k * _LANES + lane
        x = tl.load(elements(address, at, DTYPE, False), mask=at < numel, other=0.0)
        bad += nonfinite(widen(x)).to(tl.int32)
    tl.store(bad_count, tl.sum(bad, axis=0))


@triton.jit
def _is_nonfinite(partial):
    """Of a partial, or of the bit pattern that stands for one."""
    return nonfinite(partial.to(tl.float32, bitcast=True))


@triton.jit
def _block_as(address, begin, numel, whole, partial, bad_count, DTYPE: tl.constexpr, NORM: tl.constexpr):
    # Two copies of the body: the mask that only a last block needs would make every load narrow.
    if whole:
        total = _block(address, begin, numel, DTYPE, NORM, True)
    else:
        total = _block(address, begin, numel, DTYPE, NORM, False)
    tl.store(partial, total)
    # Terms are never negative, so a non-finite value makes the partial non-finite: only then is counting needed.
    if _is_nonfinite(total):
        _count_nonfinite(address, begin, numel, bad_count, DTYPE)


@triton.jit
def _shard_of(block, table, shards):
    """The last shard that begins at or before a block; one without blocks begins where the next does."""
    low = tl.zeros([], tl.int64)
    high = shards
    while high - low > 1:
        middle = (low + high) >> 1
        before = tl.load(table + middle * _FIELDS + 2) <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit(do_not_specialize=["shards"])
def _block_kernel(
    table,
    partials,  # [blocks] fp32; for the norm inf int32, the bit patterns of the largest
    bad_counts,  # [blocks] int32; written where the partial is not finite, and else undefined
    shards: tl.int64,
    NORM: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    shard = table + _shard_of(block, table, shards) * _FIELDS
    address = tl.load(shard)
    numel = tl.load(shard + 1)
    begin = (block - tl.load(shard + 2)) * _BLOCK
    dtype = tl.load(shard + 3)
    whole = (tl.load(shard + 4) != 0) & (begin + _BLOCK <= numel)
    partial = partials + block
    bad_count = bad_counts + block
    if dtype == FP16:
        _block_as(address, begin, numel, whole, partial, bad_count, tl.float16, NORM)
    elif dtype == BF16:
        _block_as(address, begin, numel, whole, partial, bad_count, tl.bfloat16, NORM)
    else:
        _block_as(address, begin, numel, whole, partial, bad_count, tl.float32, NORM)


@triton.jit
def _add_partials(partials, count, lane, ROWS: tl.constexpr, NORM: tl.constexpr):
    """The sum or largest of each lane: of the partials lane, lane + 1024 and so on, of `count` (int64)."""
    total = tl.zeros(lane.shape, partials.dtype.element_ty)
    while count > 0:
        left = tl.minimum(count, ROWS * _LANES).to(tl.int32)
        # Several rows at a time, so that their loads are in flight together.
        for k in tl.static_range(ROWS):
            partial = tl.load(partials + k * _LANES + lane, mask=k * _LANES + lane < left, other=0)
            total = tl.maximum(total, partial) if NORM == _INF else total + partial
        partials += ROWS * _LANES
        count -= ROWS * _LANES
    return total


@triton.jit
def _add_counts(partials, bad_counts, count, lane):
    """The non-finite values behind each lane of the partials. A finite one has no count."""
    bad = tl.zeros(lane.shape, tl.int64)
    while count > 0:
        inside = lane < count
        inside &= _is_nonfinite(tl.load(partials + lane, mask=inside, other=0))
        bad += tl.load(bad_counts + lane, mask=inside, other=0)
        partials += _LANES
        bad_counts += _LANES
        count -= _LANES
    return bad


@triton.jit
def _large_kernel(
    table,
    large,  # [grid's first] int64: indices of the large shards
    partials,
    bad_counts,
    NORM: tl.constexpr,
):
    """Add up the rows of a large shard's partials into the first row. Each program has some lanes, as no other has.

    A sum starts from +0, so the first row added to +0 once more stays as it is. An int32 has room for a lane's count.
    """
    shard = table + tl.load(large + tl.program_id(0).to(tl.int64)) * _FIELDS
    begin = tl.load(shard + 2)
    count = tl.load(shard + _FIELDS + 2) - begin
    lane = (tl.program_id(1).to(tl.int64) * _LARGE_LANES).to(tl.int32) + tl.arange(0, _LARGE_LANES)
    partials += begin
    bad_counts += begin
    total = _add_partials(partials, count, lane, _LARGE_ROWS, NORM)
    bad = _is_nonfinite(total)
    if tl.max(bad.to(tl.int32), axis=0) != 0:
        counts = _add_counts(partials, bad_counts, count, lane).to(tl.int32)
        tl.store(bad_counts + lane, counts, mask=bad)
    tl.store(partials + lane, total)


@triton.jit
def _shard_kernel(table, partials, bad_counts, out, NORM: tl.constexpr):
    shard = tl.program_id(0).to(tl.int64)
    begin = tl.load(table + shard * _FIELDS + 2)
    count = tl.load(table + (shard + 1) * _FIELDS + 2) - begin
    # The first row of a large shard's partials has become the sum of all rows.
    count = tl.where(count > _LARGE, _LANES, count)
    lane = tl.arange(0, _LANES)
    partials += begin
    out += 2 * shard
    total = _add_partials(partials, count, lane, _DEPTH, NORM)
    total = tl.max(total, axis=0) if NORM == _INF else _fold(total)
    tl.store(out, total.to(tl.float32, bitcast=True))
    bad = 0.0
    if _is_nonfinite(total):
        bad = tl.sum(_add_counts(partials, bad_counts + begin, count, lane), axis=0).to(tl.float32)
    tl.store(out + 1, bad)


def _rows(shards: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """The table: address, numel, first block, dtype, aligned; then one row more, with the number of blocks."""
    first = 0
    for shard in shards:
        address = shard.data_ptr()
        yield address, shard.numel(), first, DTYPES[shard.dtype], address % 16 == 0
        first += triton.cdiv(shard.numel(), STATS_BLOCK)
    yield 0, 0, first, 0, 0


def _combine(
    rows: Sequence[tuple[int, ...]], table: Tensor, partials: Tensor, bad_counts: Tensor, out: Tensor, norm: int
) -> None:
    """Launch the kernels that combine the blocks' partials by shard, into `out`. `table`: `rows` on the device."""
    large = [shard for shard, (this, after) in enumerate(itertools.pairwise(rows)) if after[2] - this[2] > LARGE]
    if large:
        indices = upload(torch.tensor(large, dtype=torch.int64, device="cpu"), out.device)
        grid = (len(large), STATS_LANES // LARGE_LANES)
        _large_kernel[grid](table, indices, partials, bad_counts, NORM=norm, num_warps=1, **ROOMY)
    _shard_kernel[(len(rows) - 1,)](table, partials, bad_counts, out, NORM=norm, num_warps=WARPS, **ROOMY)


def grad_stats(shards: Sequence[Tensor], norm_type: float) -> Tensor:
    """See `zero_kernels.grad_stats`."""
    if norm_type not in (1.0, 2.0, math.inf) or is_capturing(shards[0].device):
        return reference.grad_stats(shards, norm_type)
    norm = INF if norm_type == math.inf else int(norm_type)
    rows, some = list(_rows(shards)), shards[0]
    blocks = rows[-1][2]
    with torch.cuda.device_of(some):
        table = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), some.device)
        partials = some.new_empty(blocks, dtype=torch.int32 if norm == INF else torch.float32)
        bad_counts = some.new_empty(blocks, dtype=torch.int32)
        out = some.new_empty(len(shards), 2, dtype=torch.float32)
        if blocks:
            _block_kernel[(blocks,)](table, partials, bad_counts, len(shards), NORM=norm, num_warps=WARPS, **EXACT)
        _combine(rows, table, partials, bad_counts, out, norm)
    return out
