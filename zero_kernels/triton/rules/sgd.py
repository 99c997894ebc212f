"""SGD with momentum, and without: `zero_kernels.rules.sgd`."""

import triton
import triton.language as tl

from zero_kernels.rules.sgd import SGD
from zero_kernels.triton.common import times

_LR, _WEIGHT_DECAY, _MOMENTUM, _KEEP, _TAKE, _NESTEROV = (
    tl.constexpr(SGD.columns.index(name)) for name in ("lr", "weight_decay", "momentum", "keep", "take", "nesterov")
)


@triton.jit
def _decayed(g, p, row):
    weight_decay = tl.load(row + _WEIGHT_DECAY)
    return tl.where(weight_decay != 0, g + times(weight_decay, p), g)


@triton.jit
def sgd(g, p, states, row):
    g = _decayed(g, p, row)
    b = times(states[0], tl.load(row + _KEEP)) + times(g, tl.load(row + _TAKE))
    u = tl.where(tl.load(row + _NESTEROV) != 0, g + times(tl.load(row + _MOMENTUM), b), b)
    return p - times(tl.load(row + _LR), u), (b,)


@triton.jit
def sgd_plain(g, p, states, row):
    return p - times(tl.load(row + _LR), _decayed(g, p, row)), states
