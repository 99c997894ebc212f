// AMSGrad: zero_kernels/rules/amsgrad.py.
#pragma once

#include "adamw.h"

namespace zero_kernels {

struct AmsGrad {
  static constexpr int kStates = 3;  // exp_avg, exp_avg_sq, max_exp_avg_sq
  static constexpr bool kDivides = true;

  template <class V>
  using Own = AdamW::Own<V>;

  template <class V>
  ZK_HOST_DEVICE static inline V begin(V g, V& p, V* states, const Own<V>& c) {
    AdamW::moments(g, p, states[0], states[1], c);
    states[2] = max_bits(magnitude(states[2]), magnitude(states[1]));
    return AdamW::divisor(states[2], c);
  }

  template <class V>
  ZK_HOST_DEVICE static inline V end(V p, V m, V divisor, const Own<V>& c) {
    return AdamW::end(p, m, divisor, c);
  }
};

}  // namespace zero_kernels
