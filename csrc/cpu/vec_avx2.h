// Eight lanes: AVX2 and F16C, without FMA.
#pragma once

#include <immintrin.h>

#define MM(operation) _mm256_##operation

namespace zero_kernels {
namespace {

constexpr int kLanesOfSet = 8;
using Floats = __m256;
using Ints = __m256i;   // eight of 32 bits, or sixteen of 16
using Words = __m128i;  // eight of 16 bits, or sixteen of 8
using Bytes = __m128i;  // eight of 8 bits, in the lower half
using Mask = Ints;      // a lane is all ones or 0, of 32 bits or of 16
using Mask16 = Ints;

inline Ints bits_of(Floats x) { return _mm256_castps_si256(x); }
inline Floats from_bits(Ints x) { return _mm256_castsi256_ps(x); }

inline Ints load_ints(const void* from) { return _mm256_loadu_si256(static_cast<const Ints*>(from)); }
inline Words load_words(const void* from) { return _mm_loadu_si128(static_cast<const Words*>(from)); }
inline Bytes load_bytes(const void* from) { return _mm_loadl_epi64(static_cast<const Bytes*>(from)); }
inline void store_ints(void* to, Ints x) { _mm256_storeu_si256(static_cast<Ints*>(to), x); }
inline void store_words(void* to, Words x) { _mm_storeu_si128(static_cast<Words*>(to), x); }
inline void store_bytes(void* to, Bytes x) { _mm_storel_epi64(static_cast<Bytes*>(to), x); }

// The lower half of each lane, and the lower quarter.
inline Words words_of(Ints x) {
  x = x & _mm256_set1_epi32(0xffff);
  return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}
inline Bytes bytes_of(Ints x) {
  Words words = words_of(x & _mm256_set1_epi32(0xff));
  return _mm_packus_epi16(words, words);
}
inline Ints both(Words a, Words b) { return _mm256_set_m128i(b, a); }

inline Mask is_nan(Floats x) { return bits_of(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
inline Mask above(Floats a, Floats b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_GT_OQ)); }
inline Mask equal(Floats a, Floats b) { return bits_of(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)); }
inline Mask above(Ints a, Ints b) { return _mm256_cmpgt_epi32(a, b); }
inline Mask16 above_16(Ints a, Ints b) { return _mm256_cmpgt_epi16(a, b); }
inline Mask16 equal_16(Ints a, Ints b) { return _mm256_cmpeq_epi16(a, b); }
inline bool any(Ints mask) { return !_mm256_testz_si256(mask, mask); }
inline Floats choose(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, from_bits(mask)); }

// Sixteen of 16 bits, and one more where the fraction is above half; or where the sum of a and b has a carry.
inline Ints rounded_up(Ints x, Ints fraction) {
  Ints up = above_16(fraction ^ _mm256_set1_epi16(-32768), _mm256_setzero_si256());
  return _mm256_sub_epi16(x, up);
}
inline Ints with_carry(Ints x, Ints a, Ints b) {
  Ints sum = _mm256_add_epi16(a, b), none = _mm256_cmpeq_epi16(_mm256_max_epu16(sum, a), sum);
  return _mm256_add_epi16(x, _mm256_add_epi16(none, _mm256_set1_epi16(1)));
}

inline Floats product_plus(Floats a, Floats b, Floats c) { return _mm256_add_ps(_mm256_mul_ps(a, b), c); }
inline Floats near_reciprocal(Floats x) { return _mm256_rcp_ps(x); }  // 11 bits

// The low and the high halves of sixteen elements; the elements of their halves; and 16 bits as 8, of -128 to 127.
inline Ints in_order(Ints quarters) { return _mm256_permute4x64_epi64(quarters, 0xd8); }
inline Ints low_halves(Ints a, Ints b) {
  Ints mask = _mm256_set1_epi32(0xffff);
  return in_order(_mm256_packus_epi32(a & mask, b & mask));
}
inline Ints high_halves(Ints a, Ints b) {
  return in_order(_mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16)));
}
inline Ints from_halves(Ints low, Ints high, int part) {
  low = in_order(low);
  high = in_order(high);
  return part == 0 ? _mm256_unpacklo_epi16(low, high) : _mm256_unpackhi_epi16(low, high);
}
inline Words packed(Ints x) { return _mm256_castsi256_si128(in_order(_mm256_packs_epi16(x, x))); }

}  // namespace
}  // namespace zero_kernels

#include "vec_x86.h"

namespace zero_kernels {
namespace {

inline Pair unscaled_int8_pair(const int8_t* from) {
  return {unscaled_int8(Vec::load(from)), unscaled_int8(Vec::load(from + 8))};
}

inline float largest_of_line(const Vec (&a)[2]) { return largest_of_eight(bits_of(max_bits(a[0], a[1]).x)); }

}  // namespace
}  // namespace zero_kernels
