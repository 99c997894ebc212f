// AdamW with bf16 gradients and parameters, for rows without unusual values: the same bits in about half of the
// instructions. Division and square root are the sequences that nvcc emits, without their branches for very small and
// very large operands. With fp32 moments, which may be very small, they are nvcc's own. Moments of 8 bits are rounded
// from estimates, unless an estimate is close to a tie. One vote of the warp finds unusual values. Then the warp
// updates both of its rows by step.h.
#pragma once

#include <cmath>

#include "../rules/adamw.h"
#include "step.h"

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

constexpr float kOver254 = 1.0f / 254.0f;
constexpr float kWholeBytes = 0x1.8p31f;  // a sum with it is a multiple of 256

// Within 2^-22 of the reciprocal, or of that of the root, of what is neither very small nor very large.
ZK_HOST_DEVICE inline float near_reciprocal(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}
ZK_HOST_DEVICE inline float near_reciprocal_root(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return float(1.0 / std::sqrt(double(x)));
#endif
}

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
  return fmaf(fmaf(b, q, -a), -one_over_b, q);  // with the signs otherwise -0 would become 0
}

// A thread has eight elements, 16 threads a row, and a warp two: what is done once for a row is done half as often as
// with four.
constexpr int kEight = 8;

// Eight elements as they are stored. `master`: the low halves, or all of it.
struct QuickRaw {
  uint32_t grad[4], high[4], master[8], m[8], v[8];
};

