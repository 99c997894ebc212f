// 16-bit floats and their exact conversions. On a processor in integer arithmetic, which no mode of it changes; on a
// GPU one instruction each, with the same results.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace zero_kernels {

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

ZK_HOST_DEVICE static inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

ZK_HOST_DEVICE static inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

ZK_HOST_DEVICE static inline float widen(float x) { return x; }

ZK_HOST_DEVICE static inline float widen(BFloat16 x) { return bits_float(uint32_t(x.bits) << 16); }

ZK_HOST_DEVICE static inline float widen(Half x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  uint32_t sign = uint32_t(x.bits & 0x8000) << 16;
  uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_float(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  if (magnitude >= 0x400) return bits_float(sign | ((magnitude << 13) + (uint32_t(127 - 15) << 23)));
  // Zero or denormal: magnitude * 2^-24 is exact in fp32.
  return bits_float(sign | float_bits(float(magnitude) * 0x1p-24f));
#endif
}

ZK_HOST_DEVICE static inline void narrow(float x, float* out) { *out = x; }

ZK_HOST_DEVICE static inline void narrow(float x, BFloat16* out) {
#if defined(__CUDA_ARCH__)
  out->bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  uint32_t bits = float_bits(x);
  bool nan = (bits & 0x7fffffff) > 0x7f800000;
  // Round to nearest even; a carry out of the mantissa is the right exponent, up to inf. NaN stays a quiet NaN.
  out->bits = nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

ZK_HOST_DEVICE static inline void narrow(float x, Half* out) {
#if defined(__CUDA_ARCH__)
  out->bits = __half_as_ushort(__float2half_rn(x));
#else
  uint32_t bits = float_bits(x);
  uint32_t sign = bits >> 16 & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;
  } else if (magnitude >= 0x477ff000) {  // 65520 and above round to inf
    half = 0x7c00;
  } else if (magnitude >= 0x38800000) {  // normal in fp16: drop 13 bits, to nearest even
    half = (magnitude - (uint32_t(127 - 15) << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  } else {
    // Denormal in fp16: adding 0.5 puts the unit 2^-24 in the last place, so the addition itself rounds to even.
    half = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
  }
  out->bits = uint16_t(sign | half);
#endif
}

template <class T>
struct Type {
  using type = T;
};

// Calls f with the type of a DType, as Type<T>.
template <class F>
ZK_HOST_DEVICE static inline void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kHalf:
      return f(Type<Half>());
    case DType::kBFloat16:
      return f(Type<BFloat16>());
    case DType::kFloat:
      return f(Type<float>());
  }
}

}  // namespace zero_kernels
