"""Averages of the masters, in Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_kernels.hyper import ROW
from zero_kernels.triton.codecs import join
from zero_kernels.triton.common import EXACT, times, widen

ROWS, WARPS = 8, 8  # a row a warp, as in the update

_ROW, _ROWS = tl.constexpr(ROW), tl.constexpr(ROWS)


@triton.jit
def _follow(master, param, averages, rates, slot, at, inside):
    p = tl.load(master + at, mask=inside)
    p = widen(p) if param is None else join(tl.load(param + at, mask=inside), p, False)
    for k in tl.static_range(len(averages)):
        average = tl.load(averages[k] + at, mask=inside)
        rate = tl.load(rates + tl.maximum(slot, 0).to(tl.int64) * len(averages) + k)
        moves = inside & (slot >= 0) & (rate != 0)
        tl.store(averages[k] + at, average + times(rate, p - average), mask=moves)


@triton.jit(do_not_specialize=["numel"])
def _ema_kernel(
    master,
    param,  # the high halves of split masters, or None
    averages,  # a tuple of any number
    rates,
    row_slot,
    numel: tl.int64,
    RAGGED: tl.constexpr,  # whether numel is no multiple of a row
):
    first = tl.program_id(0).to(tl.int64) * _ROWS
    row = first + tl.arange(0, _ROWS)
    at = row[:, None] * _ROW + tl.arange(0, _ROW)[None, :]
    has_row = row * _ROW < numel
    slot = tl.load(row_slot + row, mask=has_row, other=-1)[:, None]
    if RAGGED and (first + _ROWS) * _ROW > numel:  # a mask of elements makes every access narrow
        _follow(master, param, averages, rates, slot, at, at < numel)
    else:
        _follow(master, param, averages, rates, slot, at, has_row[:, None])


def ema(
    averages: Sequence[Tensor],
    masters: Sequence[Tensor],
    params: Sequence[Tensor],
    row_slots: Sequence[Tensor],
    rates: Tensor,
) -> None:
    """See `zero_kernels.ema`: a launch for each shard."""
    each = rates.shape[1]
    split = not masters[0].dtype.is_floating_point
    for i, (master, row_slot) in enumerate(zip(masters, row_slots, strict=True)):
        if master.numel() == 0 or rates.numel() == 0:
            continue
        with torch.cuda.device_of(master):
            _ema_kernel[(triton.cdiv(master.numel(), ROWS * ROW),)](
                master,
                params[i] if split else None,
                tuple(averages[i * each : (i + 1) * each]),
                rates,
                row_slot,
                master.numel(),
                RAGGED=master.numel() % ROW != 0,
                num_warps=WARPS,
                **EXACT,
            )
