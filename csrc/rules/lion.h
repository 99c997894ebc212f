// Lion: zero_kernels/rules/lion.py.
#pragma once

#include "rule.h"

namespace zero_kernels {

struct Lion {
  static constexpr int kStates = 1;  // exp_avg
  static constexpr bool kDivides = false;

  template <class V>
  struct Own {
    V step_size, decay, beta1, one_minus_beta1, beta2, one_minus_beta2;

    ZK_HOST_DEVICE explicit Own(const float* column)
        : step_size(column[0]),
          decay(column[1]),
          beta1(column[2]),
          one_minus_beta1(column[3]),
          beta2(column[4]),
          one_minus_beta2(column[5]) {}
  };

  template <class V>
  ZK_HOST_DEVICE static inline void update(V g, V& p, V* states, const Own<V>& c) {
    V& m = states[0];
    p = p * c.decay;
    V u = m * c.beta1 + g * c.one_minus_beta1;
    p = p - c.step_size * sign(u);
    m = m * c.beta2 + g * c.one_minus_beta2;
  }
};

}  // namespace zero_kernels
