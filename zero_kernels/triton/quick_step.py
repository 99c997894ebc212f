"""AdamW with moments of 8 bits where no value is unusual, in Triton: two thirds of the instructions, the same bits.

As csrc/cuda/quick_step.h: division and square root are the instructions that ptxas makes of them, without the branches
for very small and very large operands. What is stored is no estimate here: a tile is more rows than a warp's two, and
one in eight would have a value that is close to a tie.
"""

import triton
import triton.language as tl

from zero_kernels.triton.codecs import near_reciprocal, quotient, whole
from zero_kernels.triton.common import (
    BIAS_CORRECTION2_SQRT,
    DECAY,
    EPS,
    INTERPRETED,
    STEP_SIZE,
    times,
)
from zero_kernels.triton.rules.adamw import moments

_INTERPRETED = tl.constexpr(INTERPRETED)

# What is usual: quick_step.h has the reasons. Roots: of second moments. Some are bits.
_LEAST, _LEAST_BITS, _LEAST_ROOT = map(tl.constexpr, (2.0**-100, (127 - 100) << 23, 2.0**-50))
_MOST, _MOST_ROOT_BITS, _MOST_MASTER_BITS = map(tl.constexpr, (2.0**60, (127 + 10) << 23, (127 + 125) << 23))


@triton.jit
def _root(x):
    if _INTERPRETED:
        return tl.sqrt_rn(x)
    else:
        positive = tl.maximum(x, _LEAST)  # of 0: 0, and not 0 * inf
        near = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [positive], tl.float32, True, 1)
        root = times(x, near)
        return tl.fma(tl.fma(root * -1.0, root, x), times(near, 0.5), root)


@triton.jit
def _reciprocal(b):
    near = near_reciprocal(b)
    return tl.fma(near, tl.fma(b * -1.0, near, 1.0), near)


@triton.jit
def quick_adamw(g, p, states, row, IS_SPLIT: tl.constexpr):
    """Give new masters, encoded moments, their scales, and whether a value of the tile is unusual: then the others are
    wrong. g, p, states: fp32 [ROWS, 128]; scales: [ROWS, 1]."""
    step_size, decay, eps = tl.load(row + STEP_SIZE), tl.load(row + DECAY), tl.load(row + EPS)
    correction = tl.load(row + BIAS_CORRECTION2_SQRT)
    usual = tl.minimum(eps * 2.0**51, correction) >= 2.0**-9
    usual &= eps + correction + tl.abs(step_size) + tl.abs(decay) <= 3  # each of them, and none is NaN

    below_p = ~(p.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    p, m, v = moments(g, p, states[0], states[1], row)
    root = _root(v)
    divisor = quotient(root, correction, _reciprocal(correction)) + eps
    p = p - times(step_size, quotient(m, divisor, _reciprocal(divisor)))

    magnitude = m.to(tl.uint32, bitcast=True) & 0x7FFFFFFF
    least = tl.minimum(magnitude - 1, v.to(tl.uint32, bitcast=True) - 1)  # 0 is above all
    if IS_SPLIT:
        # From the most on, a master is as small here as a moment that is too small.
        least = tl.minimum(least, below_p.to(tl.uint32, bitcast=True) + (_MOST_MASTER_BITS + _LEAST_BITS - 1))
    largest_m = tl.max(magnitude, axis=1, keep_dims=True).to(tl.float32, bitcast=True)
    largest_root = tl.max(root.to(tl.uint32, bitcast=True), axis=1, keep_dims=True)  # what is negative is above all
    usual &= (tl.min(least, axis=1, keep_dims=True) >= _LEAST_BITS - 1) & (largest_root < _MOST_ROOT_BITS)
    usual &= largest_m < _MOST

    largest_root = largest_root.to(tl.float32, bitcast=True)
    scale_m, scale_v = tl.maximum(largest_m, _LEAST), tl.maximum(largest_root, _LEAST_ROOT)  # of zeros: not 0
    x = quotient(m, scale_m, _reciprocal(scale_m))
    half = tl.fma(tl.abs(x), 0.5, 0.5)
    m = times(quotient(x, half, _reciprocal(half)), 127.0)
    v = times(quotient(root, scale_v, _reciprocal(scale_v)), 255.0)
    v = tl.maximum(v, (root > 0).to(tl.float32))  # 0 is for 0 alone
    return p, (whole(m, tl.int8), whole(v, tl.uint8)), (largest_m, largest_root), tl.max((~usual).to(tl.int32)) != 0