// Eight elements that are updated. What is stored in 8 bits is known when the largest of their row are.
struct QuickEight {
  uint32_t high[4], master[8];    // as they are stored
  float m[kEight], v[kEight];     // moments; of root8 the roots
  uint32_t largest_m, largest_s;  // of these elements, then of the row, of magnitudes and roots: bits, NaN above all
  bool usual;
};
struct QuickMoments {
  uint32_t m[8], v[8];
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

template <int kLow, Form kForm>
ZK_HOST_DEVICE inline QuickRaw load_quick(const StepArgs& args, int64_t i) {
  QuickRaw raw = {};
  load_eight<16>(args.grad, i, raw.grad);
  load_eight<kLow ? 8 * kLow : 32>(args.master, i, raw.master);
  if (kLow) load_eight<16>(args.param_out, i, raw.high);
  load_eight<8 * size_of(kForm)>(args.states[0], i, raw.m);
  load_eight<8 * size_of(kForm)>(args.states[1], i, raw.v);
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

// Whether the options of a row are usual. With fp32 moments all are.
template <Form kForm>
ZK_HOST_DEVICE inline bool is_usual(const AdamW::Own<float>& c) {
  if (kForm == Form::kFloat) return true;
  float correction = c.bias_correction2_sqrt.by;
  return fabsf(c.step_size) <= 1.0f && fabsf(c.decay) <= 1.0f && c.eps >= kLeastEps && c.eps <= 1.0f &&
         correction >= kLeastCorrection && correction <= 1.0f;
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

// Element j of a moment: of 8 bits by the table of what they stand for.
template <Form kForm>
ZK_HOST_DEVICE inline float moment_of(const uint32_t* words, int j, const float* table, float scale) {
  if constexpr (kForm == Form::kFloat) return bits_float(words[j]);
  if constexpr (kForm == Form::kBFloat16) return bits_float(upper_half_of(words, j));
  return table[byte_of(words, j)] * scale;
}

// kForm: of both moments, or kInt8, and kRoot8 of the second.
template <int kLow, Form kForm>
ZK_HOST_DEVICE inline QuickEight update_quick(
    const QuickRaw& raw, float scale_m, float scale_v, const Decoded& decoded, const Coefficients<AdamW, float>& c) {
  float correction = c.own.bias_correction2_sqrt.by, over_correction = quick_reciprocal(correction);
  uint32_t least_m = 0xffffffff, least_v = 0xffffffff;
  float updated[kEight];
  QuickEight of = {};
  of.usual = true;
  ZK_UNROLL
  for (int j = 0; j < kEight; ++j) {
    float p = master_of<kLow>(raw, j), m = moment_of<kForm>(raw.m, j, decoded.int8, scale_m);
    float v = moment_of<kForm>(raw.v, j, decoded.root8, scale_v);
    if (kForm == Form::kInt8) v = v * v;
    of.usual &= fabsf(p) < kMostMaster;
    AdamW::moments(bits_float(upper_half_of(raw.grad, j)) * c.grad_scale, p, m, v, c.own);
    of.m[j] = m;
    of.v[j] = v;
    if constexpr (kForm == Form::kFloat) {
      updated[j] = AdamW::end(p, m, AdamW::divisor(v, c.own), c.own);
      of.usual &= fabsf(updated[j]) < kMostMaster;
    } else {
      uint32_t bits = float_bits(fabsf(m));
      least_m = below(bits, least_m);
      least_v = below(float_bits(v), least_v);
      float s = quick_root(v), divisor = quick_quotient(s, correction, over_correction) + c.own.eps;
      updated[j] = p - c.own.step_size * quick_quotient(m, divisor, quick_reciprocal(divisor));
      if (kForm == Form::kInt8) of.v[j] = s;
      of.largest_m = bits > of.largest_m ? bits : of.largest_m;
      of.largest_s = float_bits(s) > of.largest_s ? float_bits(s) : of.largest_s;
    }
    keep_master<kLow>(of, updated, j);
  }
  of.usual &= least_m >= float_bits(kLeastMoment) - 1 && least_v >= float_bits(kLeastMoment) - 1;
  if (kForm == Form::kBFloat16)  // of 8 bits the largest of the row are asked
    of.usual &= of.largest_m < float_bits(kMostMoment) && of.largest_s < float_bits(kMostRoot);
  return of;
}

// `of.usual` becomes false where an estimate may be wrong. In units of 2^-24 the errors of estimate and arithmetic add
// up to 13 for m, with a reciprocal that is off by two, and to 4 for v; 16 and 5 are allowed for.
ZK_HOST_DEVICE inline QuickMoments moments_in_8_bits(QuickEight& of) {
  float largest_m = bits_float(of.largest_m), largest_s = bits_float(of.largest_s);
  of.usual &= largest_m < kMostMoment && (largest_m >= 2.0f * kLeastMoment || largest_m == 0.0f);
  of.usual &= largest_s < kMostRoot && (largest_s >= kLeastScale || largest_s == 0.0f);
  float most_m = largest_m == 0.0f ? kOver254 : largest_m * kOver254;
  float most_s = largest_s == 0.0f ? 1.0f : largest_s;
  float factor = quick_quotient(255.0f, most_s, quick_reciprocal(most_s));
  QuickMoments to = {};
  ZK_UNROLL
  for (int j = 0; j < kEight; ++j) {
    float x = of.m[j] * ZK_NEAR(near_reciprocal(fmaf(fabsf(of.m[j]), kOver254, most_m))), whole = x + kWhole;
    of.usual &= fmaf(fabsf(x), 0x1p-20f, fabsf(x - (whole - kWhole))) < 0.5f;
    to.m[j / 4] |= (float_bits(whole) & 0xff) << j % 4 * 8;
    float y = of.v[j] * factor, whole_y = y + kWhole;
    of.usual &= fmaf(y, 0x1.4p-22f, fabsf(y - (whole_y - kWhole))) < 0.5f;
    uint32_t least = float_bits(kWhole) + (of.v[j] > 0.0f ? 1 : 0);  // 0 is for 0 alone
    to.v[j / 4] |= ((float_bits(whole_y) > least ? float_bits(whole_y) : least) & 0xff) << j % 4 * 8;
  }
  return to;
}

// As narrow_stochastic, of values that are far from overflow. `element`: the place of the first in its row.
ZK_HOST_DEVICE inline void in_bf16(const float (&x)[kEight], uint32_t of_state, int element, uint32_t* to) {
  ZK_UNROLL
  for (int j = 0; j < kEight; j += 2) {
    uint32_t word = noise_word(of_state, element + j);
    uint32_t first = float_bits(x[j]) + noise_in(word, 0), second = float_bits(x[j + 1]) + noise_in(word, 1);
    to[j / 2] = first >> 16 | (second & 0xffff0000);
  }
}

// What is stored of the moments; `noise`: of the row. Where they have 8 bits, `of.usual` may become false.
template <Form kForm>
ZK_HOST_DEVICE inline QuickMoments stored_moments(QuickEight& of, uint32_t noise, int element) {
  if constexpr (kForm == Form::kInt8) return moments_in_8_bits(of);
  QuickMoments to = {};
  if constexpr (kForm == Form::kBFloat16) {
    in_bf16(of.m, noise_of_state(noise, 0), element, to.m);
    in_bf16(of.v, noise_of_state(noise, 1), element, to.v);
  } else {
    ZK_UNROLL
    for (int j = 0; j < kEight; ++j) {
      to.m[j] = float_bits(of.m[j]);
      to.v[j] = float_bits(of.v[j]);
    }
  }
  return to;
}

template <int kLow, Form kForm>
ZK_HOST_DEVICE inline void store_quick(
    const StepArgs& args, int64_t i, const QuickEight& of, const QuickMoments& moments) {
  store_eight<kLow ? 8 * kLow : 32>(args.master, i, of.master);
  store_eight<16>(args.param_out, i, of.high);
  if (kForm == Form::kInt8 && place_in_row(i) == 0) {
    args.scales[0][row_of(i)] = bits_float(of.largest_m);
    args.scales[1][row_of(i)] = bits_float(of.largest_s);
  }
  store_eight<8 * size_of(kForm)>(args.states[0], i, moments.m);
  store_eight<8 * size_of(kForm)>(args.states[1], i, moments.v);
}

// ---- ways ---------------------------------------------------------------------------------------------------------

// A quick path: for masters of which `low` bytes lie in the low half, or fp32 ones (0), and for moments in `form`, the
// second in kRoot8 where the first is in kInt8.
template <int low, Form form>
struct Quick {
  static constexpr int kLow = low;
  static constexpr Form kForm = form;

  // Four blocks, but where masters are split beside moments of 16 bits or more: these kernels would spill. For moments
  // of 8 bits an H100 had 0.88 of a copy's bandwidth with four, and 0.75 with three.
  static constexpr int kBlocksPerSm = low == 0 || form == Form::kInt8 ? 4 : 3;

  static bool is_for(const Stored& of) {
    return of.grad == DType::kBFloat16 && of.has_output && of.out == DType::kBFloat16 && of.low_size == low &&
           of.forms[0] == form && of.forms[1] == (form == Form::kInt8 ? Form::kRoot8 : form);
  }
};

template <class... Ways>
struct OneOf {
  // Calls run(Type<Quick>) of the one that is for the shards. Returns whether there is one.
  template <class Run>
  static bool choose([[maybe_unused]] const Stored& stored, [[maybe_unused]] Run run) {
    return ((Ways::is_for(stored) && (run(Type<Ways>()), true)) || ...);
  }
};

// A thread has as many elements as one of step.h, but for variants of that.
using QuickWays = std::conditional_t<
    kTile != kThreads * kEight, OneOf<>,
    OneOf<
        Quick<0, Form::kBFloat16>, Quick<0, Form::kInt8>, Quick<1, Form::kFloat>, Quick<1, Form::kBFloat16>,
        Quick<1, Form::kInt8>, Quick<2, Form::kFloat>, Quick<2, Form::kBFloat16>, Quick<2, Form::kInt8>>>;

}  // namespace
}  // namespace zero_kernels
