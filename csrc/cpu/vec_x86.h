// What AVX2 and AVX-512 do alike, in lanes of vec_avx2.h or vec_avx512.h: MM names an intrinsic of that set.
#pragma once

#include "../rules/codecs.h"

namespace zero_kernels {
namespace {

inline Ints widened(Words x) { return MM(slli_epi32)(MM(cvtepu16_epi32)(x), 16); }  // of bf16
inline Mask is_inf_or_nan(Ints bits) { return above(bits & MM(set1_epi32)(0x7fffffff), MM(set1_epi32)(0x7f7fffff)); }

inline Ints load_low(const int16_t* low) { return MM(cvtepi16_epi32)(load_words(low)); }
inline Ints load_low(const int8_t* low) { return MM(slli_epi32)(MM(cvtepi8_epi32)(load_bytes(low)), 8); }
inline void store_low(int16_t* to, Ints low) { store_words(to, words_of(low)); }
inline void store_low(int8_t* to, Ints low) {  // `in_8_bits`
  Ints odd = MM(srli_epi32)(low, 8) & MM(set1_epi32)(1);
  Ints upper = MM(srai_epi32)(MM(add_epi32)(low, MM(add_epi32)(odd, MM(set1_epi32)(127))), 8);
  store_bytes(to, bytes_of(MM(max_epi32)(MM(min_epi32)(upper, MM(set1_epi32)(127)), MM(set1_epi32)(-127))));
}

struct Vec {
  static constexpr int kLanes = kLanesOfSet;
  Floats x;

  Vec() = default;
  explicit Vec(Floats value) : x(value) {}
  explicit Vec(float value) : x(MM(set1_ps)(value)) {}

  static Vec load(const float* from) { return Vec(MM(loadu_ps)(from)); }
  static Vec load(const Half* from) { return Vec(MM(cvtph_ps)(load_words(from))); }
  static Vec load(const BFloat16* from) { return Vec(from_bits(widened(load_words(from)))); }
  static Vec load(const int8_t* from) { return Vec(MM(cvtepi32_ps)(MM(cvtepi8_epi32)(load_bytes(from)))); }
  static Vec load(const uint8_t* from) { return Vec(MM(cvtepi32_ps)(MM(cvtepu8_epi32)(load_bytes(from)))); }
  // A master in two halves, of which the low one has 16 or 8 bits: `join`.
  template <class Low>
  static Vec load(const BFloat16* high, const Low* low) {
    Ints bits = widened(load_words(high));
    Floats master = from_bits(MM(add_epi32)(bits, load_low(low)));
    return Vec(choose(is_nan(master) | is_inf_or_nan(bits), from_bits(bits), master));
  }
  void store(float* to) const { MM(storeu_ps)(to, x); }
  void store(Half* to) const { store_words(to, narrow(to)); }
  void store(BFloat16* to) const { store_words(to, narrow(to)); }
  // The nearest integers.
  void store(int8_t* to) const { store_bytes(to, bytes_of(MM(cvtps_epi32)(x))); }
  void store(uint8_t* to) const { store_bytes(to, bytes_of(MM(cvtps_epi32)(x))); }
  template <class Low>
  void store(BFloat16* high, Low* low) const {
    Words rounded = narrow(high);
    Ints away = MM(sub_epi32)(bits_of(x), widened(rounded));
    Ints kept = MM(max_epi32)(MM(min_epi32)(away, MM(set1_epi32)(32767)), MM(set1_epi32)(-32767));
    store_words(high, rounded);
    store_low(low, bits_of(choose(is_inf_or_nan(widened(rounded)), MM(setzero_ps)(), from_bits(kept))));
  }

