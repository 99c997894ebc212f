"""The update of a shard by any rule, in Triton: the kernel, then the ops."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_kernels.hyper import ROW
from zero_kernels.reference import Shard, StepArgs
from zero_kernels.triton.codecs import (
    decode,
    encode,
    encode_stochastic,
    is_encoded,
    join,
    noise_of_rows,
    split,
)
from zero_kernels.triton.common import (
    ACTIVE,
    COLUMNS,
    EXACT,
    GRAD_FACTOR,
    STEP_NUMBER,
    narrow,
    nonfinite,
    times,
    widen,
)
from zero_kernels.triton.quick_step import quick_adamw
from zero_kernels.triton.rules import UPDATES

# A row a warp: four elements a thread, so that every access of fp32 is 16 bytes and every warp's are contiguous. With
# eight elements a thread Triton swaps what it stores through shared memory.
ROWS = 8
WARPS = 8

_ROW = tl.constexpr(ROW)
_ROWS = tl.constexpr(ROWS)


@triton.jit
def _mark_nonfinite(g, slot, skipped, nonfinite_slots):
    if skipped:
        bad = tl.max(nonfinite(g).to(tl.int32), axis=1)
        tl.store(nonfinite_slots + slot, 1, mask=(bad != 0) & (slot >= 0))


@triton.jit
def _step_rows(
    grad,
    master,
    states,
    param_out,
    row_slot,
    hyper,
    grad_scale,
    found_inf,
    nonfinite_slots,
    scales,
    row_keys,
    row,  # [ROWS] int64
    has_row,  # [ROWS]: rows that exist
    at,  # [ROWS, 128] int64: elements
    inside,  # [ROWS, 128], or [ROWS, 1] where rows are whole: elements that exist
    UPDATE: tl.constexpr,
    QUICK: tl.constexpr,
):
    g = tl.load(grad + at, mask=inside, other=0.0)
    p = tl.load(master + at, mask=inside)
    is_split: tl.constexpr = master.dtype.element_ty != tl.float32
    if is_split:
        high = tl.load(param_out + at, mask=inside)
    stored = ()
    for i in tl.static_range(len(states)):
        stored = stored + (tl.load(states[i] + at, mask=inside),)  # type: ignore[assignment]
    # Holds the compiler to this order: all data is asked for before anything is waited for. Loaded above the barrier,
    # `slot` was seen to be used there, to address coefficients, before the last state was asked for (Triton 3.6, 3.7).
    tl.debug_barrier()
    slot = tl.load(row_slot + row, mask=has_row, other=-1)  # [ROWS] int32

    coefficients = hyper + tl.maximum(slot, 0).to(tl.int64)[:, None] * COLUMNS  # [ROWS, 1]
    scale = tl.load(coefficients + GRAD_FACTOR)
    row_live = (slot[:, None] >= 0) & (tl.load(coefficients + ACTIVE) != 0)  # [ROWS, 1]

    if grad_scale is not None:
        scale = times(tl.load(grad_scale), scale)
    g = times(widen(g), scale)
    if found_inf is not None:
        skipped = tl.load(found_inf) != 0
        row_live = row_live & (not skipped)

    if is_split:
        p = join(high, p, QUICK)
    before, before_scales = (), ()
    for i in tl.static_range(len(states)):
        scale_of_row = tl.load(scales[i] + row, mask=has_row)[:, None] if scales[i] is not None else 0.0
        before_scales = before_scales + (scale_of_row,)  # type: ignore[assignment]
        before = before + (decode(stored[i], scale_of_row) if is_encoded(states[i]) else stored[i],)  # type: ignore[assignment]

    if QUICK:
        p, after, after_scales, unusual = quick_adamw(g, p, before, coefficients, is_split)
        row_live = row_live & ~unusual
    else:
        p, after = UPDATE(g, p, before, coefficients)
    live = inside & row_live

    if is_split:
        high, low = split(p, master.dtype.element_ty, QUICK)
        tl.store(param_out + at, high, mask=live)
        tl.store(master + at, low, mask=live)
    else:
        tl.store(master + at, p, mask=live)
    if row_keys is not None:
        key = tl.load(row_keys + row, mask=has_row, other=0)[:, None]
        noise = noise_of_rows(key, tl.load(coefficients + STEP_NUMBER))
        element = tl.arange(0, _ROW).to(tl.uint32)[None, :]
    for i in tl.static_range(len(states)):
        if states[i].dtype.element_ty == tl.bfloat16:
            tl.store(states[i] + at, encode_stochastic(after[i], noise, i, element), mask=live)
        elif not is_encoded(states[i]):
            tl.store(states[i] + at, after[i], mask=live)
        else:
            if QUICK:
                values, scale_of_row = after[i], after_scales[i]
            else:
                values, scale_of_row = encode(after[i], inside, states[i].dtype.element_ty)
            tl.store(states[i] + at, values, mask=live)
            # By one lane of a warp. As [ROWS, 1], or seen to be contiguous, it would go through shared memory.
            lane = tl.arange(0, 32)[None, :]
            scale_of_row = tl.broadcast_to(tl.where(row_live, scale_of_row, before_scales[i]), [_ROWS, 32])
            tl.store(scales[i] + ((row[:, None] * 32 + lane) >> 5), scale_of_row, mask=has_row[:, None] & (lane == 0))
    if param_out is not None and not is_split:
        tl.store(param_out + at, narrow(p, param_out.dtype.element_ty), mask=live)
    if QUICK:
        return unusual  # as a gradient that is not finite is: the other way marks its slot
    # Last: before the update, the branch made a kernel for compute capability 8.0 spill (Triton 3.7).
    if found_inf is not None and nonfinite_slots is not None:
        _mark_nonfinite(g, slot, skipped, nonfinite_slots)


@triton.jit(do_not_specialize=["numel"])
def _step_kernel(
    grad,
    master,
    states,  # a tuple of as many as the rule has
    param_out,
    row_slot,
    hyper,
    grad_scale,
    found_inf,
    nonfinite_slots,
    scales,  # a tuple of as many as states, of None for those without
    row_keys,  # or None, without states in bf16
    numel: tl.int64,
    UPDATE: tl.constexpr,
    RAGGED: tl.constexpr,  # whether numel is no multiple of a row
    QUICK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * _ROWS
    row = first + tl.arange(0, _ROWS)
    at = row[:, None] * _ROW + tl.arange(0, _ROW)[None, :]
    has_row = row * _ROW < numel
    given = (
        grad, master, states, param_out, row_slot, hyper,
        grad_scale, found_inf, nonfinite_slots, scales, row_keys, row, has_row, at,
    )  # fmt: skip
    if RAGGED and (first + _ROWS) * _ROW > numel:
        # A mask of elements makes every access narrow: only the last tile pays for it.
        _step_rows(*given, at < numel, UPDATE, False)
    elif not QUICK or _step_rows(*given, has_row[:, None], UPDATE, True):
        _step_rows(*given, has_row[:, None], UPDATE, False)


def foreach_step(rule: str, *given: Any) -> None:
    """See `zero_kernels.foreach_step`: a launch for each shard."""
    args = StepArgs(*given)
    scales, each = args.scale_of_states(), len(args.states) // len(args.grads)
    for i, shard in enumerate(args.shards()):
        _step(rule, args, shard, tuple(scales[i * each : (i + 1) * each]))


def _step(rule: str, args: StepArgs, shard: Shard, scales: tuple[Tensor | None, ...]) -> None:
    numel = shard.grad.numel()
    if numel == 0 or args.hyper.shape[0] == 0:
        return
    with torch.cuda.device_of(shard.grad):
        _step_kernel[(triton.cdiv(numel, ROWS * ROW),)](
            shard.grad,
            shard.master,
            shard.states,
            shard.param_out,
            shard.row_slot,
            args.hyper,
            args.grad_scale,
            args.found_inf,
            args.nonfinite_slots,
            scales,
            shard.row_keys,
            numel,
            UPDATE=UPDATES[rule],
            RAGGED=numel % ROW != 0,
            QUICK=rule == "adamw" and [s.dtype for s in shard.states] == [torch.int8, torch.uint8],
            num_warps=WARPS,
            **EXACT,
        )
