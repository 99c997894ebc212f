// AdamW with moments of 8 bits, where no value is unusual: little more than half the instructions, and the same bits.
// Division and square root are the instructions that nvcc makes of them, without the branches for very small and very
// large operands. What is stored is estimated, as estimates.h has it. One vote of the warp finds unusual values; then
// the warp updates both of its rows by encoded_rows.h.
#pragma once

#include "../rules/adamw.h"
#include "encoded_rows.h"

// The tests put an error here that is as large as a GPU's may be.
#if !defined(ZK_NEAR)
#define ZK_NEAR(x) (x)
#endif

namespace zero_kernels {

// What the bytes of the two forms stand for, before the scale of their row: `unscaled_int8`, and `over_255`.
struct Decoded {
  float int8[256], root8[256];
};

constexpr Decoded make_decoded() {
  Decoded of = {};
  for (int stored = -128; stored < 128; ++stored) {
    float y = float(stored) * kOver127 + float(stored) * kRest127;
    of.int8[stored & 0xff] = y / (2.0f - (y < 0.0f ? -y : y));
    of.root8[stored + 128] = float(stored + 128) * kOver255 + float(stored + 128) * kRest255;
  }
  return of;
}

namespace {

// What is usual. Within these bounds no product and no remainder of a quotient or a root is subnormal, and none
// overflows, so that one correction by the remainder rounds as IEEE's operation does.
constexpr float kLeastMoment = 0x1p-100f;  // of both moments, where they are not 0
constexpr float kMostMoment = 0x1p60f, kMostMaster = 0x1p126f;
constexpr float kLeastScale = 0x1p-50f, kMostRoot = 0x1p10f;  // of the roots of second moments: the largest of a row
constexpr float kLeastEps = 0x1p-60f, kLeastCorrection = 0x1p-9f;
constexpr float kLeastBeta1 = 0x1p-10f;  // so that no first moment is -0

constexpr float kOver254 = 1.0f / 254.0f;
constexpr float kWholeBytes = 0x1.8p31f;  // a sum with it is a multiple of 256

ZK_HOST_DEVICE inline float quick_root(float x) {
  float y = near_reciprocal_root(x > kLeastMoment ? x : kLeastMoment), q = x * y;  // of 0: 0, and not 0 * inf
  return fmaf(fmaf(-q, q, x), 0.5f * y, q);
}

// The reciprocal with which `quick_quotient` divides.
ZK_HOST_DEVICE inline float quick_reciprocal(float b) {
  float y = near_reciprocal(b);
  return fmaf(y, fmaf(-b, y, 1.0f), y);
}

ZK_HOST_DEVICE inline float quick_quotient(float a, float b, float one_over_b) {
  float q = a * one_over_b;
  return fmaf(fmaf(-b, q, a), one_over_b, q);
}

// A thread has eight elements, 16 threads a row, and a warp two: what is done once for a row is done half as often as
// with four.
constexpr int kEight = 8;

// Eight elements as they are stored. `master`: the low halves, or all of it.
struct QuickRaw {
  uint32_t grad[4], high[4], master[8], m[2], v[2];
};

// Eight elements that are updated. What is stored of the moments is known when the largest of their row are.
struct QuickEight {
  uint32_t high[4], master[8];  // as they are stored
  float m[kEight], s[kEight];   // s: roots of the second moments
  float largest_m;              // of these elements, then of the row
  uint32_t largest_s;           // bits, so that NaN is above all
  bool usual;
};
struct QuickMoments {
  uint32_t m[2], v[2];
};

// 8, 16 or 32 bytes of `words`.
template <int kBytes, int kWords>
ZK_HOST_DEVICE inline void load_eight(const void* from, int64_t i, uint32_t (&words)[kWords]) {
  constexpr int kAt = kBytes < 16 ? kBytes / 4 : 4;
  using Part = Chunk<uint32_t, kAt>;
  const Part* at = reinterpret_cast<const Part*>(static_cast<const char*>(from) + i * (kBytes / kEight));
  ZK_UNROLL
  for (int w = 0; w < kBytes / 4; w += kAt) {
    Part part = at[w / kAt];
    ZK_UNROLL
    for (int k = 0; k < kAt; ++k) words[w + k] = part.at[k];
  }
}

template <int kBytes, int kWords>
ZK_HOST_DEVICE inline void store_eight(void* to, int64_t i, const uint32_t (&words)[kWords]) {
  constexpr int kAt = kBytes < 16 ? kBytes / 4 : 4;
  using Part = Chunk<uint32_t, kAt>;
  Part* at = reinterpret_cast<Part*>(static_cast<char*>(to) + i * (kBytes / kEight));
  ZK_UNROLL
  for (int w = 0; w < kBytes / 4; w += kAt) {
    Part part;
    ZK_UNROLL
    for (int k = 0; k < kAt; ++k) part.at[k] = words[w + k];
    store_word(at + w / kAt, part);
  }
}

template <int kLow>
ZK_HOST_DEVICE inline QuickRaw load_quick(const EncodedShard& shard, int64_t i) {
  const StepArgs& step = shard.step;
  QuickRaw raw = {};
  load_eight<16>(step.grad, i, raw.grad);
  if constexpr (kLow == 0) {
    load_eight<32>(step.master, i, raw.master);
  } else {
    load_eight<8 * kLow>(shard.low, i, raw.master);
    load_eight<16>(step.param_out, i, raw.high);
  }
  load_eight<8>(step.state(0), i, raw.m);
  load_eight<8>(step.state(1), i, raw.v);
  return raw;
}

// Half or byte j of words, and 256 times the byte, which has a sign.
ZK_HOST_DEVICE inline uint32_t upper_half_of(const uint32_t* words, int j) {  // as fp32
  return j % 2 ? words[j / 2] & 0xffff0000 : words[j / 2] << 16;
}
ZK_HOST_DEVICE inline uint32_t byte_of(const uint32_t* words, int j) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(words[j / 4], 0, 0x4440 | j % 4);
#else
  return words[j / 4] >> j % 4 * 8 & 0xff;
#endif
}
ZK_HOST_DEVICE inline uint32_t upper_byte_of(const uint32_t* words, int j) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(words[j / 4], 0, (j % 4 | 8) << 12 | (j % 4 | 8) << 8 | j % 4 << 4 | 4);
#else
  return uint32_t(int32_t(int8_t(words[j / 4] >> j % 4 * 8)) * 256);
#endif
}

