// State of 8 bits with fewer divisions: what is read is a quotient that is corrected once, and what is stored is
// estimated. Both have the bits of codecs.h.
#pragma once

#include <cmath>

#include "../rules/codecs.h"

namespace zero_kernels {
namespace {

// Within 2^-22 of the reciprocal, and of the root, of what is neither very small nor very large.
ZK_HOST_DEVICE inline float near_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}
ZK_HOST_DEVICE inline float near_root(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::sqrt(x);
#endif
}

ZK_HOST_DEVICE inline float near_reciprocal_root(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return float(1.0 / std::sqrt(double(x)));
#endif
}

// As `unscaled_int8`. The divisor is from just below 1 to 2, so a quotient that is corrected once by its rest is
// rounded as the division rounds it: the tests try all of them, with reciprocals that are off as far as they may be.
ZK_HOST_DEVICE inline float corrected_quotient(float a, float b, float near_one_over_b) {
  float quotient = a * near_one_over_b;
  return fmaf(fmaf(-b, quotient, a), near_one_over_b, quotient);
}
ZK_HOST_DEVICE inline float quick_unscaled_int8(float stored) {
  float y = over_127(stored), divisor = 2.0f - magnitude(y);
  return corrected_quotient(y, divisor, near_reciprocal(divisor));
}

// What of a row is stored in eight bits, by estimates, as codecs.h has it. The scales at which reciprocals and roots
// would be flushed to 0 are not usual, nor is the one that values may lie above.
constexpr int32_t kUnsure = -1000;
struct Estimate {
  Form form;
  float scale, factor;
  bool usual;

  ZK_HOST_DEVICE Estimate(Form form, float scale)
      : form(form),
        scale(scale),
        factor(form == Form::kInt8 ? 254.0f : 255.0f / scale),
        usual(scale > 0x1p-50f && scale < kLargest) {}

  // near: the reciprocal of the scale and the value's magnitude together, or the value's root.
  ZK_HOST_DEVICE int32_t stored(float value, float near) const {
    float x = (form == Form::kInt8 ? value * near : near) * factor;
    int32_t low = nearest(x * kLess), high = nearest(x * kMore);
    if (low != high || !usual) return kUnsure;
    return form == Form::kRoot8 && low == 0 && value > 0.0f ? 1 : low;  // 0 is for 0 alone
  }
};

// In a function of its own: it is as long as all the rest, and one value in thousands needs it.
#if defined(__CUDACC__)
#define ZK_APART __noinline__ __host__ __device__
#else
#define ZK_APART inline
#endif
ZK_APART int32_t surely_stored(Form form, float value, float scale) { return nearest(encoded(form, value, scale)); }

ZK_HOST_DEVICE inline int32_t stored_by(const Estimate& of, float value) {
  float near = of.form == Form::kInt8 ? near_reciprocal(of.scale + magnitude(value)) : near_root(value);
  int32_t stored = of.stored(value, near);
  return stored == kUnsure ? surely_stored(of.form, value, of.scale) : stored;
}

}  // namespace
}  // namespace zero_kernels
