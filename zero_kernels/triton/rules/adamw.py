"""AdamW and Adam: `zero_kernels.rules.adamw`."""

import triton
import triton.language as tl

from zero_kernels.triton.common import (
    BETA1,
    BETA2,
    BIAS_CORRECTION2_SQRT,
    DECAY,
    EPS,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    STEP_SIZE,
    WEIGHT_DECAY,
    times,
)


@triton.jit
def moments(g, p, m, v, row):
    weight_decay = tl.load(row + WEIGHT_DECAY)
    g = tl.where(weight_decay != 0, g + times(weight_decay, p), g)
    p = times(p, tl.load(row + DECAY))
    m = times(m, tl.load(row + BETA1)) + times(g, tl.load(row + ONE_MINUS_BETA1))
    v = times(v, tl.load(row + BETA2)) + times(times(g, tl.load(row + ONE_MINUS_BETA2)), g)
    return p, m, v


@triton.jit
def stepped(p, m, v, row):
    root = tl.div_rn(tl.sqrt_rn(v), tl.load(row + BIAS_CORRECTION2_SQRT))
    return p - times(tl.load(row + STEP_SIZE), tl.div_rn(m, root + tl.load(row + EPS)))


@triton.jit
def adamw(g, p, states, row):
    p, m, v = moments(g, p, states[0], states[1], row)
    return stepped(p, m, v, row), (m, v)
