// Eight lanes: AVX2 and F16C, without FMA.
#pragma once

#include <immintrin.h>

#include "../rules/codecs.h"
#include "x86.h"

namespace zero_kernels {
namespace {

struct Vec {
  static constexpr int kLanes = 8;
  __m256 x;

  Vec() = default;
  explicit Vec(__m256 value) : x(value) {}
  explicit Vec(float value) : x(_mm256_set1_ps(value)) {}

  static Vec load(const float* from) { return Vec(_mm256_loadu_ps(from)); }
  static Vec load(const Half* from) { return Vec(_mm256_cvtph_ps(load_16(from))); }
  static Vec load(const BFloat16* from) {
    return Vec(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(from)), 16)));
  }
  static Vec load(const int8_t* from) { return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(from)))); }
  static Vec load(const uint8_t* from) { return Vec(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(from)))); }
  // A master in two halves, of which the low one has 16 or 8 bits: `join`.
  template <class Low>
  static Vec load(const BFloat16* high, const Low* low) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(high)), 16);
    __m256 master = _mm256_castsi256_ps(_mm256_add_epi32(bits, load_low(low)));
    __m256 is_alone = _mm256_or_ps(_mm256_cmp_ps(master, master, _CMP_UNORD_Q), is_inf_or_nan(bits));
    return Vec(_mm256_blendv_ps(master, _mm256_castsi256_ps(bits), is_alone));
  }
  void store(float* to) const { _mm256_storeu_ps(to, x); }
  void store(Half* to) const { store_16(to, narrow(to)); }
  void store(BFloat16* to) const { store_16(to, narrow(to)); }
  // The nearest integers.
  void store(int8_t* to) const {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(nearest(), nearest()));
  }
  void store(uint8_t* to) const {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(nearest(), nearest()));
  }
  template <class Low>
  void store(BFloat16* high, Low* low) const {
    __m128i rounded = narrow(high);
    __m256i widened = _mm256_slli_epi32(_mm256_cvtepu16_epi32(rounded), 16);
    __m256i away = _mm256_sub_epi32(_mm256_castps_si256(x), widened);
    __m256i kept = _mm256_max_epi32(_mm256_min_epi32(away, _mm256_set1_epi32(32767)), _mm256_set1_epi32(-32767));
    kept = _mm256_andnot_si256(_mm256_castps_si256(is_inf_or_nan(widened)), kept);
    store_16(high, rounded);
    store_low(low, _mm_packs_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1)));
  }

  __m128i narrow(const Half*) const { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  __m128i narrow(const BFloat16*) const {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256i chosen =
        _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan));
    __m256i high = _mm256_srli_epi32(chosen, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  }

  template <class T>
  static Vec load_first(const T* from, int count) {
    T lanes[kLanes] = {};
    for (int i = 0; i < count; ++i) lanes[i] = from[i];
    return load(lanes);
  }
  template <class T>
  void store_first(T* to, int count) const {
    T lanes[kLanes];
    store(lanes);
    for (int i = 0; i < count; ++i) to[i] = lanes[i];
  }

 private:
  __m128i nearest() const {
    __m256i whole = _mm256_cvtps_epi32(x);
    return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  }
  static __m256 is_inf_or_nan(__m256i bits) {
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f7fffff)));
  }
  static __m256i load_low(const int16_t* low) { return _mm256_cvtepi16_epi32(load_16(low)); }
  static __m256i load_low(const int8_t* low) { return _mm256_slli_epi32(_mm256_cvtepi8_epi32(load_8(low)), 8); }
  static void store_low(int16_t* to, __m128i low) { store_16(to, low); }
  static void store_low(int8_t* to, __m128i low) {  // `in_8_bits`: the addition stops at 127 of the upper bits
    __m128i odd = _mm_and_si128(_mm_srli_epi16(low, 8), _mm_set1_epi16(1));
    __m128i sum = _mm_adds_epi16(low, _mm_add_epi16(odd, _mm_set1_epi16(127)));
    __m128i upper = _mm_max_epi16(_mm_srai_epi16(sum, 8), _mm_set1_epi16(-127));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(upper, upper));
  }
  static __m128i load_8(const void* from) { return _mm_loadl_epi64(static_cast<const __m128i*>(from)); }
  static __m128i load_16(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }
  static void store_16(void* to, __m128i bits) { _mm_storeu_si128(static_cast<__m128i*>(to), bits); }
};

