// The update of one lane. V is float or a SIMD vector with + - * / and square_root.
//
// Every operation is rounded on its own, in this order: compile without contraction (-ffp-contract=off) and
// without -ffast-math, or the backends stop agreeing bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "types.h"

namespace zero_kernels {

constexpr int64_t kRow = 128;  // elements that share one entry of row_slot

// One row of the hyper table, as zero_kernels/hyper.py lays it out.
struct HyperRow {
  float step_size;
  float decay;
  float weight_decay;  // the L2 form; 0 where weight decay is decoupled
  float eps;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float bias_correction2_sqrt;
  float active;
  float grad_factor;
  float padding;
};
constexpr int64_t kHyperColumns = 12;
static_assert(sizeof(HyperRow) == kHyperColumns * sizeof(float));

// A row of the hyper table, spread over the lanes of V.
template <class V>
struct AdamCoefficients {
  V grad_scale, step_size, decay, weight_decay, eps;
  V beta1, one_minus_beta1, beta2, one_minus_beta2, bias_correction2_sqrt;
  bool l2;

  ZK_HOST_DEVICE AdamCoefficients(const HyperRow& row, float scale)
      : grad_scale(scale * row.grad_factor),
        step_size(row.step_size),
        decay(row.decay),
        weight_decay(row.weight_decay),
        eps(row.eps),
        beta1(row.beta1),
        one_minus_beta1(row.one_minus_beta1),
        beta2(row.beta2),
        one_minus_beta2(row.one_minus_beta2),
        bias_correction2_sqrt(row.bias_correction2_sqrt),
        l2(row.weight_decay != 0.0f) {}
};

template <class V>
struct AdamLane {
  V p, m, v;  // master, exp_avg, exp_avg_sq
};

ZK_HOST_DEVICE static inline float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

template <class V>
ZK_HOST_DEVICE inline AdamLane<V> adam_update(V grad, AdamLane<V> lane, const AdamCoefficients<V>& c) {
  V g = grad * c.grad_scale;
  V p = lane.p;
  if (c.l2) g = g + c.weight_decay * p;
  p = p * c.decay;
  V m = lane.m * c.beta1 + g * c.one_minus_beta1;
  V v = lane.v * c.beta2 + (g * c.one_minus_beta2) * g;
  p = p - c.step_size * (m / (square_root(v) / c.bias_correction2_sqrt + c.eps));
  return {p, m, v};
}

}  // namespace zero_kernels