  Words narrow(const Half*) const { return MM(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  Words narrow(const BFloat16*) const {
    Ints bits = bits_of(x), odd = MM(srli_epi32)(bits, 16) & MM(set1_epi32)(1);
    Ints rounded = MM(add_epi32)(bits, MM(add_epi32)(odd, MM(set1_epi32)(0x7fff)));
    Floats chosen = choose(is_nan(x), from_bits(bits | MM(set1_epi32)(0x400000)), from_bits(rounded));
    return words_of(MM(srli_epi32)(bits_of(chosen), 16));
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
};

inline Vec operator+(Vec a, Vec b) { return Vec(MM(add_ps)(a.x, b.x)); }
inline Vec operator-(Vec a, Vec b) { return Vec(MM(sub_ps)(a.x, b.x)); }
inline Vec operator*(Vec a, Vec b) { return Vec(MM(mul_ps)(a.x, b.x)); }
inline Vec operator/(Vec a, Vec b) { return Vec(MM(div_ps)(a.x, b.x)); }
inline Vec square_root(Vec a) { return Vec(MM(sqrt_ps)(a.x)); }
inline Vec magnitude(Vec a) { return Vec(from_bits(bits_of(a.x) & MM(set1_epi32)(0x7fffffff))); }
inline Vec max_bits(Vec a, Vec b) { return Vec(from_bits(MM(max_epu32)(bits_of(a.x), bits_of(b.x)))); }
inline Vec sign(Vec a) {
  Floats zero = MM(setzero_ps)(), up = choose(above(a.x, zero), MM(set1_ps)(1.0f), a.x);
  return Vec(choose(above(zero, a.x), MM(set1_ps)(-1.0f), up));
}
inline Vec is_zero(Vec a) { return Vec(choose(equal(a.x, MM(setzero_ps)()), MM(set1_ps)(1.0f), MM(setzero_ps)())); }

// ---- pairs --------------------------------------------------------------------------------------------------------

// Two vectors, of elements one after the other.
struct Pair {
  Vec a, b;
};

inline Pair joined(Ints low, Ints high) {
  return {Vec(from_bits(from_halves(low, high, 0))), Vec(from_bits(from_halves(low, high, 1)))};
}

inline Mask16 not_finite(Ints high) {  // of high halves
  return above_16(high & MM(set1_epi16)(0x7fff), MM(set1_epi16)(0x7f7f));
}

// In 16 bits each.
template <class T>
inline Ints narrow_pair(Vec a, Vec b, const T* of) {
  return both(a.narrow(of), b.narrow(of));
}
inline Ints narrow_pair(Vec a, Vec b, const BFloat16* of) {
  Ints low = low_halves(bits_of(a.x), bits_of(b.x)), high = high_halves(bits_of(a.x), bits_of(b.x));
  if (any(not_finite(high))) [[unlikely]]
    return narrow_pair<BFloat16>(a, b, of);
  return rounded_up(high, low | (high & MM(set1_epi16)(1)));
}

template <class T>
inline void store_pair(T* to, Vec a, Vec b) {
  store_ints(to, narrow_pair(a, b, to));
}
inline void store_pair(float* to, Vec a, Vec b) {
  a.store(to);
  b.store(to + Vec::kLanes);
}

// The noise of elements from that one on, 16 bits each; `mixed`.
inline Ints noise_from(uint32_t of_state, int element) {
  alignas(64) static constexpr int32_t kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Ints words = MM(mullo_epi32)(load_ints(kNumbers), MM(set1_epi32)(int32_t(kStride)));
  Ints x = MM(add_epi32)(MM(set1_epi32)(int32_t(of_state + element / 2 * kStride)), words);
  x = MM(mullo_epi32)(x ^ MM(srli_epi32)(x, 16), MM(set1_epi32)(0x7feb352d));
  x = MM(mullo_epi32)(x ^ MM(srli_epi32)(x, 15), MM(set1_epi32)(int32_t(0x846ca68b)));
  return x ^ MM(srli_epi32)(x, 16);
}

// Rounded stochastically. What is not rounded up takes the way of single elements.
inline void store_stochastic(BFloat16* to, Vec a, Vec b, uint32_t of_state, int element) {
  Ints low = low_halves(bits_of(a.x), bits_of(b.x)), high = high_halves(bits_of(a.x), bits_of(b.x));
  store_ints(to, with_carry(high, low, noise_from(of_state, element)));
  if (any(above_16(high & MM(set1_epi16)(0x7fff), MM(set1_epi16)(kFixed - 1)))) [[unlikely]]
    store_each_stochastic(to, a, b, of_state, element);
}

// Masters in two halves, by whole words. What is rare, a tie or what is not finite, takes the way of one vector.
inline Ints load_lows(const int16_t* low) { return load_ints(low); }
inline Ints load_lows(const int8_t* low) { return MM(slli_epi16)(MM(cvtepu8_epi16)(load_words(low)), 8); }
inline void store_lows(int16_t* to, Ints low) { store_ints(to, low); }
inline void store_lows(int8_t* to, Ints low) {  // `in_8_bits`: the addition stops at 127 of the upper bits
  Ints odd = MM(srli_epi16)(low, 8) & MM(set1_epi16)(1);
  Ints upper = MM(srai_epi16)(MM(adds_epi16)(low, MM(add_epi16)(odd, MM(set1_epi16)(127))), 8);
  store_words(to, packed(MM(max_epi16)(upper, MM(set1_epi16)(-127))));
}

template <class Low>
inline Pair join_pair(const BFloat16* high, const Low* low) {
  Ints below = load_lows(low), given = load_ints(high);
  Ints above = MM(add_epi16)(given, MM(srai_epi16)(below, 15));
  if (any(not_finite(above) | not_finite(given))) [[unlikely]]
    return {Vec::load(high, low), Vec::load(high + Vec::kLanes, low + Vec::kLanes)};
  return joined(below, above);
}

template <class Low>
inline void split_pair(Vec a, Vec b, BFloat16* high, Low* low) {
  Ints below = low_halves(bits_of(a.x), bits_of(b.x)), above = high_halves(bits_of(a.x), bits_of(b.x));
  Mask16 tie = equal_16(below, MM(set1_epi16)(-32768));
  Ints rounded = MM(add_epi16)(above, MM(srli_epi16)(below, 15));
  if (any(tie | not_finite(above) | not_finite(rounded))) [[unlikely]] {
    a.store(high, low);
    b.store(high + Vec::kLanes, low + Vec::kLanes);
  } else {
    store_ints(high, rounded);
    store_lows(low, below);
  }
}

// ---- 8 bits -------------------------------------------------------------------------------------------------------

// Estimates of what is rounded and stored, by the processor's reciprocals. All that these and rounding make of one is
// less than 13 * 2^-24 of it. So where a little less and a little more have one nearest integer, it is the right one.
constexpr float kLess = 1.0f - 0x1p-20f, kMore = 1.0f + 0x1p-20f;
constexpr bool kEstimates = true;
struct Estimate {
  Vec scale, less, more;
  explicit Estimate(float of) : scale(of), less(kLess * (255.0f / of)), more(kMore * (255.0f / of)) {}

  // Bits, of which one at least is set where an integer is not sure.
  Vec store(Vec value, int8_t* to) const {  // 254 v / (s + |v|)
    Vec d = scale + magnitude(value), r(near_reciprocal(d.x)), x = value * r;
    x = Vec(product_plus(x.x, (Vec(1.0f) - d * r).x, x.x));
    Vec low = shifted(x, Vec(254.0f * kLess)), high = shifted(x, Vec(254.0f * kMore));
    store_bytes(to, bytes_of(bits_of(low.x)));
    return differing(low, high);
  }
  Vec store(Vec root, uint8_t* to) const {  // 255 root(v) / s; 1 at least where v is above 0
    Vec low = shifted(root, less), high = shifted(root, more);
    Floats least = MM(max_ps)(low.x, MM(set1_ps)(kWhole + 1.0f));
    store_bytes(to, bytes_of(bits_of(choose(above(root.x, MM(setzero_ps)()), least, low.x))));
    return differing(low, high);
  }

 private:
  static Vec shifted(Vec x, Vec by) { return Vec(product_plus(x.x, by.x, MM(set1_ps)(kWhole))); }
  static Vec differing(Vec a, Vec b) { return Vec(from_bits(bits_of(a.x) ^ bits_of(b.x))); }
};
inline Vec any_bits(Vec a, Vec b) { return Vec(from_bits(bits_of(a.x) | bits_of(b.x))); }
inline bool has_bits(Vec a) { return any(bits_of(a.x)); }

// The largest bit pattern, unsigned.
inline float largest_of_eight(__m256i x) {
  __m128i four = _mm_max_epu32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  __m128i two = _mm_max_epu32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(two, _mm_shuffle_epi32(two, 1))));
}

// ---- memory -------------------------------------------------------------------------------------------------------

// Past the cache, to an address that is aligned.
inline void stream_pair(float* to, Vec a, Vec b) {
  MM(stream_ps)(to, a.x);
  MM(stream_ps)(to + Vec::kLanes, b.x);
}
template <class T>
inline void stream_pair(T* to, Vec a, Vec b) {
  MM(stream_ps)(reinterpret_cast<float*>(to), from_bits(narrow_pair(a, b, to)));
}
inline void stream_fence() { _mm_sfence(); }
[[gnu::always_inline]] inline void prefetch(const void* at) { _mm_prefetch(static_cast<const char*>(at), _MM_HINT_T0); }

}  // namespace
}  // namespace zero_kernels
