// Sixteen lanes: AVX-512 F, BW, DQ and VL. Not AVX512_BF16, whose conversion flushes denormals to zero.
#pragma once

#include <immintrin.h>

#include "../rules/codecs.h"
#include "x86.h"

namespace zero_kernels {
namespace {

struct Vec {
  static constexpr int kLanes = 16;
  __m512 x;

  Vec() = default;
  explicit Vec(__m512 value) : x(value) {}
  explicit Vec(float value) : x(_mm512_set1_ps(value)) {}

  static Vec load(const float* from) { return Vec(_mm512_loadu_ps(from)); }
  static Vec load(const Half* from) { return widen_16(from, _mm256_loadu_si256(as_16(from))); }
  static Vec load(const BFloat16* from) { return widen_16(from, _mm256_loadu_si256(as_16(from))); }
  static Vec load(const int8_t* from) { return Vec(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_8(from)))); }
  static Vec load(const uint8_t* from) { return Vec(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_8(from)))); }
  // A master in two halves, of which the low one has 16 or 8 bits: `join`.
  template <class Low>
  static Vec load(const BFloat16* high, const Low* low) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(as_16(high))), 16);
    __m512i both = _mm512_add_epi32(bits, load_low(low));
    __m512 master = _mm512_castsi512_ps(both);
    __m512 alone = _mm512_castsi512_ps(bits);
    __mmask16 is_alone = _mm512_cmp_ps_mask(master, master, _CMP_UNORD_Q) | is_inf_or_nan(alone);
    return Vec(_mm512_mask_mov_ps(master, is_alone, alone));
  }
  void store(float* to) const { _mm512_storeu_ps(to, x); }
  void store(Half* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(to)); }
  void store(BFloat16* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(to)); }

  // The nearest integers.
  void store(int8_t* to) const { store_8(to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
  void store(uint8_t* to) const { store_8(to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
  template <class Low>
  void store(BFloat16* high, Low* low) const {
    __m256i rounded = narrow(high);
    __m512i away = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
    __m512i kept = _mm512_max_epi32(_mm512_min_epi32(away, _mm512_set1_epi32(32767)), _mm512_set1_epi32(-32767));
    __m512 widened = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
    kept = _mm512_maskz_mov_epi32(_mm512_knot(is_inf_or_nan(widened)), kept);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), rounded);
    store_low(low, kept);
  }

  static Vec load_first(const float* from, int count) { return Vec(_mm512_maskz_loadu_ps(first(count), from)); }
  template <class T>
  static Vec load_first(const T* from, int count) {
    return widen_16(from, _mm256_maskz_loadu_epi16(first(count), from));
  }
  void store_first(float* to, int count) const { _mm512_mask_storeu_ps(to, first(count), x); }
  template <class T>
  void store_first(T* to, int count) const {
    _mm256_mask_storeu_epi16(to, first(count), narrow(to));
  }

  __m256i narrow(const Half*) const { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  __m256i narrow(const BFloat16*) const {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
  }

 private:
  static __mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1); }
  static __m128i load_8(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
  static void store_8(void* to, __m128i bits) { _mm_storeu_si128(static_cast<__m128i*>(to), bits); }
  // Quiet NaN 0x01, inf 0x08, -inf 0x10, signalling NaN 0x80.
  static __mmask16 is_inf_or_nan(__m512 a) { return _mm512_fpclass_ps_mask(a, 0x99); }
  static __m512i load_low(const int16_t* low) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256(as_16(low))); }
  static __m512i load_low(const int8_t* low) { return _mm512_slli_epi32(_mm512_cvtepi8_epi32(load_8(low)), 8); }
  static void store_low(int16_t* to, __m512i low) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(low));
  }
  static void store_low(int8_t* to, __m512i low) {  // `in_8_bits`
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(low, 8), _mm512_set1_epi32(1));
    __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(low, _mm512_add_epi32(odd, _mm512_set1_epi32(127))), 8);
    upper = _mm512_max_epi32(_mm512_min_epi32(upper, _mm512_set1_epi32(127)), _mm512_set1_epi32(-127));
    store_8(to, _mm512_cvtepi32_epi8(upper));
  }
  static const __m256i* as_16(const void* from) { return static_cast<const __m256i*>(from); }
  static Vec widen_16(const Half*, __m256i bits) { return Vec(_mm512_cvtph_ps(bits)); }
  static Vec widen_16(const BFloat16*, __m256i bits) {
    return Vec(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  }
};

