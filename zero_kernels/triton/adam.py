"""`adam_step` in Triton: the kernel, then the op."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_kernels.hyper import ROW
from zero_kernels.triton.common import (
    ACTIVE,
    BETA1,
    BETA2,
    BIAS_CORRECTION2_SQRT,
    COLUMNS,
    DECAY,
    EPS,
    EXACT,
    GRAD_FACTOR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    STEP_SIZE,
    WEIGHT_DECAY,
    narrow,
    nonfinite,
    times,
    widen,
)

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
    exp_avg,
    exp_avg_sq,
    param_out,
    row_slot,
    hyper,
    grad_scale,
    found_inf,
    nonfinite_slots,
    row,  # [ROWS] int64
    has_row,  # [ROWS]: rows that exist
    at,  # [ROWS, 128] int64: elements
    inside,  # [ROWS, 128], or [ROWS, 1] where rows are whole: elements that exist
):
    g = tl.load(grad + at, mask=inside, other=0.0)
    p_old = tl.load(master + at, mask=inside)
    m = tl.load(exp_avg + at, mask=inside)
    v = tl.load(exp_avg_sq + at, mask=inside)
    # Holds the compiler to this order: all data is asked for before anything is waited for. Loaded above the barrier,
    # `slot` was seen to be used there, to address coefficients, before exp_avg_sq was asked for (Triton 3.6, 3.7).
    tl.debug_barrier()
    slot = tl.load(row_slot + row, mask=has_row, other=-1)  # [ROWS] int32

    coefficients = hyper + tl.maximum(slot, 0).to(tl.int64)[:, None] * COLUMNS  # each below is [ROWS, 1]
    step_size = tl.load(coefficients + STEP_SIZE)
    decay = tl.load(coefficients + DECAY)
    weight_decay = tl.load(coefficients + WEIGHT_DECAY)
    eps = tl.load(coefficients + EPS)
    beta1 = tl.load(coefficients + BETA1)
    one_minus_beta1 = tl.load(coefficients + ONE_MINUS_BETA1)
    beta2 = tl.load(coefficients + BETA2)
    one_minus_beta2 = tl.load(coefficients + ONE_MINUS_BETA2)
    bias_correction2_sqrt = tl.load(coefficients + BIAS_CORRECTION2_SQRT)
    scale = tl.load(coefficients + GRAD_FACTOR)
    live = inside & (slot[:, None] >= 0) & (tl.load(coefficients + ACTIVE) != 0)

    if grad_scale is not None:
        scale = times(tl.load(grad_scale), scale)
    g = times(widen(g), scale)
    if found_inf is not None:
        skipped = tl.load(found_inf) != 0
        live = live & (not skipped)
        if nonfinite_slots is not None:
            _mark_nonfinite(g, slot, skipped, nonfinite_slots)

    g = tl.where(weight_decay != 0, g + times(weight_decay, p_old), g)
    p = times(p_old, decay)
    m = times(m, beta1) + times(g, one_minus_beta1)
    v = times(v, beta2) + times(times(g, one_minus_beta2), g)
    p = p - times(step_size, tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), bias_correction2_sqrt) + eps))

    tl.store(master + at, p, mask=live)
    tl.store(exp_avg + at, m, mask=live)
    tl.store(exp_avg_sq + at, v, mask=live)
    if param_out is not None:
        tl.store(param_out + at, narrow(p, param_out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["numel"])
def _adam_step_kernel(
    grad,
    master,
    exp_avg,
    exp_avg_sq,
    param_out,
    row_slot,
    hyper,
    grad_scale,
    found_inf,
    nonfinite_slots,
    numel: tl.int64,
    RAGGED: tl.constexpr,  # whether numel is no multiple of a row
):
    first = tl.program_id(0).to(tl.int64) * _ROWS
    row = first + tl.arange(0, _ROWS)
    at = row[:, None] * _ROW + tl.arange(0, _ROW)[None, :]
    has_row = row * _ROW < numel
    if RAGGED and (first + _ROWS) * _ROW > numel:
        # A mask of elements makes every access narrow: only the last tile pays for it.
        _step_rows(
            grad, master, exp_avg, exp_avg_sq, param_out, row_slot, hyper,
            grad_scale, found_inf, nonfinite_slots, row, has_row, at, at < numel,
        )  # fmt: skip
    else:
        _step_rows(
            grad, master, exp_avg, exp_avg_sq, param_out, row_slot, hyper,
            grad_scale, found_inf, nonfinite_slots, row, has_row, at, has_row[:, None],
        )  # fmt: skip


def adam_step(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    param_out: Tensor | None,
    row_slot: Tensor,
    hyper: Tensor,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    nonfinite_slots: Tensor | None,
) -> None:
    """See `zero_kernels.adam_step`."""
    numel = grad.numel()
    if numel == 0 or hyper.shape[0] == 0:
        return
    with torch.cuda.device_of(grad):
        _adam_step_kernel[(triton.cdiv(numel, ROWS * ROW),)](
            grad,
            master,
            exp_avg,
            exp_avg_sq,
            param_out,
            row_slot,
            hyper,
            grad_scale,
            found_inf,
            nonfinite_slots,
            numel,
            RAGGED=numel % ROW != 0,
            num_warps=WARPS,
            **EXACT,
        )
