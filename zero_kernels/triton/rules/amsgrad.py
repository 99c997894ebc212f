"""AMSGrad: `zero_kernels.rules.amsgrad`."""

import triton
import triton.language as tl

from zero_kernels.triton.rules.adamw import moments, stepped


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amsgrad(g, p, states, row):
    p, m, v = moments(g, p, states[0], states[1], row)
    w = tl.maximum(_magnitude(states[2]), _magnitude(v)).to(tl.float32, bitcast=True)
    return stepped(p, m, w, row), (m, v, w)
