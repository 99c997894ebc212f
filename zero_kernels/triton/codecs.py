"""Other forms of state than fp32, and split masters, in Triton: `zero_kernels.codecs`. Rows are [ROWS, 128]."""

import triton
import triton.language as tl

from zero_kernels import codecs
from zero_kernels.triton.common import INTERPRETED, narrow, times, widen

_FIXED = tl.constexpr(codecs.CUT_FROM)
_STRIDE = tl.constexpr(codecs.NOISE_STRIDE)

_INT8_SMALLEST = tl.constexpr(codecs.INT8_SMALLEST)
_ROOT8_SMALLEST = tl.constexpr(codecs.ROOT8_SMALLEST)
_LARGEST = tl.constexpr(codecs.LARGEST)
_OVER_127, _REST_127 = tl.constexpr(float.fromhex("0x1.0204p-7")), tl.constexpr(float.fromhex("0x1.020408p-28"))
_OVER_255, _REST_255 = tl.constexpr(float.fromhex("0x1.01p-8")), tl.constexpr(float.fromhex("0x1.010102p-24"))
_INTERPRETED = tl.constexpr(INTERPRETED)
_SHIFT, _SHIFT_BITS = tl.constexpr(1.5 * 2.0**23), tl.constexpr(0x4B400000)  # a sum with it has no fraction left
_SHIFT_BYTES, _MOST_BYTES = tl.constexpr(1.5 * 2.0**31), tl.constexpr(127 * 256.0)


@triton.constexpr_function
def is_encoded(state):
    return state.dtype.element_ty != tl.float32


@triton.jit
def whole(x, dtype: tl.constexpr):
    """The nearest integer, ties to even, of |x| < 2^22: the last bits of a sum that has no fraction left."""
    return (x + _SHIFT).to(tl.int32, bitcast=True).to(dtype)


@triton.jit
def _over(stored, first, second):
    """stored / 127 or stored / 255, by the halves of their reciprocals: csrc/rules/codecs.h."""
    return tl.fma(stored, first, times(tl.zeros_like(stored) + second, stored))


@triton.jit
def near_reciprocal(b):
    if _INTERPRETED:
        return b  # `quotient` does not ask for it
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], tl.float32, True, 1)


@triton.jit
def quotient(a, b, over_b):
    """a / b, by a reciprocal of b: an estimate, corrected once by its rest. csrc/cuda/quick_step.h has it, too. By
    these signs -0 stays -0."""
    if _INTERPRETED:
        return tl.div_rn(a, b + tl.zeros_like(a))
    else:
        near = times(a, over_b)
        minus = -1.0  # -x is 0 - x, and an instruction
        return tl.fma(tl.fma(b, near, a * minus) * minus, over_b, near)


@triton.jit
def decode(stored, scale):
    """Decode stored values to fp32. scale: [ROWS, 1], or None for a form without scales."""
    if stored.dtype == tl.int8:
        y = _over(stored.to(tl.float32), _OVER_127, _REST_127)
        divisor = 2.0 - tl.abs(y)
        return times(quotient(y, divisor, near_reciprocal(divisor)), scale)
    elif stored.dtype == tl.uint8:
        root = times(_over(stored.to(tl.float32), _OVER_255, _REST_255), scale)
        return times(root, root)
    else:
        return widen(stored)


@triton.jit
def _mixed(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def noise_of_rows(row_key, step_number):
    """uint32 [ROWS, 1]."""
    return _mixed(_mixed(row_key.to(tl.uint32, bitcast=True)) + step_number.to(tl.uint32, bitcast=True))


@triton.jit
def encode_stochastic(values, noise_of_rows, state: tl.constexpr, element):
    """Round fp32 to bf16; element: uint32 [1, 128], places in the row. Two elements use one word of noise."""
    word = _mixed(_mixed(noise_of_rows + state) + (element >> 1) * _STRIDE)
    noise = (word >> ((element & 1) << 4)) & 0xFFFF
    bits = values.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.where(magnitude < _FIXED, bits + noise, bits) >> 16
    rounded = tl.where(magnitude > 0x7F800000, rounded | 0x40, rounded)  # NaN stays NaN
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _scale(magnitudes, inside, smallest):
    """[ROWS, 1], the largest of each row, compared as bit patterns."""
    bits = tl.where(inside, magnitudes.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    largest = tl.max(bits, axis=1)[:, None].to(tl.float32, bitcast=True)
    return tl.where(largest < smallest, 0.0, largest)


@triton.jit
def encode(values, inside, dtype: tl.constexpr):
    """Encode fp32 in 8 bits. Returns that and the scales, [ROWS, 1]."""
    inside = inside & (tl.zeros_like(values) == 0)
    if dtype == tl.int8:
        scale = _scale(values, inside, _INT8_SMALLEST)
        scale = tl.where((scale > _LARGEST) & (scale < float("inf")), _LARGEST, scale)
    else:
        values = tl.sqrt_rn(values)
        scale = _scale(values, inside, _ROOT8_SMALLEST)
        scale = tl.where(scale > _LARGEST, _LARGEST, scale)
    usable = (scale > 0) & (scale < float("inf")) & inside
    x = tl.where(usable, tl.div_rn(values, scale + tl.zeros_like(values)), 0.0)
    x = tl.minimum(x, 1.0)  # there may be more where the scale is the largest
    if dtype == tl.int8:
        x = tl.maximum(x, -1.0)
        y = tl.div_rn(x + x, 1.0 + tl.abs(x))
        return whole(times(127.0 + tl.zeros_like(y), y), dtype), scale
    else:
        least = (usable & (values > 0)).to(tl.float32)  # 0 is for 0 alone
        return whole(tl.maximum(times(255.0 + tl.zeros_like(x), x), least), dtype), scale


@triton.jit
def join(high, low, FINITE: tl.constexpr):
    """Join the halves of a split master to fp32; the high half alone where that is not finite, or both are NaN. FINITE:
    neither is."""
    bits = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    away = low.to(tl.int32)
    if low.dtype == tl.int8:
        away = away << 8
    master = (bits + away).to(tl.float32, bitcast=True)
    if FINITE:
        return master
    else:
        joins = ((bits & 0x7FFFFFFF) < 0x7F800000) & (master == master)
        return tl.where(joins, master, bits.to(tl.float32, bitcast=True))


@triton.jit
def split(master, dtype: tl.constexpr, FINITE: tl.constexpr):
    """Split fp32 into bf16 and the difference of their bits: in int16, or in int8 in units of 256."""
    high = narrow(master, tl.bfloat16)
    bits = high.to(tl.int16, bitcast=True).to(tl.int32) << 16
    low = master.to(tl.int32, bitcast=True) - bits
    if dtype == tl.int8:
        near = (low + _SHIFT_BITS).to(tl.float32, bitcast=True) + _SHIFT_BYTES  # a multiple of 256
        near = tl.minimum(tl.maximum(near, _SHIFT_BYTES + _SHIFT - _MOST_BYTES), _SHIFT_BYTES + _SHIFT + _MOST_BYTES)
        low = near.to(tl.int32, bitcast=True)
    else:
        low = tl.minimum(tl.maximum(low, -32767), 32767)
    if not FINITE:
        low = tl.where((bits & 0x7FFFFFFF) < 0x7F800000, low, 0)
    return high, low.to(dtype)
