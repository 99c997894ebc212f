// SGD with momentum, and without: zero_kernels/rules/sgd.py.
#pragma once

#include "rule.h"

namespace zero_kernels {

template <class V>
struct SgdOwn {
  V lr, weight_decay, momentum, keep, take;
  bool decays, nesterov;

  ZK_HOST_DEVICE explicit SgdOwn(const float* column)
      : lr(column[0]),
        weight_decay(column[1]),
        momentum(column[2]),
        keep(column[3]),
        take(column[4]),
        decays(column[1] != 0.0f),
        nesterov(column[5] != 0.0f) {}
};

struct Sgd {
  static constexpr int kStates = 1;  // momentum_buffer
  static constexpr bool kDivides = false;

  template <class V>
  using Own = SgdOwn<V>;

  template <class V>
  ZK_HOST_DEVICE static inline void update(V g, V& p, V* states, const Own<V>& c) {
    V& b = states[0];
    if (c.decays) g = g + c.weight_decay * p;
    b = b * c.keep + g * c.take;
    V u = b;
    if (c.nesterov) u = g + c.momentum * b;
    p = p - c.lr * u;
  }
};

struct SgdPlain {
  static constexpr int kStates = 0;
  static constexpr bool kDivides = false;

  template <class V>
  using Own = SgdOwn<V>;

  template <class V>
  ZK_HOST_DEVICE static inline void update(V g, V& p, V*, const Own<V>& c) {
    if (c.decays) g = g + c.weight_decay * p;
    p = p - c.lr * g;
  }
};

}  // namespace zero_kernels