// The smaller of x - 1 and y: 0 is above all.
ZK_HOST_DEVICE inline uint32_t below(uint32_t x, uint32_t y) { return x - 1 < y ? x - 1 : y; }

// Whether the options of a row are usual.
ZK_HOST_DEVICE inline bool is_usual(const AdamW::Own<float>& c) {
  float correction = c.bias_correction2_sqrt.by;
  return !c.l2 && fabsf(c.step_size) <= 1.0f && fabsf(c.decay) <= 1.0f && c.eps >= kLeastEps && c.eps <= 1.0f &&
         correction >= kLeastCorrection && correction <= 1.0f && c.beta1 > kLeastBeta1;
}

template <int kLow>
ZK_HOST_DEVICE inline float master_of(const QuickRaw& raw, int j) {
  if constexpr (kLow == 0) return bits_float(raw.master[j]);
  uint32_t low = kLow == 1 ? upper_byte_of(raw.master, j) : uint32_t(int32_t(upper_half_of(raw.master, j)) >> 16);
  return bits_float(upper_half_of(raw.high, j) + low);
}

// Of p, element j and the one before it, where j is odd.
template <int kLow>
ZK_HOST_DEVICE inline void keep_master(QuickEight& of, const float (&p)[kEight], int j) {
  if (kLow == 0) of.master[j] = float_bits(p[j]);
  if (j % 2 == 0) return;
  of.high[j / 2] = narrow_pair(p[j - 1], p[j]);
  ZK_UNROLL
  for (int k = j - 1; k <= j && kLow; ++k) {
    uint32_t low = float_bits(p[k]) - upper_half_of(of.high, k);
    if (kLow == 1) {
      // As in_8_bits. In a sum of this size multiples of 256 alone are left, and what `split` clamps is clamped here.
      float upper = bits_float(low + float_bits(kWhole)) + kWholeBytes;
      upper = fminf(fmaxf(upper, kWholeBytes + kWhole - 127.0f * 256.0f), kWholeBytes + kWhole + 127.0f * 256.0f);
      of.master[k / 4] |= (float_bits(upper) & 0xff) << k % 4 * 8;
    } else {
      int32_t clamped = int32_t(low) > 32767 ? 32767 : int32_t(low) < -32767 ? -32767 : int32_t(low);
      of.master[k / 2] |= uint32_t(clamped & 0xffff) << k % 2 * 16;
    }
  }
}

