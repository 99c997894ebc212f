// One lane: the vector type of processors that have no better one, and of the tests that compare with it.
#pragma once

#include <cmath>

#include "../float16.h"

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
  template <class T>
  void store_first(T* to, int) const {
    store(to);
  }
};

inline Vec operator+(Vec a, Vec b) { return Vec(a.x + b.x); }
inline Vec operator-(Vec a, Vec b) { return Vec(a.x - b.x); }
inline Vec operator*(Vec a, Vec b) { return Vec(a.x * b.x); }
inline Vec operator/(Vec a, Vec b) { return Vec(a.x / b.x); }
inline Vec square_root(Vec a) { return Vec(std::sqrt(a.x)); }
inline Vec magnitude(Vec a) { return Vec(bits_float(float_bits(a.x) & 0x7fffffff)); }
// The larger bit pattern, for magnitudes: NaN is above inf.
inline Vec max_bits(Vec a, Vec b) { return float_bits(a.x) > float_bits(b.x) ? a : b; }

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
