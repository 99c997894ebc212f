// The two passes of Muon over a shard, before its matrices are made orthogonal and after: zero_kernels/rules/muon.py.
#pragma once

#include "rule.h"

namespace zero_kernels {

template <class V>
struct MuonOwn {
  V decay, momentum, share;
  bool takes_less, leads_less, nesterov;

  ZK_HOST_DEVICE explicit MuonOwn(const float* column)
      : decay(column[1]),
        momentum(column[2]),
        share(column[3]),
        takes_less(column[3] < 0.5f),
        leads_less(column[2] < 0.5f),
        nesterov(column[4] != 0.0f) {}
};

struct MuonLookAhead {
  static constexpr int kStates = 1;  // momentum_buffer
  static constexpr bool kDivides = false;

  template <class V>
  using Own = MuonOwn<V>;

  // p is written alone.
  template <class V>
  ZK_HOST_DEVICE static inline void update(V g, V& p, V* states, const Own<V>& c) {
    V& m = states[0];
    m = between(m, g, c.share, c.momentum, c.takes_less);
    p = c.nesterov ? between(g, m, c.momentum, c.share, c.leads_less) : m;
  }

 private:
  // As far from `start` to `end` as `weight` says, counted from the nearer of them: as torch's lerp. `rest`: 1 -
  // weight.
  template <class V>
  ZK_HOST_DEVICE static inline V between(V start, V end, V weight, V rest, bool less) {
    V way = end - start;
    return less ? start + weight * way : end - rest * way;
  }
};

struct MuonSubtract {
  static constexpr int kStates = 1;  // direction
  static constexpr bool kDivides = false;

  template <class V>
  using Own = MuonOwn<V>;

  template <class V>
  ZK_HOST_DEVICE static inline void update(V, V& p, V* states, const Own<V>& c) {
    p = p * c.decay - states[0];
  }
};

}  // namespace zero_kernels