template <int kLow>
ZK_HOST_DEVICE inline QuickEight update_quick(
    const QuickRaw& raw, float scale_m, float scale_v, const Decoded& decoded, const Coefficients<AdamW, float>& c) {
  float correction = c.own.bias_correction2_sqrt.by, over_correction = quick_reciprocal(correction);
  uint32_t least_m = 0xffffffff, least_v = 0xffffffff;
  float updated[kEight];
  QuickEight of = {};
  of.usual = true;
  ZK_UNROLL
  for (int j = 0; j < kEight; ++j) {
    float p = master_of<kLow>(raw, j), m = decoded.int8[byte_of(raw.m, j)] * scale_m;
    float root = decoded.root8[byte_of(raw.v, j)] * scale_v, v = root * root;
    of.usual &= fabsf(p) < kMostMaster;
    AdamW::moments(bits_float(upper_half_of(raw.grad, j)) * c.grad_scale, p, m, v, c.own);
    least_m = below(float_bits(fabsf(m)), least_m);
    least_v = below(float_bits(v), least_v);
    float s = quick_root(v), divisor = quick_quotient(s, correction, over_correction) + c.own.eps;
    updated[j] = p - c.own.step_size * quick_quotient(m, divisor, quick_reciprocal(divisor));
    keep_master<kLow>(of, updated, j);
    of.m[j] = m;
    of.s[j] = s;
    of.largest_m = fmaxf(of.largest_m, fabsf(m));  // without NaN, which moments_quick finds
    of.largest_s = float_bits(s) > of.largest_s ? float_bits(s) : of.largest_s;
  }
  of.usual &= least_m >= float_bits(kLeastMoment) - 1 && least_v >= float_bits(kLeastMoment) - 1;
  return of;
}

// `of.usual` becomes false where an estimate may be wrong, as where it is NaN. In units of 2^-24 the errors of estimate
// and arithmetic add up to 13 for m, with a reciprocal that is off by two, and to 4 for v; 16 and 5 are allowed for.
ZK_HOST_DEVICE inline QuickMoments moments_quick(QuickEight& of) {
  float largest_s = bits_float(of.largest_s);
  of.usual &= of.largest_m < kMostMoment && (of.largest_m >= 2.0f * kLeastMoment || of.largest_m == 0.0f);
  of.usual &= largest_s < kMostRoot && (largest_s >= kLeastScale || largest_s == 0.0f);
  float most_m = of.largest_m == 0.0f ? kOver254 : of.largest_m * kOver254;
  float most_s = largest_s == 0.0f ? 1.0f : largest_s;
  float factor = quick_quotient(255.0f, most_s, quick_reciprocal(most_s));
  QuickMoments to = {};
  ZK_UNROLL
  for (int j = 0; j < kEight; ++j) {
    float x = of.m[j] * ZK_NEAR(near_reciprocal(fmaf(fabsf(of.m[j]), kOver254, most_m))), whole = x + kWhole;
    of.usual &= fmaf(fabsf(x), 0x1p-20f, fabsf(x - (whole - kWhole))) < 0.5f;
    to.m[j / 4] |= (float_bits(whole) & 0xff) << j % 4 * 8;
    float y = of.s[j] * factor, whole_y = y + kWhole;
    of.usual &= fmaf(y, 0x1.4p-22f, fabsf(y - (whole_y - kWhole))) < 0.5f;
    uint32_t least = float_bits(kWhole) + (of.s[j] > 0.0f ? 1 : 0);  // 0 is for 0 alone
    to.v[j / 4] |= ((float_bits(whole_y) > least ? float_bits(whole_y) : least) & 0xff) << j % 4 * 8;
  }
  return to;
}

template <int kLow>
ZK_HOST_DEVICE inline void store_quick(
    const EncodedShard& shard, int64_t i, const QuickEight& of, const QuickMoments& moments) {
  const StepArgs& step = shard.step;
  if constexpr (kLow == 0) {
    store_eight<32>(step.master, i, of.master);
    if (step.param_out) store_eight<16>(step.param_out, i, of.high);
  } else {
    store_eight<16>(step.param_out, i, of.high);
    store_eight<8 * kLow>(shard.low, i, of.master);
  }
  if (place_in_row(i) == 0) {
    shard.scale(0)[row_of(i)] = of.largest_m;
    shard.scale(1)[row_of(i)] = bits_float(of.largest_s);
  }
  store_eight<8>(step.state(0), i, moments.m);
  store_eight<8>(step.state(1), i, moments.v);
}

}  // namespace
}  // namespace zero_kernels
