"""The two passes of Muon over a shard: `zero_kernels.rules.muon`."""

import triton
import triton.language as tl

from zero_kernels.rules.muon import COLUMNS
from zero_kernels.triton.common import times

_DECAY, _MOMENTUM, _SHARE, _NESTEROV = (
    tl.constexpr(COLUMNS.index(name)) for name in ("decay", "momentum", "share", "nesterov")
)


@triton.jit
def _between(start, end, weight, rest):
    way = end - start
    return tl.where(weight < 0.5, start + times(weight, way), end - times(rest, way))


@triton.jit
def muon_look_ahead(g, p, states, row):
    m = states[0]
    momentum = tl.load(row + _MOMENTUM)
    share = tl.load(row + _SHARE)
    m = _between(m, g, share, momentum)
    ahead = _between(g, m, momentum, share)
    return tl.where(tl.load(row + _NESTEROV) != 0, ahead, m), (m,)


@triton.jit
def muon_subtract(g, p, states, row):
    return times(p, tl.load(row + _DECAY)) - states[0], states