inline Vec operator+(Vec a, Vec b) { return Vec(_mm512_add_ps(a.x, b.x)); }
inline Vec operator-(Vec a, Vec b) { return Vec(_mm512_sub_ps(a.x, b.x)); }
inline Vec operator*(Vec a, Vec b) { return Vec(_mm512_mul_ps(a.x, b.x)); }
inline Vec operator/(Vec a, Vec b) { return Vec(_mm512_div_ps(a.x, b.x)); }
inline Vec square_root(Vec a) { return Vec(_mm512_sqrt_ps(a.x)); }
inline Vec magnitude(Vec a) { return Vec(_mm512_and_ps(a.x, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fffffff)))); }
// The larger bit pattern, unsigned: of magnitudes NaN is above inf.
inline Vec max_bits(Vec a, Vec b) {
  return Vec(_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.x), _mm512_castps_si512(b.x))));
}
// 1, -1, or a itself where it is neither above nor below 0: so NaN stays.
inline Vec sign(Vec a) {
  __m512 zero = _mm512_setzero_ps();
  __mmask16 above = _mm512_cmp_ps_mask(a.x, zero, _CMP_GT_OQ), below = _mm512_cmp_ps_mask(a.x, zero, _CMP_LT_OQ);
  __m512 up = _mm512_mask_mov_ps(a.x, above, _mm512_set1_ps(1.0f));
  return Vec(_mm512_mask_mov_ps(up, below, _mm512_set1_ps(-1.0f)));
}
// 1 where a is 0, of either sign, else 0.
inline Vec is_zero(Vec a) {
  __mmask16 zero = _mm512_cmp_ps_mask(a.x, _mm512_setzero_ps(), _CMP_EQ_OQ);
  return Vec(_mm512_maskz_mov_ps(zero, _mm512_set1_ps(1.0f)));
}

}  // namespace

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
  __mmask16 finite = _mm512_cmp_ps_mask(a.x, _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
  __m512 q = _mm512_fmadd_ps(a.x, divisor.reciprocal.x, _mm512_maskz_mul_ps(finite, a.x, divisor.rest.x));
  __m512 remainder = _mm512_maskz_fnmadd_ps(finite, q, divisor.by.x, a.x);
  return Vec(_mm512_fmadd_ps(remainder, divisor.reciprocal.x, q));
}

// Two vectors, of elements one after the other.
struct Pair {
  Vec a, b;
};

// Numbers for 32 lanes of 16 bits.
template <class Lane>
inline __m512i lanes_by(Lane lane) {
  alignas(64) int16_t lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = int16_t(lane(i));
  return _mm512_load_si512(lanes);
}

// The low and the high halves of 32 elements, and 16 elements of their halves.
inline __m512i low_halves(Vec a, Vec b) {
  __m512i even = lanes_by([](int i) { return 2 * i; });
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a.x), even, _mm512_castps_si512(b.x));
}
inline __m512i high_halves(Vec a, Vec b) {
  __m512i odd = lanes_by([](int i) { return 2 * i + 1; });
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a.x), odd, _mm512_castps_si512(b.x));
}
inline Vec from_halves(__m512i low, __m512i high, int first) {
  __m512i both = lanes_by([=](int i) { return first + i / 2 + i % 2 * 32; });
  return Vec(_mm512_castsi512_ps(_mm512_permutex2var_epi16(low, both, high)));
}

// Whether one is inf or NaN, of high halves.
inline __mmask32 not_finite(__m512i high) {
  return _mm512_cmp_epi16_mask(
      _mm512_and_si512(high, _mm512_set1_epi16(0x7fff)), _mm512_set1_epi16(0x7f7f), _MM_CMPINT_GT);
}

