// The norms of grad_stats: the term of a value, and how two are joined. V is float or a SIMD vector, as rule.h has it.
#pragma once

#include "rules/rule.h"

namespace zero_kernels {

struct Magnitude {
  template <class V>
  ZK_HOST_DEVICE static V term(V x) {
    return magnitude(x);
  }
  template <class V>
  ZK_HOST_DEVICE static V join(V acc, V term) {
    return acc + term;
  }
};

struct Square : Magnitude {
  template <class V>
  ZK_HOST_DEVICE static V term(V x) {
    return x * x;
  }
};

struct Largest : Magnitude {
  template <class V>
  ZK_HOST_DEVICE static V join(V acc, V term) {
    return max_bits(acc, term);
  }
};

}  // namespace zero_kernels
