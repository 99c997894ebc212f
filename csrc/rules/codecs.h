// Forms of state other than fp32, and masters in two halves: the arithmetic of zero_kernels/codecs.py, for one lane. V
// is float or a SIMD vector, as rule.h has it.
#pragma once

#include "../args.h"

namespace zero_kernels {

// The hash lowbias32 (Wellons, "Prospecting for Hash Functions", 2018).
ZK_HOST_DEVICE static inline uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// Between the numbers of which the words of a row are made: zero_kernels/codecs.py says why it is not 1.
constexpr uint32_t kStride = 0x9e3779b9;

// The noise of a row in a step; then of one of its states; and a word of it, which two elements share.
ZK_HOST_DEVICE static inline uint32_t noise_of_row(int32_t key, float step_number) {
  return mixed(mixed(uint32_t(key)) + float_bits(step_number));
}
ZK_HOST_DEVICE static inline uint32_t noise_of_state(uint32_t of_row, int state) { return mixed(of_row + state); }
ZK_HOST_DEVICE static inline uint32_t noise_word(uint32_t of_state, int element) {
  return mixed(of_state + uint32_t(element / 2) * kStride);
}
ZK_HOST_DEVICE static inline uint32_t noise_in(uint32_t word, int element) {
  return element % 2 ? word >> 16 : word & 0xffff;
}

// High halves of magnitudes from this on are not rounded up: of the largest finite bf16, infinities and NaN.
constexpr int16_t kFixed = 0x7f7f;

// `noise`, 16 bits, is added to the lower half of the bits, which is cut off then. NaN stays NaN.
ZK_HOST_DEVICE static inline BFloat16 narrow_stochastic(float x, uint32_t noise) {
  uint32_t bits = float_bits(x);
  if (x != x) return {uint16_t(bits >> 16 | 0x40)};
  return {uint16_t((int16_t(bits >> 16 & 0x7fff) < kFixed ? bits + noise : bits) >> 16)};
}

// Two vectors, an element at a time: `element` is the place of the first in its row.
template <class V>
inline void store_each_stochastic(BFloat16* to, V a, V b, uint32_t of_state, int element) {
  float x[2 * V::kLanes];
  a.store(x);
  b.store(x + V::kLanes);
  for (int i = 0; i < 2 * V::kLanes; ++i)
    to[i] = narrow_stochastic(x[i], noise_in(noise_word(of_state, element + i), element + i));
}

// The root of the largest float, and the largest scale. Roots of inf and finite values above it are clamped to it:
// zero_kernels/codecs.py has the reason.
constexpr float kLargest = 0x1.fffffep63f;

// 0 where the largest of a row is too small.
ZK_HOST_DEVICE static inline float usual_scale(Form form, float largest) {
  if (largest > kLargest && (form == Form::kRoot8 || largest < bits_float(0x7f800000))) return kLargest;
  return largest < (form == Form::kInt8 ? 0x1p-100f : 0x1p-63f) ? 0.0f : largest;
}

// The bits of `bound_of` are compared as unsigned integers. So NaN is above inf, and for roots what is negative, whose
// root is NaN, above all: then the root of the largest is the largest root.
template <class V>
ZK_HOST_DEVICE inline V bound_of(Form form, V value) {
  return form == Form::kInt8 ? magnitude(value) : value + V(0.0f);
}

// The scale of a row, of the largest bound in it.
ZK_HOST_DEVICE static inline float scale_of(Form form, float bound) {
  return usual_scale(form, form == Form::kInt8 ? bound : square_root(bound));
}

// Whether a row of that scale is stored by what follows. Else all of it is stored as 0.
ZK_HOST_DEVICE static inline bool is_usable(float scale) { return scale > 0.0f && scale < bits_float(0x7f800000); }

// Of a value, or a root, and the scale of its row: more than that is there only where the scale is `kLargest`.
ZK_HOST_DEVICE static inline float within(float value, float scale) {
  return value > scale ? scale : value < -scale ? -scale : value;
}

// What is rounded to the nearest integer and stored.
template <class V>
ZK_HOST_DEVICE inline V encoded_int8(V value, V scale) {
  V x = value / scale;
  return V(127.0f) * ((x + x) / (V(1.0f) + magnitude(x)));
}
template <class V>
ZK_HOST_DEVICE inline V encoded_root8(V root, V scale) {
  return max_bits(V(255.0f) * (root / scale), V(1.0f) - is_zero(root));  // 0 is for 0 alone
}
ZK_HOST_DEVICE static inline float encoded(Form form, float value, float scale) {
  return form == Form::kInt8 ? encoded_int8(within(value, scale), scale)
                             : encoded_root8(within(square_root(value), scale), scale);
}

constexpr float kOver127 = 0x1.0204000000000p-7f, kRest127 = 0x1.0204080000000p-28f;
constexpr float kOver255 = 0x1.0100000000000p-8f, kRest255 = 0x1.0101020000000p-24f;

// stored / 127 and stored / 255. Of the 256 numbers there are, the product with the first half of the reciprocal is
// exact, and the sum with the second is rounded as the quotient is: the tests try all.
template <class V>
ZK_HOST_DEVICE inline V over_127(V stored) {
  return stored * V(kOver127) + stored * V(kRest127);
}
template <class V>
ZK_HOST_DEVICE inline V over_255(V stored) {
  return stored * V(kOver255) + stored * V(kRest255);
}

// To be multiplied by the scale.
template <class V>
ZK_HOST_DEVICE inline V unscaled_int8(V stored) {
  V y = over_127(stored);
  return y / (V(2.0f) - magnitude(y));
}

template <class V>
ZK_HOST_DEVICE inline V decoded_root8(V stored, V scale) {
  V root = over_255(stored) * scale;
  return root * root;
}

// A sum with it, of |x| < 2^22, has no fraction left: its last bits are the nearest integer, ties to even.
constexpr float kWhole = 12582912.0f;

ZK_HOST_DEVICE static inline int32_t nearest(float x) {
  return int32_t(float_bits(x + kWhole)) - int32_t(float_bits(kWhole));
}

// A master in two halves: bf16, and what its bits are above or below those. Where 8 bits of the low half are stored,
// they are its upper ones, and the others are 0.
struct Halves {
  BFloat16 high;
  int16_t low;
};

ZK_HOST_DEVICE static inline bool is_finite(BFloat16 high) { return (high.bits & 0x7fff) < 0x7f80; }

// An edited parameter has the low half of its old master. An inf stays inf, and a 0 beside which that leads to NaN is
// 0.
ZK_HOST_DEVICE static inline float join(Halves halves) {
  uint32_t high = uint32_t(halves.high.bits) << 16;
  float master = bits_float(high + uint32_t(int32_t(halves.low)));
  return is_finite(halves.high) && master == master ? master : bits_float(high);
}

// Of a tie, 32768 away, 32767 are kept. Where the high half is inf or NaN, the low half is 0.
ZK_HOST_DEVICE static inline Halves split(float master) {
  Halves halves;
  narrow(master, &halves.high);
  int32_t low = int32_t(float_bits(master) - (uint32_t(halves.high.bits) << 16));
  low = low > 32767 ? 32767 : low < -32767 ? -32767 : low;
  halves.low = is_finite(halves.high) ? int16_t(low) : int16_t(0);
  return halves;
}

// Rounded to 8 bits, to nearest even, from -127 to 127.
ZK_HOST_DEVICE static inline int16_t in_8_bits(int16_t low) {
  int32_t upper = (low + 127 + (low >> 8 & 1)) >> 8;
  return int16_t((upper > 127 ? 127 : upper < -127 ? -127 : upper) * 256);
}

}  // namespace zero_kernels