// Two vectors in 16 bits each.
template <class T>
inline __m512i narrow_pair(Vec a, Vec b, const T* of) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(a.narrow(of)), b.narrow(of), 1);
}
inline __m512i narrow_pair(Vec a, Vec b, const BFloat16* of) {
  __m512i low = low_halves(a, b), high = high_halves(a, b), one = lanes_by([](int) { return 1; });
  if (not_finite(high)) [[unlikely]]
    return narrow_pair<BFloat16>(a, b, of);
  __m512i with_odd = _mm512_ternarylogic_epi32(low, high, one, 0xf8);  // low | high & 1
  __mmask32 up = _mm512_cmp_epu16_mask(with_odd, lanes_by([](int) { return -32768; }), _MM_CMPINT_NLE);
  return _mm512_mask_add_epi16(high, up, high, one);
}

template <class T>
inline void store_pair(T* to, Vec a, Vec b) {
  _mm512_storeu_si512(to, narrow_pair(a, b, to));
}
inline void store_pair(float* to, Vec a, Vec b) {
  a.store(to);
  b.store(to + Vec::kLanes);
}

// The noise of 32 elements, 16 bits each, from that one on; `mixed`, in 16 lanes.
inline __m512i noise_from(uint32_t of_state, int element) {
  __m512i words = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  words = _mm512_mullo_epi32(words, _mm512_set1_epi32(int32_t(kStride)));  // once, when it is compiled
  __m512i x = _mm512_add_epi32(_mm512_set1_epi32(int32_t(of_state + element / 2 * kStride)), words);
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32(0x7feb352d));
  x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 15)), _mm512_set1_epi32(int32_t(0x846ca68b)));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// Rounded stochastically. What is not rounded up takes the way of single elements.
inline void store_stochastic(BFloat16* to, Vec a, Vec b, uint32_t of_state, int element) {
  __m512i noise = noise_from(of_state, element);
  __m512i low = low_halves(a, b), high = high_halves(a, b);
  __mmask32 fixed =
      _mm512_cmpge_epi16_mask(_mm512_and_si512(high, _mm512_set1_epi16(0x7fff)), _mm512_set1_epi16(kFixed));
  __mmask32 up = _mm512_cmplt_epu16_mask(_mm512_add_epi16(low, noise), low);  // the sum of both has a carry
  _mm512_storeu_si512(to, _mm512_mask_add_epi16(high, up, high, _mm512_set1_epi16(1)));
  if (fixed) [[unlikely]]
    store_each_stochastic(to, a, b, of_state, element);
}

// Masters in two halves, by whole words. What is rare, a tie or what is not finite, takes the way of one vector.
inline __m512i load_lows(const int16_t* low) { return _mm512_loadu_si512(low); }
inline __m512i load_lows(const int8_t* low) {
  __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low));
  return _mm512_slli_epi16(_mm512_cvtepu8_epi16(upper), 8);
}
inline void store_lows(int16_t* to, __m512i low) { _mm512_storeu_si512(to, low); }
inline void store_lows(int8_t* to, __m512i low) {  // `in_8_bits`: the addition stops at 127 of the upper bits
  __m512i odd = _mm512_and_si512(_mm512_srli_epi16(low, 8), lanes_by([](int) { return 1; }));
  __m512i sum = _mm512_adds_epi16(low, _mm512_add_epi16(odd, lanes_by([](int) { return 127; })));
  __m512i upper = _mm512_max_epi16(_mm512_srai_epi16(sum, 8), lanes_by([](int) { return -127; }));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(upper));
}

template <class Low>
inline Pair join_pair(const BFloat16* high, const Low* low) {
  __m512i below = load_lows(low);
  __m512i above = _mm512_add_epi16(_mm512_loadu_si512(high), _mm512_srai_epi16(below, 15));
  if (not_finite(above) | not_finite(_mm512_loadu_si512(high))) [[unlikely]]
    return {Vec::load(high, low), Vec::load(high + 16, low + 16)};
  return {from_halves(below, above, 0), from_halves(below, above, 16)};
}