inline Vec operator+(Vec a, Vec b) { return Vec(_mm256_add_ps(a.x, b.x)); }
inline Vec operator-(Vec a, Vec b) { return Vec(_mm256_sub_ps(a.x, b.x)); }
inline Vec operator*(Vec a, Vec b) { return Vec(_mm256_mul_ps(a.x, b.x)); }
inline Vec operator/(Vec a, Vec b) { return Vec(_mm256_div_ps(a.x, b.x)); }
inline Vec square_root(Vec a) { return Vec(_mm256_sqrt_ps(a.x)); }
inline Vec magnitude(Vec a) { return Vec(_mm256_and_ps(a.x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff)))); }
// The larger bit pattern, unsigned: of magnitudes NaN is above inf.
inline Vec max_bits(Vec a, Vec b) {
  return Vec(_mm256_castsi256_ps(_mm256_max_epu32(_mm256_castps_si256(a.x), _mm256_castps_si256(b.x))));
}
// 1, -1, or a itself where it is neither above nor below 0: so NaN stays.
inline Vec sign(Vec a) {
  __m256 zero = _mm256_setzero_ps();
  __m256 above = _mm256_cmp_ps(a.x, zero, _CMP_GT_OQ), below = _mm256_cmp_ps(a.x, zero, _CMP_LT_OQ);
  return Vec(_mm256_blendv_ps(_mm256_blendv_ps(a.x, _mm256_set1_ps(1.0f), above), _mm256_set1_ps(-1.0f), below));
}
// 1 where a is 0, of either sign, else 0.
inline Vec is_zero(Vec a) {
  return Vec(_mm256_and_ps(_mm256_cmp_ps(a.x, _mm256_setzero_ps(), _CMP_EQ_OQ), _mm256_set1_ps(1.0f)));
}

inline float largest_of_line(const Vec (&a)[2]) {
  return largest_of_eight(_mm256_castps_si256(max_bits(a[0], a[1]).x));
}

// Two vectors, of elements one after the other.
struct Pair {
  Vec a, b;
};

// The low and the high halves of 16 elements, and these elements of their halves.
inline __m256i in_order(__m256i quarters) { return _mm256_permute4x64_epi64(quarters, 0xd8); }
inline __m256i low_halves(Vec a, Vec b) {
  __m256i mask = _mm256_set1_epi32(0xffff);
  return in_order(_mm256_packus_epi32(
      _mm256_and_si256(_mm256_castps_si256(a.x), mask), _mm256_and_si256(_mm256_castps_si256(b.x), mask)));
}
inline __m256i high_halves(Vec a, Vec b) {
  return in_order(_mm256_packus_epi32(
      _mm256_srli_epi32(_mm256_castps_si256(a.x), 16), _mm256_srli_epi32(_mm256_castps_si256(b.x), 16)));
}
inline Pair from_halves(__m256i low, __m256i high) {
  low = in_order(low);
  high = in_order(high);
  return {
      Vec(_mm256_castsi256_ps(_mm256_unpacklo_epi16(low, high))),
      Vec(_mm256_castsi256_ps(_mm256_unpackhi_epi16(low, high)))};
}

// Those that are inf or NaN, of high halves.
inline __m256i not_finite(__m256i high) {
  return _mm256_cmpgt_epi16(_mm256_and_si256(high, _mm256_set1_epi16(0x7fff)), _mm256_set1_epi16(0x7f7f));
}
inline bool any(__m256i bits) { return !_mm256_testz_si256(bits, bits); }

// Two vectors in 16 bits each.
template <class T>
inline __m256i narrow_pair(Vec a, Vec b, const T* of) {
  return _mm256_set_m128i(b.narrow(of), a.narrow(of));
}
inline __m256i narrow_pair(Vec a, Vec b, const BFloat16* of) {
  __m256i low = low_halves(a, b), high = high_halves(a, b);
  if (any(not_finite(high))) [[unlikely]]
    return narrow_pair<BFloat16>(a, b, of);
  __m256i with_odd = _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi16(1)));
  __m256i up = _mm256_cmpgt_epi16(_mm256_xor_si256(with_odd, _mm256_set1_epi16(-32768)), _mm256_setzero_si256());
  return _mm256_sub_epi16(high, up);  // -1 where it is rounded up
}

template <class T>
inline void store_pair(T* to, Vec a, Vec b) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow_pair(a, b, to));
}
inline void store_pair(float* to, Vec a, Vec b) {
  a.store(to);
  b.store(to + Vec::kLanes);
}

// The noise of 16 elements, 16 bits each, from that one on; `mixed`, in 8 lanes.
inline __m256i noise_from(uint32_t of_state, int element) {
  __m256i words = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  words = _mm256_mullo_epi32(words, _mm256_set1_epi32(int32_t(kStride)));  // once, when it is compiled
  __m256i x = _mm256_add_epi32(_mm256_set1_epi32(int32_t(of_state + element / 2 * kStride)), words);
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), _mm256_set1_epi32(0x7feb352d));
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), _mm256_set1_epi32(int32_t(0x846ca68b)));
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

// Rounded stochastically. What is not rounded up takes the way of single elements.
inline void store_stochastic(BFloat16* to, Vec a, Vec b, uint32_t of_state, int element) {
  __m256i noise = noise_from(of_state, element);
  __m256i low = low_halves(a, b), high = high_halves(a, b);
  __m256i magnitudes = _mm256_and_si256(high, _mm256_set1_epi16(0x7fff));
  // The sum of both has no carry where it is not below one of them.
  __m256i sum = _mm256_add_epi16(low, noise), same = _mm256_cmpeq_epi16(_mm256_max_epu16(sum, low), sum);
  __m256i up = _mm256_add_epi16(same, _mm256_set1_epi16(1));  // 1 with a carry, else 0
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi16(high, up));
  if (any(_mm256_cmpgt_epi16(magnitudes, _mm256_set1_epi16(kFixed - 1)))) [[unlikely]]
    store_each_stochastic(to, a, b, of_state, element);
}

