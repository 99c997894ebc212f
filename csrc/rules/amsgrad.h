// AMSGrad: zero_kernels/rules/amsgrad.py.
#pragma once

#include "adamw.h"

namespace zero_kernels {

struct AmsGrad {
  static constexpr int kStates = 3;  // exp_avg, exp_avg_sq, max_exp_avg_sq

  template <class V>
  using Own = AdamW::Own<V>;

  template <class V>
  ZK_HOST_DEVICE static inline void update(V g, V& p, V* states, const Own<V>& c) {
    AdamW::moments(g, p, states[0], states[1], c);
    states[2] = max_bits(magnitude(states[2]), magnitude(states[1]));
    p = AdamW::stepped(p, states[0], states[2], c);
  }
};

}  // namespace zero_kernels
