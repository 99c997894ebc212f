// Sixteen lanes: AVX-512 F, BW, DQ and VL. Not AVX512_BF16, whose conversion flushes denormals to zero.
#pragma once

#include <immintrin.h>

#include "../rules/codecs.h"
#include "fold_x86.h"

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
  // A master in two halves: `join`.
  static Vec load(const BFloat16* high, const int16_t* low) {
    __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(as_16(high))), 16);
    __m512i both = _mm512_add_epi32(bits, _mm512_cvtepi16_epi32(_mm256_loadu_si256(as_16(low))));
    __m512 master = _mm512_castsi512_ps(both);
    __mmask16 no_number = _mm512_cmp_ps_mask(master, master, _CMP_UNORD_Q);
    return Vec(_mm512_mask_mov_ps(master, no_number, _mm512_castsi512_ps(bits)));
  }
  void store(float* to) const { _mm512_storeu_ps(to, x); }
  void store(Half* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(to)); }
  void store(BFloat16* to) const { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(to)); }

  // The nearest integers.
  void store(int8_t* to) const { store_8(to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
  void store(uint8_t* to) const { store_8(to, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); }
  void store(BFloat16* high, int16_t* low) const {
    __m256i rounded = narrow(high);
    __m512i away = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
    __m512i kept = _mm512_max_epi32(_mm512_min_epi32(away, _mm512_set1_epi32(32767)), _mm512_set1_epi32(-32767));
    kept = _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), kept);  // of NaN 0
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), rounded);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), _mm512_cvtepi32_epi16(kept));
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

// As codecs.h has it, without the divider, which an update keeps busy: the quotient by an estimate of the reciprocal is
// put right by what is left of y. For none of the 256 numbers is the quotient near enough to a tie to be rounded
// otherwise.
inline Vec unscaled_int8(const int8_t* from) {
  Vec y = over_127(Vec::load(from));
  Vec d = Vec(2.0f) - magnitude(y);
  __m512 estimate = _mm512_rcp14_ps(d.x);
  __m512 r = _mm512_fmadd_ps(estimate, _mm512_fnmadd_ps(d.x, estimate, _mm512_set1_ps(1.0f)), estimate);
  __m512 quotient = _mm512_mul_ps(y.x, r);
  return Vec(_mm512_fmadd_ps(_mm512_fnmadd_ps(d.x, quotient, y.x), r, quotient));
}

// Estimates of what is stored, before it is rounded. Twice what rounding and the processor's reciprocals of 14 bits can
// make of a number below 256 is less than `kUnsure`.
constexpr bool kEstimates = true;
constexpr float kUnsure = 0x1p-12f;
struct Estimate {
  Vec scale, unit, half;
  Estimate() = default;
  explicit Estimate(float of) : scale(of), unit(1.5f * (255.0f / of)), half(0.5f * (255.0f / of)) {}

  Vec int8(Vec value) const {  // 254 v / (s + |v|)
    Vec d = scale + magnitude(value);
    __m512 r = _mm512_rcp14_ps(d.x);
    r = _mm512_fmadd_ps(r, _mm512_fnmadd_ps(d.x, r, _mm512_set1_ps(1.0f)), r);
    return value * Vec(254.0f) * Vec(r);
  }
  Vec root8(Vec value) const {  // 255 root(v) / s; 1 at least where v is above 0
    Vec r(_mm512_rsqrt14_ps(value.x)), root = value * r, near_1 = root * r;
    Vec near = root * Vec(_mm512_fnmadd_ps(near_1.x, half.x, unit.x));
    __mmask16 above = _mm512_cmp_ps_mask(value.x, _mm512_setzero_ps(), _CMP_GT_OQ);
    return Vec(_mm512_maskz_max_ps(above, _mm512_set1_ps(1.0f), near.x));  // of NaN NaN
  }
};
// Stores the nearest integers, and gives how far away each is.
template <class T>
inline Vec store_nearest(Vec a, T* to) {
  Vec shifted = a + Vec(12582912.0f);  // no fraction is left, and the last bits are the integer
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted.x)));
  return magnitude(a - (shifted - Vec(12582912.0f)));
}
inline bool below(Vec a, float bound) { return _mm512_cmp_ps_mask(a.x, _mm512_set1_ps(bound), _CMP_NLT_UQ) == 0; }

// Folds four lines of 16, each a vector, by halves.
inline void fold_line(const Vec (&a)[1], const Vec (&b)[1], const Vec (&c)[1], const Vec (&d)[1], float* to) {
  auto halved = [](Vec v) { return _mm256_add_ps(_mm512_castps512_ps256(v.x), _mm512_extractf32x8_ps(v.x, 1)); };
  fold_eight(halved(a[0]), halved(b[0]), halved(c[0]), halved(d[0]), to);
}
inline float largest_of_line(const Vec (&a)[1]) {
  __m512i bits = _mm512_castps_si512(a[0].x);
  return largest_of_eight(_mm256_max_epu32(_mm512_castsi512_si256(bits), _mm512_extracti32x8_epi32(bits, 1)));
}

template <class T>
inline void store_pair(T* to, Vec a, Vec b) {
  a.store(to);
  b.store(to + Vec::kLanes);
}
// Past the cache, to an address aligned to 64 bytes.
inline void stream_pair(float* to, Vec a, Vec b) {
  _mm512_stream_ps(to, a.x);
  _mm512_stream_ps(to + Vec::kLanes, b.x);
}
template <class T>
inline void stream_pair(T* to, Vec a, Vec b) {
  __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(a.narrow(to)), b.narrow(to), 1);
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), both);
}
inline void stream_fence() { _mm_sfence(); }
[[gnu::always_inline]] inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace
}  // namespace zero_kernels
