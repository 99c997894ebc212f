"""Lion: `zero_kernels.rules.lion`."""

import triton
import triton.language as tl

from zero_kernels.rules.lion import LION
from zero_kernels.triton.common import times

_STEP_SIZE, _DECAY, _BETA1, _ONE_MINUS_BETA1, _BETA2, _ONE_MINUS_BETA2 = (
    tl.constexpr(LION.columns.index(name))
    for name in ("step_size", "decay", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2")
)


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def lion(g, p, states, row):
    m = states[0]
    p = times(p, tl.load(row + _DECAY))
    u = times(m, tl.load(row + _BETA1)) + times(g, tl.load(row + _ONE_MINUS_BETA1))
    p = p - times(tl.load(row + _STEP_SIZE), _sign(u))
    m = times(m, tl.load(row + _BETA2)) + times(g, tl.load(row + _ONE_MINUS_BETA2))
    return p, (m,)
