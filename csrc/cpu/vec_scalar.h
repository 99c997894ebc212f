// One lane: the vector type of processors that have no better one, and of the tests that compare with it.
#pragma once

#include "../rules/codecs.h"

namespace zero_kernels {
namespace {

struct Vec {
  static constexpr int kLanes = 1;
  float x;

  Vec() = default;
  explicit Vec(float value) : x(value) {}

  template <class T>
  static Vec load(const T* from) {
    return Vec(widen(*from));
  }
  template <class T>
  static Vec load_first(const T* from, int) {
    return load(from);
  }
  template <class T>
  void store(T* to) const {
    narrow(x, to);
  }
  static Vec load(const int8_t* from) { return Vec(float(*from)); }
  static Vec load(const uint8_t* from) { return Vec(float(*from)); }
  // The nearest integers.
  void store(int8_t* to) const { *to = int8_t(nearest(x)); }
  void store(uint8_t* to) const { *to = uint8_t(nearest(x)); }
  // A master in two halves, of which the low one has 16 or 8 bits.
  static Vec load(const BFloat16* high, const int16_t* low) { return Vec(join({*high, *low})); }
  static Vec load(const BFloat16* high, const int8_t* low) { return Vec(join({*high, int16_t(*low * 256)})); }
  void store(BFloat16* high, int16_t* low) const {
    Halves halves = split(x);
    *high = halves.high;
    *low = halves.low;
  }
  void store(BFloat16* high, int8_t* low) const {
    Halves halves = split(x);
    *high = halves.high;
    *low = int8_t(in_8_bits(halves.low) / 256);
  }
  template <class T>
  void store_first(T* to, int) const {
    store(to);
  }
};

inline Vec operator+(Vec a, Vec b) { return Vec(a.x + b.x); }
inline Vec operator-(Vec a, Vec b) { return Vec(a.x - b.x); }
inline Vec operator*(Vec a, Vec b) { return Vec(a.x * b.x); }
inline Vec operator/(Vec a, Vec b) { return Vec(a.x / b.x); }
inline Vec square_root(Vec a) { return Vec(zero_kernels::square_root(a.x)); }
inline Vec magnitude(Vec a) { return Vec(zero_kernels::magnitude(a.x)); }
inline Vec max_bits(Vec a, Vec b) { return Vec(zero_kernels::max_bits(a.x, b.x)); }
inline Vec sign(Vec a) { return Vec(zero_kernels::sign(a.x)); }
// 1 where a is 0, of either sign, else 0.
inline Vec is_zero(Vec a) { return Vec(zero_kernels::is_zero(a.x)); }

// Two vectors, of elements one after the other.
struct Pair {
  Vec a, b;
};

// Rounded stochastically; `element` is the place of the first in its row.
inline void store_stochastic(BFloat16* to, Vec a, Vec b, uint32_t of_state, int element) {
  uint32_t word = noise_word(of_state, element);
  to[0] = narrow_stochastic(a.x, noise_in(word, 0));
  to[1] = narrow_stochastic(b.x, noise_in(word, 1));
}

template <class Low>
inline Pair join_pair(const BFloat16* high, const Low* low) {
  return {Vec::load(high, low), Vec::load(high + 1, low + 1)};
}
template <class Low>
inline void split_pair(Vec a, Vec b, BFloat16* high, Low* low) {
  a.store(high, low);
  b.store(high + 1, low + 1);
}
inline Pair unscaled_int8_pair(const int8_t* from) {
  return {unscaled_int8(Vec::load(from)), unscaled_int8(Vec::load(from + 1))};
}

// Estimates of what is stored would save nothing.
constexpr bool kEstimates = false;
struct Estimate {
  explicit Estimate(float) {}
  template <class T>
  Vec store(Vec value, T*) const {
    return value;
  }
};
inline Vec any_bits(Vec a, Vec) { return a; }
inline bool has_bits(Vec) { return true; }

inline float largest_of_line(const Vec (&a)[16]) {
  Vec largest = a[0];
  for (Vec lane : a) largest = max_bits(largest, lane);
  return largest.x;
}

// Two vectors' worth of out-of-cache output.
template <class T>
inline void store_pair(T* to, Vec a, Vec b) {
  a.store(to);
  b.store(to + 1);
}
template <class T>
inline void stream_pair(T* to, Vec a, Vec b) {
  store_pair(to, a, b);
}
inline void stream_fence() {}
inline void prefetch(const void*) {}

}  // namespace
}  // namespace zero_kernels
