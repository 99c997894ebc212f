"""`pack` and `unpack` in Triton: the kernels, the table that they walk, then the ops.

The table cuts the bucket into slots: the gradients, and the gaps between them. A program owns a tile of the bucket and
walks the slots that reach into it, so one launch serves any number of gradients.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_kernels import reference
from zero_kernels.capture import is_capturing
from zero_kernels.triton.common import EXACT, narrow, nonfinite, widen
from zero_kernels.triton.table import BF16, DTYPES, FP16, FP32, elements, upload

# 16 elements a thread: two 16-byte accesses of a 16-bit type, four of fp32, are in flight together.
TILE = 2048
WARPS = 4

# Elements at once where slots are small or misaligned. More than 4 a thread would take registers from the rest.
PART = 512

# In place of a dtype: a slot that no gradient covers; the one after the bucket, where every walk ends.
GAP, END = -1, -2
ENDLESS = 2**62
FIELDS = 6  # of a slot in the table

_TILE = tl.constexpr(TILE)
_PART = tl.constexpr(PART)
_FIELDS = tl.constexpr(FIELDS)
_GAP = tl.constexpr(GAP)


@triton.jit
def _move(source, target, inside, scale, flags, index):
    """target = cast(float(source) * scale) where `inside` (None: everywhere); flags[index] = 1 for inf or NaN."""
    x = widen(tl.load(source, mask=inside))
    if flags is not None:
        bad = nonfinite(x)
        if inside is not None:
            bad = bad & inside
        tl.store(flags + index, 1, mask=tl.max(bad.to(tl.int32), axis=0) != 0)
    tl.store(target, narrow(x * scale, target.dtype.element_ty), mask=inside)


@triton.jit
def _exchange(grad, bucket, inside, scale, flags, index, PACK: tl.constexpr):
    if PACK:
        _move(grad, bucket, inside, scale, flags, index)
    else:
        _move(bucket, grad, inside, scale, flags, index)


@triton.jit
def _exchange_as(dtype, address, bucket, at, inside, scale, flags, index, PACK: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements `at` of a slot, whose dtype only the table knows."""
    bucket = bucket + at
    if dtype == FP16:
        grad = elements(address, at, tl.float16, ALIGNED)
        _exchange(grad, bucket, inside, scale, flags, index, PACK)
    elif dtype == BF16:
        grad = elements(address, at, tl.bfloat16, ALIGNED)
        _exchange(grad, bucket, inside, scale, flags, index, PACK)
    elif dtype == FP32:
        grad = elements(address, at, tl.float32, ALIGNED)
        _exchange(grad, bucket, inside, scale, flags, index, PACK)
    elif PACK and dtype == _GAP:
        tl.store(bucket, 0.0, mask=inside)


@triton.jit
def _first_slot(slots, count, begin):
    """Index of the slot that holds element `begin` of the bucket: the first that ends after it."""
    low = tl.zeros([], tl.int64)
    high = count
    while low < high:
        middle = (low + high) >> 1
        before = tl.load(slots + middle * _FIELDS + 2) <= begin
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low


# Triton compiles for an aligned bucket, and again for one that is not, in which the table calls nothing aligned.
@triton.jit(do_not_specialize=["count"])
def _slots_kernel(bucket, slots, count: tl.int64, flags, scale, PACK: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    begin = tile * _TILE
    end = begin + _TILE
    i = _first_slot(slots, count, begin)
    reached = begin
    while reached < end:
        slot = slots + i * _FIELDS
        address = tl.load(slot)
        slot_begin = tl.load(slot + 1)
        slot_end = tl.load(slot + 2)
        dtype = tl.load(slot + 3)
        aligned = tl.load(slot + 4) != 0
        index = tl.load(slot + 5)
        if aligned & (slot_begin <= begin) & (slot_end >= end):
            at = begin + tl.arange(0, _TILE)
            _exchange_as(dtype, address, bucket, at, None, scale, flags, index, PACK, True)
        else:
            start = tl.maximum(slot_begin, begin)
            stop = tl.minimum(slot_end, end)
            while start < stop:
                at = start + tl.arange(0, _PART)
                _exchange_as(dtype, address, bucket, at, at < stop, scale, flags, index, PACK, False)
                start += _PART
        reached = slot_end
        i += 1


def _slots(grads: Sequence[Tensor], offsets: Sequence[int], bucket: Tensor) -> Iterator[tuple[int, ...]]:
    """Rows of the table, ascending and without a hole: address, begin, end, dtype, aligned, index of the gradient."""
    start, numel, end = bucket.data_ptr(), bucket.numel(), 0
    for index, (grad, begin) in enumerate(zip(grads, offsets, strict=True)):
        if grad.numel() == 0:
            continue
        if begin > end:
            yield 0, end, begin, GAP, 0, 0
        end = begin + grad.numel()
        # Where the gradient would start if it reached back to the bucket's first element: one index serves both, and
        # tiles, whose bytes are multiples of 16, are aligned exactly where this is.
        address = grad.data_ptr() - begin * grad.element_size()
        yield address, begin, end, DTYPES[grad.dtype], (address | start) % 16 == 0, index
    if end < numel:
        yield 0, end, numel, GAP, 0, 0
    yield 0, numel, ENDLESS, END, 0, 0


def _launch(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    scale: float,
    flags: Tensor | None,
    pack: bool,
) -> None:
    if bucket.numel() == 0:
        return
    rows = list(_slots(grads, offsets, bucket))
    slots = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), bucket.device)
    grid = (triton.cdiv(bucket.numel(), TILE),)
    _slots_kernel[grid](bucket, slots, len(rows), flags, scale, PACK=pack, num_warps=WARPS, **EXACT)


def pack(
    grads: Sequence[Tensor], offsets: Sequence[int], bucket: Tensor, scale: float, nonfinite: Tensor | None
) -> None:
    """See `zero_kernels.pack`."""
    if is_capturing(bucket.device):
        return reference.pack(grads, offsets, bucket, scale, nonfinite)
    with torch.cuda.device_of(bucket):
        if nonfinite is not None:
            nonfinite.zero_()
        _launch(grads, offsets, bucket, scale, nonfinite, pack=True)


def unpack(bucket: Tensor, offsets: Sequence[int], grads: Sequence[Tensor], scale: float) -> None:
    """See `zero_kernels.unpack`."""
    if is_capturing(bucket.device):
        return reference.unpack(bucket, offsets, grads, scale)
    with torch.cuda.device_of(bucket):
        _launch(grads, offsets, bucket, scale, None, pack=False)
