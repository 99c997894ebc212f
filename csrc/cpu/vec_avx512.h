// Sixteen lanes: AVX-512 F, BW, DQ and VL. Not AVX512_BF16, whose conversion flushes denormals to zero.
#pragma once

#include <immintrin.h>

#define MM(operation) _mm512_##operation

namespace zero_kernels {
namespace {

constexpr int kLanesOfSet = 16;
using Floats = __m512;
using Ints = __m512i;   // sixteen of 32 bits, or 32 of 16
using Words = __m256i;  // sixteen of 16 bits, or 32 of 8
using Bytes = __m128i;  // sixteen of 8 bits
using Mask = __mmask16;
using Mask16 = __mmask32;  // of 32 lanes of 16 bits

inline Ints bits_of(Floats x) { return _mm512_castps_si512(x); }
inline Floats from_bits(Ints x) { return _mm512_castsi512_ps(x); }

inline Ints load_ints(const void* from) { return _mm512_loadu_si512(from); }
inline Words load_words(const void* from) { return _mm256_loadu_si256(static_cast<const Words*>(from)); }
inline Bytes load_bytes(const void* from) { return _mm_loadu_si128(static_cast<const Bytes*>(from)); }
inline void store_ints(void* to, Ints x) { _mm512_storeu_si512(to, x); }
inline void store_words(void* to, Words x) { _mm256_storeu_si256(static_cast<Words*>(to), x); }
inline void store_bytes(void* to, Bytes x) { _mm_storeu_si128(static_cast<Bytes*>(to), x); }

// The lower half of each lane, and the lower quarter.
inline Words words_of(Ints x) { return _mm512_cvtepi32_epi16(x); }
inline Bytes bytes_of(Ints x) { return _mm512_cvtepi32_epi8(x); }
inline Ints both(Words a, Words b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }

inline Mask is_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
inline Mask above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline Mask above(Ints a, Ints b) { return _mm512_cmpgt_epi32_mask(a, b); }
inline Mask16 above_16(Ints a, Ints b) { return _mm512_cmpgt_epi16_mask(a, b); }
inline Mask16 equal_16(Ints a, Ints b) { return _mm512_cmpeq_epi16_mask(a, b); }
inline bool any(Mask16 mask) { return mask; }
inline bool any(Ints x) { return _mm512_test_epi32_mask(x, x); }
inline Floats choose(Mask mask, Floats yes, Floats no) { return _mm512_mask_mov_ps(no, mask, yes); }

// Numbers for 32 lanes of 16 bits, from memory.
template <class Lane>
inline Ints lanes_by(Lane lane) {
  alignas(64) int16_t lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = int16_t(lane(i));
  return _mm512_load_si512(lanes);
}

// 32 of 16 bits, and one more where the fraction is above half; or where the sum of a and b has a carry.
inline Ints rounded_up(Ints x, Ints fraction) {
  Mask16 up = _mm512_cmp_epu16_mask(fraction, lanes_by([](int) { return -32768; }), _MM_CMPINT_NLE);
  return _mm512_mask_add_epi16(x, up, x, lanes_by([](int) { return 1; }));
}
inline Ints with_carry(Ints x, Ints a, Ints b) {
  Mask16 carry = _mm512_cmplt_epu16_mask(_mm512_add_epi16(a, b), a);
  return _mm512_mask_add_epi16(x, carry, x, _mm512_set1_epi16(1));
}

inline Floats product_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats near_reciprocal(Floats x) { return _mm512_rcp14_ps(x); }  // 14 bits

// The low and the high halves of 32 elements; sixteen elements of their halves; and 16 bits as 8.
inline Ints low_halves(Ints a, Ints b) {
  return _mm512_permutex2var_epi16(a, lanes_by([](int i) { return 2 * i; }), b);
}
inline Ints high_halves(Ints a, Ints b) {
  return _mm512_permutex2var_epi16(a, lanes_by([](int i) { return 2 * i + 1; }), b);
}
inline Ints from_halves(Ints low, Ints high, int part) {
  Ints order = lanes_by([=](int i) { return 16 * part + i / 2 + i % 2 * 32; });
  return _mm512_permutex2var_epi16(low, order, high);
}
inline Words packed(Ints x) { return _mm512_cvtepi16_epi8(x); }

}  // namespace
}  // namespace zero_kernels

#include "vec_x86.h"

namespace zero_kernels {

// A divisor that keeps its reciprocal: rounded, and the rest. A number times both of them is one of the two floats
// around the quotient. Then what remains is exact, and adding its share gives the quotient, rounded to nearest
// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). It is for updates
// whose state is in the caches: there the divider of a Xeon, ten cycles for 16 lanes, was AdamW's limit.
template <>
struct Divisor<Vec> {
  Vec by, reciprocal, rest;
  bool usual;  // so that quotients of roots, and what remains, are normal numbers

  explicit Divisor(float divisor)
      : by(divisor),
        reciprocal(Vec(1.0f) / by),
        rest(Vec(_mm512_fnmadd_ps(reciprocal.x, by.x, Vec(1.0f).x)) / by),
        usual(divisor > 0x1p-27f && divisor < 0x1p27f) {}
};

namespace {

// `a`: the root of a float that is not -0.
inline Vec operator/(Vec a, const Divisor<Vec>& divisor) {
  if (!divisor.usual) [[unlikely]]
    return a / divisor.by;
  Mask finite = _mm512_cmp_ps_mask(a.x, _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
  Floats q = _mm512_fmadd_ps(a.x, divisor.reciprocal.x, _mm512_maskz_mul_ps(finite, a.x, divisor.rest.x));
  Floats remainder = _mm512_maskz_fnmadd_ps(finite, q, divisor.by.x, a.x);
  return Vec(_mm512_fmadd_ps(remainder, divisor.reciprocal.x, q));
}

// What `unscaled_int8` gives for 0 to 127, in halves. To look it up takes fewer instructions than a division, and none
// of the divider, which an update keeps busy.
struct Unscaled {
  uint16_t low[128], high[128];
  constexpr Unscaled() : low(), high() {
    for (int i = 0; i < 128; ++i) {
      float y = float(i) / 127.0f;
      uint32_t bits = __builtin_bit_cast(uint32_t, y / (2.0f - y));
      low[i] = uint16_t(bits);
      high[i] = uint16_t(bits >> 16);
    }
  }
};
alignas(64) constexpr Unscaled kUnscaled;

inline Ints look_up(const uint16_t (&table)[128], Ints index, Mask16 above_63) {
  Ints below = _mm512_permutex2var_epi16(_mm512_load_si512(table), index, _mm512_load_si512(table + 32));
  Ints above = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), index, _mm512_load_si512(table + 96));
  return _mm512_mask_mov_epi16(below, above_63, above);
}

inline Pair unscaled_int8_pair(const int8_t* from) {
  Ints stored = _mm512_cvtepi8_epi16(load_words(from)), index = _mm512_abs_epi16(stored);
  if (any(above_16(index, lanes_by([](int) { return 127; })))) [[unlikely]]
    return {unscaled_int8(Vec::load(from)), unscaled_int8(Vec::load(from + 16))};
  Mask16 above_63 = _mm512_movepi16_mask(_mm512_slli_epi16(index, 9));
  Ints low = look_up(kUnscaled.low, index, above_63), high = look_up(kUnscaled.high, index, above_63);
  return joined(low, high | (stored & lanes_by([](int) { return -32768; })));
}

inline float largest_of_line(const Vec (&a)[1]) {
  Ints bits = bits_of(a[0].x);
  return largest_of_eight(_mm256_max_epu32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1)));
}

}  // namespace
}  // namespace zero_kernels
