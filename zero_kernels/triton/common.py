"""Helpers of the Triton kernels: exact casts, the options of a launch, the columns of the hyper table."""

from typing import Any

import triton
import triton.language as tl

from zero_kernels.hyper import HYPER_COLUMNS

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether TRITON_INTERPRET=1 has the kernels run in Python, on CPU tensors. Triton reads it when it is imported."""

_INTERPRETED = tl.constexpr(INTERPRETED)

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of every launch. A fused multiply-add rounds once where the bit contract rounds twice."""

COLUMNS = tl.constexpr(len(HYPER_COLUMNS))
"""Columns of the hyper table; the names below are their indices, in the order of HYPER_COLUMNS."""

(
    STEP_SIZE,
    DECAY,
    WEIGHT_DECAY,
    EPS,
    BETA1,
    ONE_MINUS_BETA1,
    BETA2,
    ONE_MINUS_BETA2,
    BIAS_CORRECTION2_SQRT,
    ACTIVE,
    GRAD_FACTOR,
    STEP_NUMBER,
) = map(tl.constexpr, range(len(HYPER_COLUMNS)))


@triton.jit
def times(a, b):
    """a * b in fp32, rounded on its own. For every product that is added to something.

    For compute capability 10.0 LLVM pairs lanes into mul.rn.f32x2 and add.rn.f32x2, which ptxas (seen: 12.9, 13.0)
    contracts into one FFMA2, its `.rn` and --fmad=false notwithstanding. LLVM does not look into inline assembly.
    """
    if _INTERPRETED:
        return a * b
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)


@triton.jit
def widen(x):
    """fp16, bf16 or fp32 to fp32, exactly."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        # The interpreter's own cast loses subnormals.
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 to `dtype`, to nearest even; NaN stays NaN."""
    if _INTERPRETED and dtype == tl.bfloat16:
        # The interpreter's own cast truncates. A NaN is made quiet: the bits that make it one may be those cut off.
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, nearest)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def nonfinite(x):
    """Where fp32 `x` is inf or NaN."""
    return (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