// Masters in two halves, by whole words. What is rare, a tie or what is not finite, takes the way of one vector.
inline __m256i load_lows(const int16_t* low) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(low)); }
inline __m256i load_lows(const int8_t* low) {
  __m128i upper = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low));
  return _mm256_slli_epi16(_mm256_cvtepu8_epi16(upper), 8);
}
inline void store_lows(int16_t* to, __m256i low) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), low); }
inline void store_lows(int8_t* to, __m256i low) {  // `in_8_bits`: the addition stops at 127 of the upper bits
  __m256i odd = _mm256_and_si256(_mm256_srli_epi16(low, 8), _mm256_set1_epi16(1));
  __m256i sum = _mm256_adds_epi16(low, _mm256_add_epi16(odd, _mm256_set1_epi16(127)));
  __m256i upper = _mm256_max_epi16(_mm256_srai_epi16(sum, 8), _mm256_set1_epi16(-127));
  __m256i packed = in_order(_mm256_packs_epi16(upper, upper));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(packed));
}

template <class Low>
inline Pair join_pair(const BFloat16* high, const Low* low) {
  __m256i below = load_lows(low);
  __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
  __m256i above = _mm256_add_epi16(given, _mm256_srai_epi16(below, 15));
  if (any(_mm256_or_si256(not_finite(above), not_finite(given)))) [[unlikely]]
    return {Vec::load(high, low), Vec::load(high + 8, low + 8)};
  return from_halves(below, above);
}

template <class Low>
inline void split_pair(Vec a, Vec b, BFloat16* high, Low* low) {
  __m256i below = low_halves(a, b), above = high_halves(a, b);
  __m256i tie = _mm256_cmpeq_epi16(below, _mm256_set1_epi16(-32768));
  __m256i rounded = _mm256_add_epi16(above, _mm256_srli_epi16(below, 15));
  if (any(_mm256_or_si256(tie, _mm256_or_si256(not_finite(above), not_finite(rounded))))) [[unlikely]] {
    a.store(high, low);
    b.store(high + 8, low + 8);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), rounded);
    store_lows(low, below);
  }
}

inline Pair unscaled_int8_pair(const int8_t* from) {
  return {unscaled_int8(Vec::load(from)), unscaled_int8(Vec::load(from + 8))};
}

// Estimates of what is stored, as codecs.h has it, by the processor's reciprocals of 11 bits.
constexpr bool kEstimates = true;
struct Estimate {
  Vec scale, less, more;
  explicit Estimate(float of) : scale(of), less(kLess * (255.0f / of)), more(kMore * (255.0f / of)) {}

  // Bits, of which one at least is set where an integer is not sure.
  Vec store(Vec value, int8_t* to) const {  // 254 v / (s + |v|)
    Vec d = scale + magnitude(value), r(_mm256_rcp_ps(d.x));
    Vec x = value * (r + r * (Vec(1.0f) - d * r));
    Vec low = shifted(x, Vec(254.0f * kLess)), high = shifted(x, Vec(254.0f * kMore));
    (low - Vec(kWhole)).store(to);
    return differing(low, high);
  }
  Vec store(Vec root, uint8_t* to) const {  // 255 root(v) / s; 1 at least where v is above 0
    __m256 above = _mm256_cmp_ps(root.x, _mm256_setzero_ps(), _CMP_GT_OQ);
    Vec low = shifted(root, less), high = shifted(root, more);
    Vec(_mm256_max_ps((low - Vec(kWhole)).x, _mm256_and_ps(above, _mm256_set1_ps(1.0f)))).store(to);
    return differing(low, high);
  }

 private:
  static Vec shifted(Vec x, Vec by) { return x * by + Vec(kWhole); }
  static Vec differing(Vec a, Vec b) { return Vec(_mm256_xor_ps(a.x, b.x)); }
};
inline Vec any_bits(Vec a, Vec b) { return Vec(_mm256_or_ps(a.x, b.x)); }
inline bool has_bits(Vec a) { return any(_mm256_castps_si256(a.x)); }

// Past the cache, to an address aligned to 32 bytes.
inline void stream_pair(float* to, Vec a, Vec b) {
  _mm256_stream_ps(to, a.x);
  _mm256_stream_ps(to + Vec::kLanes, b.x);
}
template <class T>
inline void stream_pair(T* to, Vec a, Vec b) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), narrow_pair(a, b, to));
}
inline void stream_fence() { _mm_sfence(); }
[[gnu::always_inline]] inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace
}  // namespace zero_kernels
