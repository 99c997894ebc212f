// AdamW, and Adam with L2 in the gradient: zero_kernels/rules/adamw.py.
#pragma once

#include "rule.h"

namespace zero_kernels {

struct AdamW {
  static constexpr int kStates = 2;  // exp_avg, exp_avg_sq
  static constexpr bool kDivides = true;

  template <class V>
  struct Own {
    V step_size, decay, weight_decay, eps;
    V beta1, one_minus_beta1, beta2, one_minus_beta2;
    Divisor<V> bias_correction2_sqrt;
    bool l2;  // weight_decay is 0 where the decay is decoupled

    ZK_HOST_DEVICE explicit Own(const float* column)
        : step_size(column[0]),
          decay(column[1]),
          weight_decay(column[2]),
          eps(column[3]),
          beta1(column[4]),
          one_minus_beta1(column[5]),
          beta2(column[6]),
          one_minus_beta2(column[7]),
          bias_correction2_sqrt(column[8]),
          l2(column[2] != 0.0f) {}
  };

  // Weight decay and both moments. `p` is decayed.
  template <class V>
  ZK_HOST_DEVICE static inline void moments(V g, V& p, V& m, V& v, const Own<V>& c) {
    if (c.l2) g = g + c.weight_decay * p;
    p = p * c.decay;
    m = m * c.beta1 + g * c.one_minus_beta1;
    v = v * c.beta2 + (g * c.one_minus_beta2) * g;
  }

  // What the first moment is divided by.
  template <class V>
  ZK_HOST_DEVICE static inline V divisor(V v, const Own<V>& c) {
    return square_root(v) / c.bias_correction2_sqrt + c.eps;
  }

  template <class V>
  ZK_HOST_DEVICE static inline V begin(V g, V& p, V* states, const Own<V>& c) {
    moments(g, p, states[0], states[1], c);
    return divisor(states[1], c);
  }

  // The new parameter.
  template <class V>
  ZK_HOST_DEVICE static inline V end(V p, V m, V divisor, const Own<V>& c) {
    return p - c.step_size * (m / divisor);
  }
};

}  // namespace zero_kernels
