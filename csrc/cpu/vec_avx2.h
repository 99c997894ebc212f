// Eight lanes: AVX2 and F16C, without FMA.
#pragma once

#include <immintrin.h>

#include "../rules/codecs.h"
#include "fold_x86.h"

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
  // A master in two halves: `join`.
  static Vec load(const BFloat16* high, const int16_t* low) {
    __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(high)), 16);
    __m256 master = _mm256_castsi256_ps(_mm256_add_epi32(bits, _mm256_cvtepi16_epi32(load_16(low))));
    __m256 no_number = _mm256_cmp_ps(master, master, _CMP_UNORD_Q);
    return Vec(_mm256_blendv_ps(master, _mm256_castsi256_ps(bits), no_number));
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
  void store(BFloat16* high, int16_t* low) const {
    __m128i rounded = narrow(high);
    __m256i away = _mm256_sub_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(_mm256_cvtepu16_epi32(rounded), 16));
    __m256i kept = _mm256_max_epi32(_mm256_min_epi32(away, _mm256_set1_epi32(32767)), _mm256_set1_epi32(-32767));
    kept = _mm256_and_si256(kept, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q)));  // of NaN 0
    store_16(high, rounded);
    store_16(low, _mm_packs_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1)));
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

inline Vec unscaled_int8(const int8_t* from) { return zero_kernels::unscaled_int8(Vec::load(from)); }

// Estimates of what is stored, before it is rounded. Twice what rounding and the processor's reciprocals of 11 bits can
// make of a number below 256 is less than `kUnsure`. Of numbers below the normal ones they are inf or NaN.
constexpr bool kEstimates = true;
constexpr float kUnsure = 0x1p-10f;
struct Estimate {
  Vec scale, unit, half;
  Estimate() = default;
  explicit Estimate(float of) : scale(of), unit(1.5f * (255.0f / of)), half(0.5f * (255.0f / of)) {}

  Vec int8(Vec value) const {  // 254 v / (s + |v|)
    Vec d = scale + magnitude(value), r(_mm256_rcp_ps(d.x));
    return value * Vec(254.0f) * (r + r * (Vec(1.0f) - d * r));
  }
  Vec root8(Vec value) const {  // 255 root(v) / s; 1 at least where v is above 0
    Vec r(_mm256_rsqrt_ps(value.x)), root = value * r;
    Vec near = root * (unit - half * (root * r));
    __m256 above = _mm256_cmp_ps(value.x, _mm256_setzero_ps(), _CMP_GT_OQ);
    return Vec(_mm256_and_ps(above, _mm256_max_ps(_mm256_set1_ps(1.0f), near.x)));  // of NaN NaN
  }
};
// Stores the nearest integers, and gives how far away each is.
template <class T>
inline Vec store_nearest(Vec a, T* to) {
  Vec whole(_mm256_round_ps(a.x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  whole.store(to);
  return magnitude(a - whole);
}
inline bool below(Vec a, float bound) {
  return _mm256_movemask_ps(_mm256_cmp_ps(a.x, _mm256_set1_ps(bound), _CMP_NLT_UQ)) == 0;
}

// Folds four lines of 16, each of two vectors, by halves.
inline void fold_line(const Vec (&a)[2], const Vec (&b)[2], const Vec (&c)[2], const Vec (&d)[2], float* to) {
  fold_eight((a[0] + a[1]).x, (b[0] + b[1]).x, (c[0] + c[1]).x, (d[0] + d[1]).x, to);
}
inline float largest_of_line(const Vec (&a)[2]) {
  return largest_of_eight(_mm256_castps_si256(max_bits(a[0], a[1]).x));
}

template <class T>
inline void store_pair(T* to, Vec a, Vec b) {
  a.store(to);
  b.store(to + Vec::kLanes);
}
// Past the cache, to an address aligned to 32 bytes.
inline void stream_pair(float* to, Vec a, Vec b) {
  _mm256_stream_ps(to, a.x);
  _mm256_stream_ps(to + Vec::kLanes, b.x);
}
template <class T>
inline void stream_pair(T* to, Vec a, Vec b) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm256_set_m128i(b.narrow(to), a.narrow(to)));
}
inline void stream_fence() { _mm_sfence(); }
[[gnu::always_inline]] inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace
}  // namespace zero_kernels
