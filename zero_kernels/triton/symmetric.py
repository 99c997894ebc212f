"""`symmetric_product` in Triton: the tiles on and below the diagonal. Each is written to both of its places."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_kernels.triton.common import EXACT, INTERPRETED, narrow, times, widen

# Tiles go by the shape alone, so that bits depend on nothing else. Small matrices take small ones, so that a GPU has
# more of them at a time. On an H200 a square of 2048 took 0.028 ms with tiles of 64 and 0.040 with those of 128, as 136
# of these are just more than its 132 multiprocessors; one of 4096 took 0.218 and 0.160.
BLOCKS = {256: 32, 2048: 64}  # up to so many rows; LARGEST above
LARGEST = 128
# Where a row is no multiple of 16 elements, each load is one element, and addresses take registers: with larger tiles
# the kernel was seen to spill (Triton 3.7).
LARGEST_ODD = 64
DEPTH = 64  # columns at a time: the order of additions is by these
# 96 KiB of a multiprocessor's shared memory for the largest tile: two fit in one of compute capability 9.0.
STAGES = 3

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def _place_of(number, tiles):
    """Row and column of a tile. The rows number i and tiles - 1 - i have tiles + 1 of them together."""
    pair = number // (tiles + 1)
    place = number % (tiles + 1)
    long = tiles - pair
    in_long = place < long
    return tl.where(in_long, long - 1, pair), tl.where(in_long, place, place - long)


@triton.jit
def _symmetric_kernel(
    left,  # [n, rows, columns]
    right,  # [n, columns, rows]
    added,  # [n, rows, rows], or None
    out,  # [n, rows, rows], contiguous
    rows,
    columns,
    left_matrix,  # strides, of each dimension
    left_row,
    left_column,
    right_matrix,
    right_row,
    right_column,
    added_matrix,
    added_row,
    added_column,
    alpha,
    beta,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    tiles = tl.cdiv(rows, BLOCK)
    of_matrix = tiles * (tiles + 1) // 2
    matrix = program // of_matrix
    i, j = _place_of(program % of_matrix, tiles)
    row, column = i * BLOCK + tl.arange(0, BLOCK), j * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH).to(tl.int64)
    a_at = left + matrix * left_matrix + row[:, None] * left_row + depth[None, :] * left_column
    b_at = right + matrix * right_matrix + depth[:, None] * right_row + column[None, :] * right_column
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, columns, DEPTH):
        a = tl.load(a_at, mask=(row < rows)[:, None] & (first + depth < columns)[None, :], other=0.0)
        b = tl.load(b_at, mask=(first + depth < columns)[:, None] & (column < rows)[None, :], other=0.0)
        if _INTERPRETED:  # the interpreter would multiply the bits of bf16
            a, b = widen(a), widen(b)
        total = tl.dot(a, b, total)
        a_at += DEPTH * tl.cast(left_column, tl.int64)
        b_at += DEPTH * tl.cast(right_row, tl.int64)
    total = times(total, alpha)
    inside = (row < rows)[:, None] & (column < rows)[None, :]
    if added is not None:
        at = added + matrix * added_matrix + row[:, None] * added_row + column[None, :] * added_column
        total = total + times(widen(tl.load(at, mask=inside, other=0.0)), beta)
    value = narrow(total, tl.bfloat16)
    out += matrix * rows * rows
    if i == j:  # in a tile on the diagonal, too, what is above is copied from below
        value = tl.where(row[:, None] >= column[None, :], value, tl.trans(value))
    tl.store(out + row[:, None] * rows + column[None, :], value, mask=inside)
    if i != j:
        above = (column < rows)[:, None] & (row < rows)[None, :]
        tl.store(out + column[:, None] * rows + row[None, :], tl.trans(value), mask=above)


def tile_of(rows: int, columns: int) -> tuple[int, int]:
    """Choose the side of the result's square tiles, and the warps that make one."""
    block = next((block for most, block in BLOCKS.items() if rows <= most), LARGEST)
    odd = rows % 16 != 0 or columns % 16 != 0
    return (min(block, LARGEST_ODD), 8) if odd else (block, 8 if block == LARGEST else 4)


def symmetric_product(left: Tensor, right: Tensor, added: Tensor | None, alpha: float, beta: float) -> Tensor:
    """See `zero_kernels.symmetric_product`."""
    several = [x if x is None or x.dim() == 3 else x.unsqueeze(0) for x in (left, right, added)]
    strides: list[Any] = [stride for x in several for stride in ((0, 0, 0) if x is None else x.stride())]
    rows, columns = left.shape[-2:]
    block, warps = tile_of(rows, columns)
    tiles = triton.cdiv(rows, block)
    out = left.new_empty((*left.shape[:-1], rows))
    if out.numel() == 0:
        return out
    with torch.cuda.device_of(left):
        _symmetric_kernel[(out.numel() // rows**2 * tiles * (tiles + 1) // 2,)](
            *several,
            out,
            rows,
            columns,
            *strides,
            float(alpha),
            float(beta),
            BLOCK=block,
            DEPTH=DEPTH,
            num_warps=warps,
            num_stages=STAGES,
            **EXACT,
        )
    return out
