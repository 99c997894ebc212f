"""`hyper_table` in Triton: the kernel, then the op. All in float64, where Triton's `/` and `sqrt` are IEEE's."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_kernels.rules.rule import STEP_BITS
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
    STEP_NUMBER,
    STEP_SIZE,
    WEIGHT_DECAY,
)

# A slot a thread.
SLOTS = 128
WARPS = 4

_SLOTS = tl.constexpr(SLOTS)
_STEP_BITS = tl.constexpr(STEP_BITS)


@triton.jit
def _power(base, exponent):
    """base^exponent by squaring, the products in the order of every backend."""
    result = tl.full([_SLOTS], 1.0, tl.float64)
    square = base
    for bit in range(_STEP_BITS):
        result = tl.where((exponent >> bit) & 1 == 1, result * square, result)
        square = square * square
    return result


@triton.jit(do_not_specialize=["groups", "slots"])
def _hyper_table_kernel(
    coefficients,  # [7, groups] fp64: the rows HYPER_COEFFICIENTS
    group,
    step,
    active,
    out,
    groups: tl.int64,
    slots: tl.int64,
):
    slot = tl.program_id(0).to(tl.int64) * _SLOTS + tl.arange(0, _SLOTS)
    inside = slot < slots
    column = slot
    if group is not None:
        column = tl.load(group + slot, mask=inside, other=0).to(tl.int64)
    lr = tl.load(coefficients + column, mask=inside, other=0.0)
    beta1 = tl.load(coefficients + groups + column, mask=inside, other=0.0)
    beta2 = tl.load(coefficients + 2 * groups + column, mask=inside, other=0.0)
    eps = tl.load(coefficients + 3 * groups + column, mask=inside, other=0.0)
    weight_decay = tl.load(coefficients + 4 * groups + column, mask=inside, other=0.0)
    decoupled = tl.load(coefficients + 5 * groups + column, mask=inside, other=0.0)
    maximize = tl.load(coefficients + 6 * groups + column, mask=inside, other=0.0)
    count = tl.load(step + slot, mask=inside, other=1.0).to(tl.int64)

    shared = weight_decay * decoupled
    row = out + slot * COLUMNS
    tl.store(row + STEP_SIZE, (lr / (1.0 - _power(beta1, count))).to(tl.float32), mask=inside)
    tl.store(row + DECAY, (1.0 - lr * shared).to(tl.float32), mask=inside)
    tl.store(row + WEIGHT_DECAY, (weight_decay - shared).to(tl.float32), mask=inside)
    tl.store(row + EPS, eps.to(tl.float32), mask=inside)
    tl.store(row + BETA1, beta1.to(tl.float32), mask=inside)
    tl.store(row + ONE_MINUS_BETA1, (1.0 - beta1).to(tl.float32), mask=inside)
    tl.store(row + BETA2, beta2.to(tl.float32), mask=inside)
    tl.store(row + ONE_MINUS_BETA2, (1.0 - beta2).to(tl.float32), mask=inside)
    tl.store(row + BIAS_CORRECTION2_SQRT, tl.sqrt(1.0 - _power(beta2, count)).to(tl.float32), mask=inside)
    if active is None:
        tl.store(row + ACTIVE, 1.0, mask=inside)
    else:
        tl.store(row + ACTIVE, tl.load(active + slot, mask=inside, other=0).to(tl.float32), mask=inside)
    tl.store(row + GRAD_FACTOR, (1.0 - 2.0 * maximize).to(tl.float32), mask=inside)
    tl.store(row + STEP_NUMBER, count.to(tl.float32), mask=inside)


def hyper_table(coefficients: Tensor, group: Tensor | None, step: Tensor, active: Tensor | None, out: Tensor) -> None:
    """See `zero_kernels.reference.hyper_table`."""
    slots = out.shape[0]
    if slots == 0:
        return
    with torch.cuda.device_of(out):
        _hyper_table_kernel[(triton.cdiv(slots, SLOTS),)](
            coefficients, group, step, active, out, coefficients.shape[1], slots, num_warps=WARPS, **EXACT
        )