template <class Low>
inline void split_pair(Vec a, Vec b, BFloat16* high, Low* low) {
  __m512i below = low_halves(a, b), above = high_halves(a, b);
  __mmask32 tie = _mm512_cmpeq_epi16_mask(below, _mm512_set1_epi16(-32768));
  __m512i rounded = _mm512_add_epi16(above, _mm512_srli_epi16(below, 15));
  if (tie | not_finite(above) | not_finite(rounded)) [[unlikely]] {
    a.store(high, low);
    b.store(high + 16, low + 16);
  } else {
    _mm512_storeu_si512(high, rounded);
    store_lows(low, below);
  }
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

inline __m512i look_up(const uint16_t (&table)[128], __m512i index, __mmask32 above_63) {
  __m512i below = _mm512_permutex2var_epi16(_mm512_load_si512(table), index, _mm512_load_si512(table + 32));
  __m512i above = _mm512_permutex2var_epi16(_mm512_load_si512(table + 64), index, _mm512_load_si512(table + 96));
  return _mm512_mask_mov_epi16(below, above_63, above);
}

inline Pair unscaled_int8_pair(const int8_t* from) {
  __m512i stored = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  __m512i index = _mm512_abs_epi16(stored), sign = lanes_by([](int) { return -32768; });
  if (_mm512_cmpgt_epi16_mask(index, lanes_by([](int) { return 127; }))) [[unlikely]]
    return {unscaled_int8(Vec::load(from)), unscaled_int8(Vec::load(from + 16))};
  __mmask32 above_63 = _mm512_movepi16_mask(_mm512_slli_epi16(index, 9));
  __m512i low = look_up(kUnscaled.low, index, above_63), high = look_up(kUnscaled.high, index, above_63);
  high = _mm512_ternarylogic_epi32(high, stored, sign, 0xf8);  // high | stored & sign
  return {from_halves(low, high, 0), from_halves(low, high, 16)};
}

// Estimates of what is stored, as codecs.h has it, by the processor's reciprocals of 14 bits.
constexpr bool kEstimates = true;
struct Estimate {
  Vec scale, less, more;
  explicit Estimate(float of) : scale(of), less(kLess * (255.0f / of)), more(kMore * (255.0f / of)) {}

  // Bits, of which one at least is set where an integer is not sure.
  Vec store(Vec value, int8_t* to) const {  // 254 v / (s + |v|)
    __m512 d = (scale + magnitude(value)).x, r = _mm512_rcp14_ps(d), x = (value * Vec(r)).x;
    x = _mm512_fmadd_ps(x, _mm512_fnmadd_ps(d, r, _mm512_set1_ps(1.0f)), x);
    Vec low = shifted(Vec(x), Vec(254.0f * kLess)), high = shifted(Vec(x), Vec(254.0f * kMore));
    store_last(low, to);
    return differing(low, high);
  }
  Vec store(Vec root, uint8_t* to) const {  // 255 root(v) / s; 1 at least where v is above 0
    __mmask16 above = _mm512_cmp_ps_mask(root.x, _mm512_setzero_ps(), _CMP_GT_OQ);
    Vec low = shifted(root, less), high = shifted(root, more);
    store_last(Vec(_mm512_mask_max_ps(low.x, above, low.x, _mm512_set1_ps(kWhole + 1.0f))), to);
    return differing(low, high);
  }

 private:
  static Vec shifted(Vec x, Vec by) { return Vec(_mm512_fmadd_ps(x.x, by.x, _mm512_set1_ps(kWhole))); }
  static Vec differing(Vec a, Vec b) { return Vec(_mm512_xor_ps(a.x, b.x)); }
  static void store_last(Vec shifted, void* to) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted.x)));
  }
};
inline Vec any_bits(Vec a, Vec b) { return Vec(_mm512_or_ps(a.x, b.x)); }
inline bool has_bits(Vec a) { return _mm512_test_epi32_mask(_mm512_castps_si512(a.x), _mm512_castps_si512(a.x)); }

inline float largest_of_line(const Vec (&a)[1]) {
  __m512i bits = _mm512_castps_si512(a[0].x);
  return largest_of_eight(_mm256_max_epu32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1)));
}

// Past the cache, to an address aligned to 64 bytes.
inline void stream_pair(float* to, Vec a, Vec b) {
  _mm512_stream_ps(to, a.x);
  _mm512_stream_ps(to + Vec::kLanes, b.x);
}
template <class T>
inline void stream_pair(T* to, Vec a, Vec b) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), narrow_pair(a, b, to));
}
inline void stream_fence() { _mm_sfence(); }
[[gnu::always_inline]] inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace
}  // namespace zero_kernels
